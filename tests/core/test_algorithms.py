"""Each algorithm as a whole: its traits, and what distinguishes it, in numbers worked out by hand or by enumeration."""

import math

import attrs
import pytest
import torch

import relax_core as rc
from tests.core.ranks import f64, on_ranks

SEQUENCE = {"ratio_level": "sequence", "needs_full_log_probs": True}
WHOLE_TOKENS = {"whole_batch_loss": True, "supports_context_parallel": False}
COMPONENTS = {"reads_components": True, "normalize_rewards": "required", "allows_reward_hooks": False}
TRAITS = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {"global_token_loss": True},
    "gspo": SEQUENCE,
    "gspo_token": SEQUENCE,
    "gmpo": SEQUENCE,
    "sapo": {},
    "cispo": {},
    "clip_cov": WHOLE_TOKENS,
    "kl_cov": WHOLE_TOKENS,
    "rloo": {
        "min_group_size": 2,
        "normalize_rewards": "required",
        "normalize_advantages": "forbidden",
        "reward_kl": "forbidden",
        "global_token_loss": True,
        "on_policy": True,
    },
    "remax": COMPONENTS | {"component_names": ("reward", "greedy_reward"), "on_policy": True},
    "opo": COMPONENTS
    | {
        "component_names": ("reward", "length"),
        "min_group_size": 2,
        "normalize_advantages": "forbidden",
        "on_policy": True,
    },
    "gpg": {"normalize_advantages": "forbidden", "on_policy": True, "complete_batch": True},
    "m2po": WHOLE_TOKENS | {"loss_metrics": ("ppo_kl", "clipfrac", "m2", "m2_cap")},
    "reinforce_plus_plus": {
        "advantage_normalization": "token_global",
        "normalize_advantages": "required",
        "reward_kl": "required",
        "kl_loss": "forbidden",
        "kl_estimator": "k1",
    },
    "reinforce_plus_plus_baseline": {
        "advantage_normalization": "token_global",
        "normalize_advantages": "required",
        "normalize_rewards": "required",
        "min_group_size": 2,
        "allows_reward_hooks": False,
        "reward_kl": "forbidden",
        "kl_loss": "required",
        "kl_estimator": "k2",
    },
    "ppo": {"needs_critic": True},
    "gdpo": COMPONENTS | {"min_group_size": 2, "normalize_advantages": "forbidden", "complete_batch": True},
}
GROUPS = torch.tensor([0, 0, 0, 1, 1])
REWARDS = f64([1.0, 0.0, 0.5, 2.0, 2.0])


def scores(name: str, matrix: torch.Tensor, groups: torch.Tensor = GROUPS) -> torch.Tensor:
    algorithm = rc.get_algorithm(name)
    return algorithm.normalize_rewards(algorithm.hyperparameters(), matrix, groups)


@pytest.mark.parametrize("name", rc.ALGORITHMS)
def test_traits(name: str) -> None:
    traits = rc.get_algorithm(name).traits
    assert attrs.asdict(traits, filter=lambda field, value: value != field.default) == TRAITS[name]


def test_the_registry_is_what_the_traits_are_of() -> None:
    assert set(rc.ALGORITHMS) == set(TRAITS)
    assert all(algorithm.name == name for name, algorithm in rc.ALGORITHMS.items())


MEAN_STD = [2**0.5 / 2 * 2**0.5, -1.0, 0.0, 0.0, 0.0]  # (0.5, -0.5, 0) over a std of 0.5, up to eps
STAGE_ONE = {
    "grpo": MEAN_STD,
    "dapo": MEAN_STD,
    "gspo": MEAN_STD,
    "gspo_token": MEAN_STD,
    "gmpo": MEAN_STD,
    "sapo": MEAN_STD,
    "cispo": MEAN_STD,
    "clip_cov": MEAN_STD,
    "kl_cov": MEAN_STD,
    "dr_grpo": [0.5, -0.5, 0.0, 0.0, 0.0],
    "gpg": [0.5, -0.5, 0.0, 0.0, 0.0],
    "reinforce_plus_plus_baseline": [0.5, -0.5, 0.0, 0.0, 0.0],
    "rloo": [0.75, -0.75, 0.0, 0.0, 0.0],
    "m2po": REWARDS.tolist(),
    "reinforce_plus_plus": REWARDS.tolist(),
    "ppo": REWARDS.tolist(),
}


@pytest.mark.parametrize("name", STAGE_ONE)
def test_stage_one(name: str) -> None:
    out = scores(name, REWARDS[:, None])
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.tensor(STAGE_ONE[name]), rtol=0, atol=3e-6)


