"""Corrections, m2po, stopped gradients and KL losses, against numbers and enumeration."""

import math

import pytest
import torch
from torch import Tensor

import relax_core as rc
from relax_core import corrections, kl, losses
from tests.core.ranks import f64

TOKENS = rc.Tokens(torch.tensor([2, 2]), torch.tensor([1, 1, 1, 0]).bool())
ONE = rc.TokenLoss(f64([1.0, 2.0, 3.0, 0.0]), {})
OLD = f64([0.0, 0.0, 0.0, float("nan")])
ROLLOUT = -f64([10.0, 0.1, 1.5, 1.0]).log()


def test_truncated_importance_clamps_every_ratio() -> None:
    out = corrections.truncated_importance(ONE, OLD, ROLLOUT, TOKENS, low=0.5, high=2.0)
    torch.testing.assert_close(out.loss, f64([2.0, 1.0, 4.5, 0.0]))
    torch.testing.assert_close(out.metrics["tis"], f64([10.0, 0.1, 1.5, 0.0]))
    assert out.metrics["tis_clipfrac"].tolist() == [1, 1, 0, 0]


def test_masked_importance_drops_what_is_outside() -> None:
    out = corrections.masked_importance(ONE, OLD, ROLLOUT, TOKENS, low=0.5, high=2.0)
    torch.testing.assert_close(out.loss, f64([0.0, 0.0, 4.5, 0.0]))
    assert out.metrics["tis_clipfrac"].tolist() == [1, 1, 0, 0]


def test_ratios_without_bound_stay_finite() -> None:
    tokens, far = rc.Tokens.full([2]), f64([1e4, -1e4])
    loss = rc.TokenLoss(f64([0.0, 3.0]), {})
    for correct in (corrections.truncated_importance, corrections.masked_importance):
        out = correct(loss, far, torch.zeros(2).double(), tokens, low=0.5, high=2.0)
        assert out.loss.tolist() == [0.0, 1.5 if correct is corrections.truncated_importance else 0.0]
        assert out.metrics["tis"].isfinite().all()


def test_the_bounds_themselves_are_inside() -> None:
    tokens, loss = rc.Tokens.full([2]), rc.TokenLoss(f64([1.0, 1.0]), {})
    out = corrections.masked_importance(loss, f64([0.0, 0.0]), f64([0.0, 0.0]), tokens, low=1.0, high=1.0)
    assert out.loss.tolist() == [1.0, 1.0]
    kept = corrections.off_policy_masking(loss, f64([0, 0]), f64([0.5, 0.5]), f64([-1, -1]), tokens, delta=0.5)
    assert kept.loss.tolist() == [1.0, 1.0]


def test_importance_weights_are_constants() -> None:
    log_probs, advantages = f64([-0.5]).requires_grad_(), f64([2.0])
    tokens = rc.Tokens.full([1])
    loss = losses.reinforce(log_probs, log_probs, advantages, tokens)
    corrections.truncated_importance(loss, log_probs, f64([-1.0]), tokens).loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, -math.exp(0.5) * advantages)


def test_off_policy_masking_drops_bad_responses_that_drifted() -> None:
    tokens = rc.Tokens.full([2, 2, 2])
    log_probs = f64([0.0, -0.1, 0.0, -0.1, 0.1, 0.0])
    advantages, loss = f64([-1, -1, 1, 1, -1, -1]), rc.TokenLoss(torch.ones(6).double(), {})
    out = corrections.off_policy_masking(loss, log_probs, torch.zeros(6).double(), advantages, tokens)
    assert out.loss.tolist() == [0, 0, 1, 1, 1, 1]
    assert out.metrics["opsm_clipfrac"].tolist() == [1, 1, 0, 0, 0, 0]
    lenient = corrections.off_policy_masking(loss, log_probs, torch.zeros(6).double(), advantages, tokens, delta=0.06)
    assert lenient.loss.tolist() == [1] * 6


