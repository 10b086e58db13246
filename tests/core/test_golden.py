"""Every golden number that concerns a stage that exists."""

from collections.abc import Callable

import pytest
import torch

import relax_core as rc
from relax_core import advantages, kl, losses, reducers, rewards
from tests.core.ranks import GOLDEN, f64, golden, on_ranks

CASES = sorted(path.stem for path in GOLDEN.glob("[0-9]*.json"))
STAGES = golden("stages")
INPUTS = STAGES["inputs"]
TOKENS = rc.Tokens.full(INPUTS["lengths"])
MASKED = rc.Tokens(torch.tensor(INPUTS["lengths"]), torch.tensor(INPUTS["mask"]).bool())
LOG_PROBS, OLD, REF, ADVANTAGES = (
    f64(INPUTS[name]) for name in ("log_probs", "old_log_probs", "ref_log_probs", "advantages")
)


def close(actual: torch.Tensor, expected: object, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, f64(expected), rtol=0, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_gdpo_is_the_float64_formula(case: str) -> None:
    data = golden(case)
    target = data["outputs"]["formula_numpy_f64_eps1e-4"]
    run = rc.pipeline("gdpo", rc.get_algorithm("gdpo").hyperparameters(gdpo_reward_weights=tuple(data["weights"])))
    scores = run.scores(f64(data["rewards"]), torch.tensor(data["group_ids"]))
    close(scores, target["pre_bn"])
    close(run.advantages(scores, rc.Tokens.full([1] * len(scores))).advantages, target["advantages"])


@pytest.mark.parametrize("case", CASES)
def test_a_group_mean_of_the_summed_reward_is_what_other_systems_compute(case: str) -> None:
    data = golden(case)
    total = f64(data["rewards"]) @ f64(data["weights"])
    groups = torch.tensor(data["group_ids"])
    close(
        rewards.group_mean_std(total, groups, scale=False), data["outputs"]["nvlabs_trl_grpo_no_std_f64"]["advantages"]
    )
    scaled = rewards.group_mean_std(total, groups, eps=1e-4)
    close(scaled, data["outputs"]["nvlabs_trl_grpo_f64"]["advantages"])
    close(
        rewards.group_mean_std(total.float(), groups, eps=1e-4).double(),
        data["outputs"]["nvlabs_trl_grpo_f64"]["advantages"],
        atol=5e-6,
    )


def test_group_mean_std() -> None:
    stage = STAGES["group_mean_std"]
    close(rewards.group_mean_std(f64(stage["rewards"]), torch.zeros(8, dtype=torch.long)), stage["out"])


def test_decoupled() -> None:
    stage = STAGES["decoupled"]
    close(
        rewards.decoupled(f64(stage["components"]), torch.zeros(4, dtype=torch.long), f64(stage["weights"])),
        stage["out"],
    )


def test_whiten_by_segment_and_merged() -> None:
    stage = STAGES["whiten_by_segment"]
    values, tokens = f64(stage["values"]), rc.Tokens.full([1] * 8)
    close(advantages.whiten_samples(values, tokens, segment=rc.split_by(stage["sizes"])), stage["out"])
    merged = advantages.whiten_samples(values, tokens, segment=rc.whole_batch)
    close(merged, stage["merged_into_one_is_different"])
    assert int((merged.sign() != f64(stage["out"]).sign()).sum()) == 4


def test_whiten_over_two_ranks() -> None:
    stage = STAGES["whiten_over_two_ranks"]
    results, _ = on_ranks(
        [f64(stage["rank0"]), f64(stage["rank1"])],
        lambda share, reduce: advantages.whiten_samples(
            share, rc.Tokens.full([1] * len(share)), segment=rc.whole_batch, reduce=reduce
        ),
    )
    close(torch.cat(results), stage["out"])


def test_ppo_clip() -> None:
    loss = losses.ppo_clip(LOG_PROBS, OLD, ADVANTAGES, TOKENS, eps_clip=0.2, eps_clip_high=0.2)
    close(loss.loss, STAGES["ppo_clip"])


VALID = MASKED.mask


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("sapo", lambda *batch: losses.sapo(*batch, tau_pos=1.0, tau_neg=1.05)),
        ("cispo", lambda *batch: losses.cispo(*batch, eps_clip=0.2)),
        ("reinforce", losses.reinforce),
    ],
)
def test_token_losses(name: str, run: Callable[..., rc.TokenLoss]) -> None:
    close(run(LOG_PROBS, OLD, ADVANTAGES, TOKENS).loss, STAGES[name])
    masked = run(LOG_PROBS, OLD, ADVANTAGES, MASKED).loss
    close(masked[VALID], f64(STAGES[name])[VALID].tolist())
    assert not masked[~VALID].any()


