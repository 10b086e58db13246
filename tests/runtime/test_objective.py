"""The objective of a run against NumPy, and every declared setting against a witness that it changes."""

from collections.abc import Callable, Mapping

import attrs
import numpy as np
import pytest
import torch

from relax.adapter import Objective, imitation_loss
from relax.batches import Evidence, group_ids, sequences_of
from relax.config import configure
from relax.data.samples import Sample
from relax.errors import RelaxError
from relax.megatron.critic import ValueBatch
from relax.megatron.trainer import MicroBatch
from relax.rewards.hooks import RewardHook
from relax_core import reducers
from tests.runtime.scripted import sample

KEYS = ("digit", "letter")
WEIGHTS = (1.0, -0.5)
LENGTHS = (3, 1, 4, 2, 5, 2, 2, 6, 1, 3, 3, 2)


def objective(**values: object) -> Objective:
    chosen = {"gdpo_reward_keys": KEYS, "gdpo_reward_weights": WEIGHTS, "n_samples_per_prompt": 3}
    if values.get("advantage_estimator", "gdpo") != "gdpo":
        chosen = {"n_samples_per_prompt": 3, "reward_key": "digit"}
    return Objective.of(configure(**{**chosen, "rollout_batch_size": 4, **values}))


def samples(seed: int = 0) -> list[Sample]:
    """Four groups of three, of different scale; one component is flat in one of them."""
    chance = np.random.default_rng(seed)
    made = []
    for index, length in enumerate(LENGTHS):
        group = 10 + index // 3
        rewards = {"digit": float(chance.integers(3)), "letter": 5.0 if group == 11 else float(chance.normal(100, 7))}
        made.append(sample(group, rewards, length, log_prob=-2.0))
    return made


def by_hand(made: list[Sample], sizes: list[int]) -> np.ndarray:
    """GDPO in NumPy (arXiv 2601.05242, Eqs. 4-6): one number per sample."""
    rewards = np.array([[s.rewards[key] for key in KEYS] for s in made])
    groups = np.array([s.group for s in made])
    combined = np.zeros(len(made))
    for group in set(groups.tolist()):
        rows = groups == group
        x = rewards[rows]
        z = (x - x.mean(0)) / (x.std(0, ddof=1) + 1e-4)
        combined[rows] = (z * np.array(WEIGHTS)).sum(1)
    parts = np.split(combined, np.cumsum(sizes)[:-1])
    return np.concatenate([(part - part.mean()) / (part.std(ddof=1) + 1e-4) for part in parts])


@pytest.mark.parametrize("sizes", [[12], [6, 6], [3, 9], [3, 3, 6]])
def test_gdpo_whitens_each_optimizer_batch_by_itself(sizes: list[int]) -> None:
    made = samples()
    batches = objective().batches(made, sizes)
    assert [len(batch.sequences) for batch in batches] == sizes
    ours = torch.cat([batch.advantages for batch in batches]).numpy()
    np.testing.assert_allclose(ours, np.repeat(by_hand(made, sizes), LENGTHS), rtol=1e-6, atol=1e-7)
    if len(sizes) > 1:
        assert np.abs(by_hand(made, sizes) - by_hand(made, [12])).max() > 0.01


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("remax", [1.0 - 0.5, 3.0 - 0.5, 2.0 - 0.25, 2.0 - 0.25]),
        # Baselines sum(length * reward) / sum(length): (1 * 1 + 3 * 3) / 4 and 2.
        ("opo", [1.0 - 2.5, 3.0 - 2.5, 0.0, 0.0]),
    ],
)
def test_components_that_the_run_brings(name: str, expected: list[float]) -> None:
    rows = [(4, 1.0, 1, 0.5), (4, 3.0, 3, 0.5), (8, 2.0, 2, 0.25), (8, 2.0, 5, 0.25)]
    made = [
        attrs.evolve(sample(group, {"digit": reward}, length), greedy_reward=greedy)
        for group, reward, length, greedy in rows
    ]
    assert objective(advantage_estimator=name).scores(made).tolist() == expected