def test_remax_subtracts_the_greedy_reward() -> None:
    out = scores("remax", torch.stack([REWARDS, f64([0.5, 0.5, 0.5, 3.0, 3.0])], 1))
    assert out.tolist() == [0.5, -0.5, 0.0, -1.0, -1.0]
    with pytest.raises(ValueError, match="expected the reward components reward, greedy_reward, got 1"):
        scores("remax", REWARDS[:, None])


def test_opo_weighs_the_baseline_by_length() -> None:
    lengths = f64([3.0, 1.0, 0.0, 7.0, 9.0])
    out = scores("opo", torch.stack([REWARDS, lengths], 1))
    torch.testing.assert_close(out, torch.tensor([0.25, -0.75, -0.25, 0.0, 0.0]))
    constant = scores("opo", torch.stack([torch.full((5,), 0.1).double(), lengths], 1))
    assert not constant.any()
    for broken in ([1, 1, 1, 0, 0], [1, 1, 1, 9, -1]):
        with pytest.raises(ValueError, match="lengths must be 0 or more and not all 0 in group 1"):
            scores("opo", torch.stack([REWARDS, f64(broken)], 1))


def test_opo_and_rloo_need_another_sample() -> None:
    for name, matrix in (("rloo", REWARDS[:3, None]), ("opo", torch.stack([REWARDS[:3], f64([1, 2, 3])], 1))):
        with pytest.raises(ValueError, match="group 7 has 1 samples, expected at least 2"):
            scores(name, matrix, torch.tensor([1, 7, 1]))


def test_opo_has_the_baseline_of_least_variance() -> None:
    """Var of (r - b) * g with |g|^2 proportional to length: the weighted mean minimizes E[length (r - b)^2]."""
    lengths = f64([3.0, 1.0, 4.0])
    rewards = f64([1.0, 0.0, 0.5])
    own = scores("opo", torch.stack([rewards, lengths], 1), torch.zeros(3, dtype=torch.long)).double()
    least = (lengths * own.square()).sum()
    for shift in (-0.01, 0.01):
        assert (lengths * (own + shift).square()).sum() > least