def test_entropy_and_kl_terms() -> None:
    nan = float("nan")
    out = corrections.with_entropy(ONE, f64([1.0, 2.0, 3.0, nan]), TOKENS, coef=0.5)
    assert out.loss.tolist() == [0.5, 1.0, 1.5, 0.0]
    out = corrections.with_kl(out, f64([1.0, 1.0, 1.0, nan]), TOKENS, coef=2.0)
    assert out.loss.tolist() == [2.5, 3.0, 3.5, 0.0]
    assert set(out.metrics) == {"entropy", "kl_loss"}


def test_factors_commute_and_terms_commute() -> None:
    torch.manual_seed(10)
    log_probs, advantages = torch.randn(4).double(), torch.randn(4).double()
    factors = [
        lambda loss: corrections.truncated_importance(loss, OLD, ROLLOUT, TOKENS),
        lambda loss: corrections.off_policy_masking(loss, log_probs, OLD, advantages, TOKENS),
    ]
    terms = [
        lambda loss: corrections.with_kl(loss, log_probs, TOKENS, coef=0.1),
        lambda loss: corrections.with_entropy(loss, log_probs, TOKENS, coef=0.2),
    ]
    for first, second in (factors, terms):
        one, other = second(first(ONE)), first(second(ONE))
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-15, atol=1e-15)
        assert set(one.metrics) == set(other.metrics)


# --- KL as a loss -----------------------------------------------------------------------------------------------------


def two_outcomes(kind: kl.Kind, logit: Tensor, ref: Tensor, sampled: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The exact expectation, over both outcomes of a softmax, of `kl.loss`'s gradient; and the gradient of the KL."""
    log_p = torch.log_softmax(torch.stack([logit, torch.zeros_like(logit)]), 0)
    behind = log_p.detach() if sampled is None else sampled
    weight = None if sampled is None else (log_p.detach() - behind).exp()
    expectation = (behind.exp() * kl.loss(log_p, ref, kind, weight)).sum()
    divergence = (log_p.exp() * (log_p - ref)).sum()
    return tuple(torch.autograd.grad(value, logit, retain_graph=True)[0] for value in (expectation, divergence))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("logit", [-2.0, 0.0, 0.7])
def test_the_gradient_of_a_kl_loss_is_the_kls(kind: kl.Kind, logit: float) -> None:
    ref = f64([0.3, 0.7]).log()
    estimated, exact = two_outcomes(kind, f64(logit).requires_grad_(), ref)
    torch.testing.assert_close(estimated, exact)
    elsewhere = f64([0.6, 0.4]).log()
    estimated, exact = two_outcomes(kind, f64(logit).requires_grad_(), ref, elsewhere)
    torch.testing.assert_close(estimated, exact)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_without_the_score_function_term_it_would_not_be(kind: kl.Kind) -> None:
    logit = f64(0.7).requires_grad_()
    log_p, ref = torch.log_softmax(torch.stack([logit, f64(0.0)]), 0), f64([0.3, 0.7]).log()
    plain = (log_p.detach().exp() * kl.estimate(log_p, ref, kind)).sum()
    wrong = torch.autograd.grad(plain, logit)[0]
    assert (wrong - two_outcomes(kind, f64(0.7).requires_grad_(), ref)[1]).abs() > 0.02


def test_the_value_of_a_kl_loss_is_the_estimate() -> None:
    log_probs, ref = torch.randn(5).double(), torch.randn(5).double()
    for kind in ("k1", "k2", "k3", "low_var_kl"):
        assert torch.equal(kl.loss(log_probs, ref, kind), kl.estimate(log_probs, ref, kind))


# --- stopped gradients ------------------------------------------------------------------------------------------------


def test_cispo_weighs_with_the_clipped_ratio() -> None:
    log_probs = f64([0.5, 1.0, 6.0, 0.5]).log().requires_grad_()
    loss = losses.cispo(
        log_probs, torch.zeros(4).double(), f64([-1, 1, 1, 1]), rc.Tokens.full([4]), eps_clip=1.0, eps_clip_high=4.0
    )
    loss.loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, f64([0.5, -1.0, -5.0, -0.5]))
    assert loss.metrics["clipfrac"].tolist() == [0, 0, 1, 0]
    narrow = losses.cispo(f64([0.5]).log(), f64([0.0]), f64([-1.0]), rc.Tokens.full([1]), eps_clip=0.2)
    assert narrow.loss.item() == pytest.approx(0.8 * math.log(0.5))