def test_groups_go_by_id_and_not_by_place() -> None:
    made = samples()
    order = np.random.default_rng(3).permutation(len(made))
    (batch,) = objective().batches([made[i] for i in order], [12])
    wanted = np.repeat(by_hand(made, [12])[order], np.array(LENGTHS)[order])
    np.testing.assert_allclose(batch.advantages.numpy(), wanted, rtol=1e-6, atol=1e-7)


def test_a_batch_holds_what_belongs_to_its_samples() -> None:
    made = [attrs.evolve(s, completion=attrs.evolve(s.completion, log_probs=(-float(i),) * n))
            for i, (s, n) in enumerate(zip(samples(), LENGTHS, strict=True))]  # fmt: skip
    old = torch.arange(float(sum(LENGTHS)))
    first, second = objective(num_steps_per_rollout=2).batches(made, [6, 6], Evidence(old))
    assert torch.cat((first.evidence.old_log_probs, second.evidence.old_log_probs)).equal(old)
    assert second.rollout_log_probs.tolist() == [-float(i) for i in range(6, 12) for _ in range(LENGTHS[i])]
    for batch, lengths in ((first, LENGTHS[:6]), (second, LENGTHS[6:])):
        wanted = [1 / (6 * n) for n in lengths for _ in range(n)]
        np.testing.assert_allclose(batch.weights.numpy(), wanted, rtol=1e-6)


def test_a_flat_group_carries_no_signal() -> None:
    groups = [[sample(g, {"digit": float(i) * (g == 2), "letter": 3.0}) for i in range(3)] for g in (5, 2, 9)]
    assert objective().carry_signal(groups) == [False, True, False]