def test_gpg_makes_up_for_samples_without_gradient() -> None:
    algorithm, tokens = rc.get_algorithm("gpg"), rc.Tokens.full([1, 2, 0, 1])
    values = f64([0.5, 0.0, -0.5, 0.0])
    out = algorithm.estimate_advantages(algorithm.hyperparameters(), values, tokens)
    assert out.advantages.tolist() == [1.0, 0.0, 0.0, 0.0]
    parts, world = on_ranks(
        [values[:1], values[1:]],
        lambda share, reduce: rc.advantages.scale_by_signal(
            share, rc.Tokens.full([1] * len(share)), segment=rc.whole_batch, reduce=reduce
        ),
    )
    assert torch.cat(parts).tolist() == [1.0, 0.0, -1.0, 0.0]
    assert world.collectives == 2
    segmented = rc.advantages.scale_by_signal(
        f64([1, 0, 0, 1, 1, 1]), rc.Tokens.full([1] * 6), segment=rc.split_by([2, 1, 3])
    )
    assert segmented.tolist() == [2.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    two_of_three = rc.advantages.scale_by_signal(f64([1, 0, 2]), rc.Tokens.full([1] * 3), segment=rc.whole_batch)
    assert two_of_three.tolist() == [1.5, 0.0, 3.0]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", rc.ALGORITHMS)
def test_three_collectives_at_most_whatever_the_number_of_batches(name: str, normalize: bool) -> None:
    need = rc.get_algorithm(name).traits.normalize_advantages
    if need == ("forbidden" if normalize else "required"):
        pytest.skip(f"{name}: {need}")
    tokens = rc.Tokens.full([2] * 40)
    zeros, steps = torch.zeros(tokens.num_tokens).double(), torch.arange(40.0).double()
    for sizes in ([40], [1] * 40):

        def run(share: torch.Tensor, reduce: rc.collectives.Reduce, sizes: list[int] = sizes) -> torch.Tensor:
            bound = rc.pipeline(name, segment=rc.split_by(sizes), reduce=reduce, normalize_advantages=normalize)
            return bound.advantages(share, tokens, kl=zeros, values=zeros).advantages

        results, world = on_ranks([steps, -steps], run)
        assert all(isinstance(result, torch.Tensor) for result in results)
        assert world.collectives <= 3
        _, world = on_ranks([tokens] * 2, lambda share, reduce: rc.pipeline(name, reduce=reduce).weights(share))
        assert world.collectives == 1


def loss(name: str, log_ratio: list[float], advantages: list[float], lengths: list[int], **options: object) -> object:
    algorithm = rc.get_algorithm(name)
    hyperparameters = algorithm.hyperparameters(**options)
    log_probs = f64(log_ratio).requires_grad_()
    zeros = torch.zeros(len(log_ratio)).double()
    result = algorithm.policy_loss(hyperparameters, log_probs, zeros, f64(advantages), rc.Tokens.full(lengths))
    return result, log_probs


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gmpo_clips_each_token_in_log_space(sign: float) -> None:
    log_ratio = [0.9 * sign, -0.1, 0.2 * sign, -0.7 * sign]
    result, log_probs = loss("gmpo", log_ratio, [sign] * 4, [3, 1], eps_clip=0.4)
    first = math.exp((0.4 * sign - 0.1 + 0.2 * sign) / 3)
    torch.testing.assert_close(result.loss.detach(), f64([-sign * first] * 3 + [-sign * math.exp(-0.7 * sign)]))
    assert result.metrics["clipfrac"].tolist() == [1.0, 0.0, 0.0, 0.0]
    result.loss.sum().backward()
    assert log_probs.grad[0] == 0
    torch.testing.assert_close(log_probs.grad[1], f64(-sign * first))


def test_clip_cov_takes_the_gradient_of_the_most_covarying() -> None:
    log_ratio, advantages = [0.1, -1.0, 0.0, 2.0, -0.1], [1.0, -1.0, 0.1, 0.5, 0.2]
    options = {"clip_cov_low": 0.0, "clip_cov_high": 100.0}
    plain, _ = loss("grpo", log_ratio, advantages, [5])
    covariance = [(d - 0.2) * (a - 0.16) for d, a in zip(log_ratio, advantages, strict=True)]
    # Of tokens 1 and 3, whose covariances are the largest, PPO clips both; next is token 2.
    assert sorted(range(5), key=covariance.__getitem__)[::-1][:2] == [1, 3]
    result, log_probs = loss("clip_cov", log_ratio, advantages, [5], **options)
    chosen = max((t for t in (0, 2, 4) if covariance[t] >= 0), key=covariance.__getitem__)
    expected = plain.loss.detach().clone()
    expected[chosen] = 0.0
    torch.testing.assert_close(result.loss.detach(), expected)
    result.loss.sum().backward()
    assert log_probs.grad[chosen] == 0
    everything, _ = loss("clip_cov", log_ratio, advantages, [5], clip_cov_ratio=1.0, **options)
    assert int((everything.loss == 0).sum()) == sum(c >= 0 and t not in (1, 3) for t, c in enumerate(covariance))


def test_kl_cov_makes_the_most_covarying_pay() -> None:
    log_ratio, advantages = [0.1, -1.0, 0.0, 2.0, -0.1], [1.0, -1.0, 0.1, 0.5, 0.2]
    result, log_probs = loss("kl_cov", log_ratio, advantages, [5], kl_cov_coef=3.0)
    expected = -f64(log_ratio).exp() * f64(advantages)
    expected[1] += 3.0
    torch.testing.assert_close(result.loss.detach(), expected)
    result.loss.sum().backward()
    torch.testing.assert_close(log_probs.grad[1], f64(math.exp(-1.0) - 3.0))
    two, _ = loss("kl_cov", log_ratio, advantages, [5], kl_cov_ratio=0.5)
    assert two.metrics["clipfrac"].tolist() == [0, 1, 0, 1, 0]


def test_reducers_of_algorithms() -> None:
    tokens = rc.Tokens.full([1, 3])
    for name, algorithm in rc.ALGORITHMS.items():
        weights = algorithm.reducer(algorithm.hyperparameters(), tokens)
        expected = {"dapo": [1 / 4] * 4, "rloo": [1 / 4] * 4, "dr_grpo": [1 / 2048] * 4}
        torch.testing.assert_close(weights, f64(expected.get(name, [1 / 2] + [1 / 6] * 3)))


def test_a_value_loss_wants_a_critic_and_a_critic_its_loss() -> None:
    ppo = rc.get_algorithm("ppo")
    with pytest.raises(ValueError, match="value_loss is given, but trait needs_critic is False"):
        attrs.evolve(ppo, traits=rc.Traits())
    with pytest.raises(ValueError, match="value_loss is missing, but trait needs_critic is True"):
        attrs.evolve(ppo, value_loss=None)
    assert [name for name, algorithm in rc.ALGORITHMS.items() if algorithm.value_loss is not None] == ["ppo"]