def test_gspo_token_has_each_tokens_own_gradient() -> None:
    log_probs = f64([-0.1, -0.3, -0.2]).requires_grad_()
    old, advantages, tokens = f64([-0.12, -0.31, -0.2]), f64([1.0, -2.0, 0.5]), rc.Tokens.full([3])
    losses.gspo(log_probs, old, advantages, tokens, eps_clip=0.2, token_gradient=True).loss.sum().backward()
    ratio = math.exp((log_probs.detach() - old).mean().item())
    torch.testing.assert_close(log_probs.grad, -ratio * advantages)


# --- m2po -------------------------------------------------------------------------------------------------------------


def m2po_cap_by_bisection(log_ratio: list[float], advantages: list[float], budget: float) -> float | None:
    harmful = [abs(d) for d, a in zip(log_ratio, advantages, strict=True) if d * a > 0]
    if not harmful or sum(d * d for d in harmful) / len(harmful) <= budget:
        return None
    low, high = 0.0, max(harmful)
    for _ in range(200):
        middle = (low + high) / 2
        kept = sum(min(d, middle) ** 2 for d in harmful) / len(harmful) <= budget
        low, high = (middle, high) if kept else (low, middle)
    return low


@pytest.mark.parametrize("budget", [1e-4, 0.01, 0.3, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_m2po_caps_at_the_budget(budget: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_ratio, advantages = (torch.randn(12, generator=generator).double() for _ in range(2))
    zeros, tokens = torch.zeros(12).double(), rc.Tokens.full([5, 7])
    out = losses.m2po(log_ratio, zeros, advantages, tokens, budget=budget)
    harmful = log_ratio[log_ratio * advantages > 0]
    cap = m2po_cap_by_bisection(log_ratio.tolist(), advantages.tolist(), budget)
    low, high = (1.0, math.inf) if cap is None else (max(1 - math.exp(-cap), 0.3), max(math.exp(cap) - 1, 0.5))
    expected = losses.ppo_clip(log_ratio, zeros, advantages, tokens, eps_clip=low, eps_clip_high=high)
    torch.testing.assert_close(out.loss, expected.loss)
    assert out.metrics["m2"].item() == pytest.approx(harmful.square().mean().item())
    assert out.metrics["m2_cap"].item() == pytest.approx(harmful.abs().max().item() if cap is None else cap)


@pytest.mark.parametrize("tokens", [rc.Tokens.full([2]), rc.Tokens.full([]), TOKENS.select(1, 1)])
def test_m2po_without_a_harmful_token_clips_nothing(tokens: rc.Tokens) -> None:
    count = tokens.num_tokens
    log_ratio = f64([1.0, -3.0][:count])
    out = losses.m2po(log_ratio, torch.zeros(count).double(), f64([-1.0, 1.0][:count]), tokens, budget=0.01)
    torch.testing.assert_close(out.loss, log_ratio.exp() * f64([1.0, -1.0][:count]))
    assert out.metrics["m2_cap"].item() == 0.0


def test_m2po_with_one_harmful_token() -> None:
    out = losses.m2po(f64([0.6, 0.1]), f64([0.0, 0.0]), f64([1.0, -1.0]), rc.Tokens.full([2]), budget=0.25)
    assert out.metrics["m2"].item() == pytest.approx(0.36)
    assert out.metrics["m2_cap"].item() == pytest.approx(0.5)


# --- leave one out ----------------------------------------------------------------------------------------------------


def test_leave_one_out_where_the_others_are_equal() -> None:
    for group in ([0, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95], [1] + [0.3] * 15):
        out = rc.rewards.leave_one_out(f64(group), torch.zeros(len(group), dtype=torch.long))
        others = f64([(sum(group) - r) / (len(group) - 1) for r in group])
        torch.testing.assert_close(out, f64(group) - others, rtol=0, atol=1e-15)
    assert not rc.rewards.leave_one_out(torch.full((7,), 0.35), torch.zeros(7, dtype=torch.long)).any()
    assert rc.rewards.leave_one_out(f64([100, 0]), torch.tensor([1, 1])).tolist() == [100.0, -100.0]


def test_leave_one_out_refuses_what_has_no_other() -> None:
    with pytest.raises(ValueError, match="group 4 has 1 samples, expected at least 2"):
        rc.rewards.leave_one_out(f64([1, 3, 5]), torch.tensor([2, 2, 4]))
    with pytest.raises(ValueError, match=r"group 2 has rewards \[nan\] at samples \[2\]"):
        rc.rewards.leave_one_out(f64([1, 3, float("nan"), 2]), torch.tensor([1, 1, 2, 2]))


def test_overlong_penalty() -> None:
    lengths = torch.tensor([10, 80, 90, 100, 120])
    assert rc.rewards.overlong_penalty(lengths, max_length=100, buffer=20).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert rc.rewards.overlong_penalty(lengths, max_length=100, buffer=100).tolist() == [-0.1, -0.8, -0.9, -1.0, -1.0]
    for buffer in (0, -1, 101):
        with pytest.raises(ValueError, match=f"buffer must be 1 to max_length .100. tokens, got {buffer}"):
            rc.rewards.overlong_penalty(lengths, max_length=100, buffer=buffer)


# --- hyperparameters are wired ----------------------------------------------------------------------------------------

WITNESSES = {
    "eps_clip": 0.05,
    "eps_clip_high": 0.6,
    "eps_clip_c": 1.1,
    "sapo_tau_pos": 2.0,
    "sapo_tau_neg": 2.0,
    "m2po_budget": 1.0,
    "dr_grpo_length": 7.0,
    "disable_grpo_std_normalization": True,
    "gdpo_reward_weights": (1.0, 3.0),
    "kl_coef": 0.5,
    "clip_cov_ratio": 0.5,
    "clip_cov_low": 4.9,
    "clip_cov_high": 1.01,
    "kl_cov_ratio": 0.5,
    "kl_cov_coef": 3.0,
    "gamma": 0.5,
    "lambd": 0.5,
    "value_clip": 0.01,
}


@pytest.mark.parametrize(
    ("name", "field"),
    [(name, field.name) for name in rc.ALGORITHMS for field in rc.get_algorithm(name).hyperparameters.__attrs_attrs__],
)
def test_every_declared_hyperparameter_changes_something(name: str, field: str) -> None:
    algorithm = rc.get_algorithm(name)
    generator = torch.Generator().manual_seed(1)
    components = 1 + algorithm.traits.reads_components
    matrix, groups = torch.rand(8, components, generator=generator).double(), torch.tensor([0, 0, 1, 1] * 2)
    tokens = rc.Tokens.full([5] * 8)
    log_ratio, kl_values, values = (torch.randn(40, generator=generator).double() for _ in range(3))

    def everything(**changed: object) -> list[Tensor]:
        hyperparameters = algorithm.hyperparameters(**changed)
        scores = algorithm.normalize_rewards(hyperparameters, matrix, groups)
        found = algorithm.estimate_advantages(hyperparameters, scores, tokens, kl=kl_values, values=values)
        advantages = 2 * log_ratio.roll(3)
        loss = algorithm.policy_loss(hyperparameters, log_ratio, log_ratio - values / 2, advantages, tokens)
        out = [scores, found.advantages, found.returns, loss.loss, algorithm.reducer(hyperparameters, tokens)]
        if algorithm.value_loss is not None:
            out.append(algorithm.value_loss(hyperparameters, values, values + 1, kl_values, tokens).loss)
        return out

    plain, changed = everything(), everything(**{field: WITNESSES[field]})
    assert not all(torch.equal(one, other) for one, other in zip(plain, changed, strict=True))


def test_dapo_wants_the_upper_clip_above_the_lower() -> None:
    dapo = rc.get_algorithm("dapo")
    assert dapo.hyperparameters().clip_high == 0.28
    for wrong in ({"eps_clip_high": 0.2}, {"eps_clip": 0.3}):
        with pytest.raises(ValueError, match="dapo wants eps_clip_high"):
            dapo.hyperparameters(**wrong)