def inputs(made: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Current and old log-probs and entropies, [tokens]: far enough apart for every clip to matter."""
    chance = torch.Generator().manual_seed(1)
    count = sum(LENGTHS)
    old = -2 + torch.randn(count, generator=chance)
    return old + 0.8 * torch.randn(count, generator=chance), old, torch.rand(count, generator=chance)


def reference() -> torch.Tensor:
    return -2 + 0.3 * torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(2))


def evaluate(goal: Objective, cuts: tuple[int, ...] = (12,)) -> tuple[float, torch.Tensor, Mapping[str, float]]:
    """Loss, gradient in the log-probs and metrics of all samples, in micro-batches that end at `cuts`."""
    made = samples()
    log_probs, old, entropy = inputs(made)
    log_probs.requires_grad_()
    (batch,) = goal.batches(made, [12], Evidence(old, reference()))
    total, metrics = torch.zeros(()), {}
    for start, stop in zip((0, *cuts), cuts, strict=False):
        span = batch.tokens.token_slice(start, stop)
        loss, parts = goal.loss(batch, MicroBatch(start, stop, log_probs[span], entropy[span]))
        total = total + loss
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in parts.items()}
    total.backward()
    return float(total.detach()), log_probs.grad, metrics


@pytest.mark.parametrize("cuts", [(6, 12), (1, 2, 3, 12), (5, 5, 12), tuple(range(1, 13))])
@pytest.mark.parametrize(
    "values", [{}, {"calculate_per_token_loss": True}, {"advantage_estimator": "gspo"}, {"use_tis": True}]
)
def test_micro_batches_change_nothing(values: Mapping[str, object], cuts: tuple[int, ...]) -> None:
    whole, in_parts = evaluate(objective(**values)), evaluate(objective(**values), cuts)
    assert in_parts[0] == pytest.approx(whole[0], rel=1e-5)
    torch.testing.assert_close(in_parts[1], whole[1])
    assert in_parts[2] == pytest.approx(whole[2], rel=1e-5, abs=1e-7)
    assert whole[2]["loss"] == pytest.approx(whole[0])


def test_the_loss_is_the_clipped_surrogate_by_hand() -> None:
    made = samples()
    log_probs, old, _ = (x.double().numpy() for x in inputs(made))
    advantages = np.repeat(by_hand(made, [12]), LENGTHS)
    ratio = np.exp(log_probs - old)
    per_token = np.maximum(-ratio * advantages, -np.clip(ratio, 0.8, 1.2) * advantages)
    weights = np.repeat([1 / (12 * n) for n in LENGTHS], LENGTHS)
    loss, _, metrics = evaluate(objective())
    assert loss == pytest.approx((weights * per_token).sum(), rel=1e-5)
    assert metrics["clipfrac"] == pytest.approx(
        (weights * (-np.clip(ratio, 0.8, 1.2) * advantages > -ratio * advantages)).sum(), rel=1e-5
    )
    loss, _, _ = evaluate(objective(calculate_per_token_loss=True))
    assert loss == pytest.approx(per_token.mean(), rel=1e-5)


RPP = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1}


@pytest.mark.parametrize(
    ("values", "change"),
    [
        ({}, {"eps_clip": 0.1}),
        ({}, {"eps_clip_high": 0.4}),
        ({}, {"eps_clip_c": 1.5}),
        ({}, {"gdpo_reward_weights": (1.0, 0.5)}),
        ({}, {"calculate_per_token_loss": True}),
        ({}, {"entropy_coef": 0.1}),
        ({}, {"use_tis": True}),
        ({"use_tis": True}, {"tis_clip": 1.1}),
        ({"use_tis": True}, {"tis_clip_low": 0.9}),
        ({}, {"use_opsm": True}),
        ({}, {"use_kl_loss": True, "kl_loss_coef": 0.1}),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, {"kl_loss_type": "k2"}),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, {"kl_loss_type": "k3"}),
        (RPP, {"kl_coef": 0.2}),
        (RPP, {"gamma": 0.5}),
        ({"use_opsm": True}, {"opsm_delta": 10.0}),
        ({"advantage_estimator": "grpo"}, {"disable_grpo_std_normalization": True}),
        ({"advantage_estimator": "grpo"}, {"normalize_advantages": True}),
        ({"advantage_estimator": "grpo"}, {"disable_rewards_normalization": True}),
        ({"advantage_estimator": "grpo"}, {"reward_key": "letter"}),
        ({"advantage_estimator": "sapo"}, {"sapo_tau_pos": 3.0}),
        ({"advantage_estimator": "dr_grpo"}, {"dr_grpo_length": 7}),
    ],
    ids=str,
)
def test_every_setting_changes_the_loss(values: Mapping[str, object], change: Mapping[str, object]) -> None:
    before, after = evaluate(objective(**values))[0], evaluate(objective(**{**values, **change}))[0]
    assert np.isfinite([before, after]).all()
    assert before != pytest.approx(after, rel=1e-4)


def test_without_old_log_probs_the_policy_is_compared_with_itself() -> None:
    made = samples()
    log_probs, _, entropy = inputs(made)
    (batch,) = objective().batches(made, [12])
    _, metrics = objective().loss(batch, MicroBatch(0, 12, log_probs.requires_grad_(), entropy))
    assert metrics["ppo_kl"] == 0
    assert metrics["clipfrac"] == 0
    wanted = (np.repeat([1 / (12 * n) for n in LENGTHS], LENGTHS) * entropy.numpy()).sum()
    assert float(metrics["entropy"]) == pytest.approx(wanted, rel=1e-5)


def test_rewards_that_the_algorithm_cannot_use_are_the_users_to_mend() -> None:
    idle = [sample(4, {"digit": 1.0}, length=0) for _ in range(3)]
    goal = objective(advantage_estimator="opo")
    with pytest.raises(RelaxError, match=r"--advantage-estimator opo, rewards digit: .*group 4"):
        goal.scores(idle)


def test_imitation_is_the_mean_negative_log_prob() -> None:
    made = samples()
    log_probs, _, entropy = inputs(made)
    tokens = sequences_of(made).tokens
    weights = reducers.token_mean(tokens).float()
    parts: list[Callable[[], object]] = [
        imitation_loss(tokens, weights, MicroBatch(a, b, log_probs[s], entropy[s]))[0]
        for a, b in ((0, 5), (5, 12))
        for s in [tokens.token_slice(a, b)]
    ]
    assert float(sum(parts)) == pytest.approx(float(-log_probs.mean()), rel=1e-5)
    assert group_ids(made).tolist() == [10] * 3 + [11] * 3 + [12] * 3 + [13] * 3


def test_the_kl_in_the_reward_is_the_old_policys_by_hand() -> None:
    """REINFORCE++ at gamma 1, arXiv 2501.03262: what is still to come of reward and penalty, normalized over tokens."""
    made = samples()
    _, old, _ = inputs(made)
    (batch,) = objective(**RPP).batches(made, [12], Evidence(old, reference()))
    rewards = np.array([s.rewards["digit"] for s in made])
    penalties = np.split(0.1 * (old - reference()).double().numpy(), np.cumsum(LENGTHS)[:-1])
    returns = np.concatenate(
        [reward - np.cumsum(penalty[::-1])[::-1] for reward, penalty in zip(rewards, penalties, strict=True)]
    )
    wanted = (returns - returns.mean()) / returns.std()
    np.testing.assert_allclose(batch.advantages.numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_the_kl_loss_adds_its_coefficient_times_the_estimate_by_hand() -> None:
    log_probs, old, _ = (x.double().numpy() for x in inputs(samples()))
    weights = np.repeat([1 / (12 * n) for n in LENGTHS], LENGTHS)
    distance = log_probs - reference().double().numpy()
    wanted = (weights * np.exp(log_probs - old) * distance**2 / 2).sum()  # weighed: the samples are the old policy's
    plain, _, _ = evaluate(objective())
    loss, _, metrics = evaluate(objective(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k2"))
    assert loss - plain == pytest.approx(0.3 * wanted, rel=1e-4)
    assert metrics["kl_loss"] == pytest.approx(wanted, rel=1e-5)


def by_letter(asked: list[Sample]) -> list[float]:
    return [float(s.rewards["letter"]) for s in asked]


def test_the_first_hook_stands_in_for_the_reward_stage() -> None:
    made = samples()
    hooks = {"custom_reward_post_process_path": f"{__name__}.by_letter"}
    for more in ({}, {"agentic_custom_advantage_path": "nowhere.at_all"}, {"disable_rewards_normalization": True}):
        goal = objective(advantage_estimator="grpo", **hooks, **more)
        assert goal.scores(made).tolist() == by_letter(made)
    flat = [[sample(g, {"digit": float(i), "letter": float(g)}) for i in range(3)] for g in (1, 2)]
    assert goal.carry_signal(flat) == [False, False]  # the hook is asked, and not the reward it stands in for
    other = objective(advantage_estimator="grpo", agentic_custom_advantage_path=f"{__name__}.by_letter")
    assert other.scores(made).tolist() == by_letter(made)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ([1.0], "expected 12 numbers, one for each sample, got"),
        (None, "expected 12 numbers"),
        ([float("nan")] * 12, "expected a finite number for each sample, got nan"),
        ([True] * 12, "got True"),
        ([1e39] * 12, r"got 1e\+39"),
    ],
)
def test_a_hook_that_answers_nonsense_is_named(answer: object, told: str) -> None:
    hook = RewardHook("--custom-reward-post-process-path", "here.hook", lambda asked: answer)
    with pytest.raises(RelaxError, match=r"--custom-reward-post-process-path here.hook: .*" + told):
        hook(samples())


def test_the_critic_learns_the_returns_by_hand() -> None:
    """PPO at gamma = lambd = 1: the return of every token is its response's reward."""
    made = samples()
    _, old, _ = inputs(made)
    before, now = reference(), reference() + 0.05
    goal = objective(advantage_estimator="ppo")
    first, second = goal.batches(made, [6, 6], Evidence(old, None, before))
    rewards = np.repeat([s.rewards["digit"] for s in made], LENGTHS)
    np.testing.assert_allclose(torch.cat((first.returns, second.returns)).numpy(), rewards, rtol=1e-5, atol=1e-5)
    advantages = torch.cat((first.advantages, second.advantages)).numpy()
    np.testing.assert_allclose(advantages, rewards - before.numpy(), rtol=1e-5, atol=1e-5)
    start = sum(LENGTHS[:6])
    loss = sum(
        goal.value_loss(second, ValueBatch(a, b, now[start:][second.tokens.token_slice(a, b)]))[0]
        for a, b in ((0, 2), (2, 6))
    )
    weights = np.repeat([1 / (6 * n) for n in LENGTHS[6:]], LENGTHS[6:])
    assert float(loss) == pytest.approx((weights * (now.numpy() - rewards)[start:] ** 2).sum(), rel=1e-4)