def test_gspo() -> None:
    stage = STAGES["gspo"]
    close(MASKED.sample_mean(torch.where(VALID, LOG_PROBS - OLD, 0.0)), stage["log_ratio_per_response"])
    for token_gradient in (False, True):
        loss = losses.gspo(LOG_PROBS, OLD, ADVANTAGES, MASKED, eps_clip=0.2, token_gradient=token_gradient).loss
        close(loss[VALID], f64(stage["loss"])[VALID].tolist())
        assert not loss[~VALID].any()


def test_value_loss() -> None:
    stage = STAGES["value_loss"]
    values, old, returns = (f64(stage[name]) for name in ("values", "old_values", "returns"))
    loss = losses.value_loss(values, old, returns, rc.Tokens.full([3]), value_clip=stage["value_clip"])
    close(loss.loss, stage["out"])
    assert loss.metrics["value_clipfrac"].tolist() == [1.0, 0.0, 0.0]


def test_leave_one_out() -> None:
    stage = STAGES["leave_one_out"]
    close(rewards.leave_one_out(f64(stage["rewards"]), torch.zeros(4, dtype=torch.long)), stage["out"])


@pytest.mark.parametrize("stage", STAGES["gae"], ids=["plain", "discounted"])
def test_gae(stage: dict) -> None:
    tokens, kl_values = rc.Tokens.full([3]), f64(stage["kl"])
    token_rewards = advantages.token_rewards(f64([stage["reward"]]), tokens, kl=kl_values, kl_coef=stage["kl_coef"])
    out = advantages.gae(token_rewards, f64(stage["values"]), tokens, gamma=stage["gamma"], lambd=stage["lambd"])
    close(out.advantages, stage["advantages"])
    close(out.returns, stage["returns"])


def test_discounted_return() -> None:
    stage = STAGES["discounted_return"]
    algorithm = rc.get_algorithm("reinforce_plus_plus")
    hyperparameters = algorithm.hyperparameters(kl_coef=stage["kl_coef"], gamma=stage["gamma"])
    tokens = rc.Tokens(torch.tensor([3]), torch.tensor(stage["mask"]).bool())
    out = algorithm.estimate_advantages(hyperparameters, f64([stage["reward"]]), tokens, kl=f64(stage["kl"]))
    close(out.advantages, stage["out"])


def test_token_global() -> None:
    stage = STAGES["token_global"]
    tokens = rc.Tokens(torch.tensor([5]), torch.tensor(stage["mask"]).bool())
    close(advantages.token_global(f64(stage["advantages"]), tokens), stage["out"])


def test_dual_clip() -> None:
    stage = STAGES["dual_clip"]
    ratios = {name: stage[name] for name in ("eps_clip", "eps_clip_high", "eps_clip_c")}
    log_ratio = f64(stage["log_ratio"])
    loss = losses.ppo_clip(log_ratio, torch.zeros(2).double(), f64(stage["advantages"]), rc.Tokens.full([2]), **ratios)
    close(loss.loss, stage["loss"])


@pytest.mark.parametrize("kind", STAGES["kl"])
def test_kl(kind: str) -> None:
    close(kl.estimate(LOG_PROBS, REF, kind), STAGES["kl"][kind])


def test_mean_over_samples_of_the_masked_token_mean() -> None:
    loss = losses.ppo_clip(LOG_PROBS, OLD, ADVANTAGES, MASKED, eps_clip=0.2).loss
    expected = STAGES["mean_over_samples_of_masked_token_mean_of_ppo_clip"]
    close(reducers.weighted_sum(loss, reducers.sample_mean(MASKED)), expected)
