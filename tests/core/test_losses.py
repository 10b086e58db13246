"""Losses, KL estimators and reducers against numbers and laws of their own."""

import math

import pytest
import torch
from torch import Tensor

import relax_core as rc
from relax_core import kl, losses, reducers
from tests.core.ranks import f64, on_ranks


def masked(lengths: list[int], mask: list[int]) -> rc.Tokens:
    return rc.Tokens(torch.tensor(lengths), torch.tensor(mask).bool())


# --- every loss of the registry -------------------------------------------------------------------------------------

NAMES = list(rc.ALGORITHMS)
# Their value depends on log-probs through a stopped gradient as well, which a numerical derivative sees.
STOPPED = {"cispo": losses.cispo, "gspo_token": losses.gspo}
TOKENS = masked([3, 0, 4, 2], [1, 1, 0, 1, 1, 0, 1, 0, 0])


def loss_of(name: str, log_probs: Tensor, old: Tensor, advantages: Tensor, tokens: rc.Tokens = TOKENS) -> rc.TokenLoss:
    algorithm = rc.get_algorithm(name)
    return algorithm.policy_loss(algorithm.hyperparameters(), log_probs, old, advantages, tokens)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    log_probs, advantages = -torch.rand(9).double() - 0.1, torch.randn(9).double()
    # Ratios within 10 %: away from the kinks of clipping, where no derivative exists.
    return log_probs, log_probs + 0.1 * (torch.rand(9).double() - 0.5), advantages


@pytest.mark.parametrize("name", [name for name in NAMES if name not in STOPPED])
def test_gradcheck(name: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    log_probs, old, advantages = batch
    assert torch.autograd.gradcheck(
        lambda lp: loss_of(name, lp, old, advantages).loss, (log_probs.requires_grad_(),), atol=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
def test_at_ratio_one_the_gradient_is_reinforces(name: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    """Given one advantage for a response, as a group's score is."""
    log_probs, advantages = batch[0].requires_grad_(), batch[2][:4][TOKENS.sample_of]
    weights = reducers.sample_mean(TOKENS)
    reducers.weighted_sum(loss_of(name, log_probs, log_probs.detach(), advantages).loss, weights).backward()
    torch.testing.assert_close(log_probs.grad, -weights * advantages)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_lies_under_the_mask_reaches_nothing(
    name: str, poison: float, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    clean, dirty = ([value.clone() for value in batch] for _ in range(2))
    for value in dirty:
        value[~TOKENS.mask] = poison
    outcomes = []
    for log_probs, old, advantages in (clean, dirty):
        log_probs.requires_grad_()
        result = loss_of(name, log_probs, old, advantages)
        reducers.weighted_sum(result.loss, reducers.token_mean(TOKENS)).backward()
        outcomes.append([result.loss.detach(), log_probs.grad, *result.metrics.values()])
    for expected, actual in zip(*outcomes, strict=True):
        assert torch.equal(expected, actual)
        assert actual.isfinite().all()
    assert not outcomes[1][0][~TOKENS.mask].any()
    assert not outcomes[1][1][~TOKENS.mask].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 0.0), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_dtype_in_is_dtype_out_within_a_bound(
    name: str, dtype: torch.dtype, bound: float, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    exact = loss_of(name, *batch)
    result = loss_of(name, *(value.to(dtype) for value in batch))
    assert {result.loss.dtype} | {metric.dtype for metric in result.metrics.values()} == {dtype}
    torch.testing.assert_close(result.loss.double(), exact.loss, rtol=0, atol=bound)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_untouched_and_gradient_flows_through_log_probs_only(
    name: str, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    copies = [value.clone().requires_grad_() for value in batch]
    result = loss_of(name, *copies)
    result.loss.sum().backward()
    assert all(torch.equal(copy, value) for copy, value in zip(copies, batch, strict=True))
    assert copies[0].grad is not None
    assert copies[1].grad is None
    assert copies[2].grad is None
    assert not any(metric.requires_grad for metric in result.metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_those_of_the_traits(name: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    result = loss_of(name, *batch)
    assert tuple(result.metrics) == rc.get_algorithm(name).traits.loss_metrics
    assert all(metric.ndim == 0 or metric.shape == result.loss.shape for metric in result.metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_extreme_ratios_stay_finite(name: str) -> None:
    log_probs = f64([-1e4, 0.0, -1e4]).requires_grad_()
    tokens = rc.Tokens.full([3])
    loss = loss_of(name, log_probs, f64([0.0, -1e4, -1e4]), f64([1.0, -1.0, 1.0]), tokens).loss
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_checked(name: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    log_probs, old, advantages = batch
    with pytest.raises(TypeError):
        loss_of(name, log_probs, old[:-1], advantages)
    with pytest.raises(TypeError):
        loss_of(name, log_probs, old, advantages[:, None])
    with pytest.raises(ValueError, match="9 values for 2 tokens"):
        loss_of(name, log_probs, old, advantages, rc.Tokens.full([2]))


# --- clipping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        (1.5, 1.0, -1.28, 1.0, 0.0),
        (1.5, -1.0, 1.5, 0.0, 1.5),
        (0.5, 1.0, -0.5, 0.0, -0.5),
        (0.5, -1.0, 0.8, 1.0, 0.0),
        (1.25, 1.0, -1.25, 0.0, -1.25),
        (5.0, -1.0, 3.0, 0.0, 0.0),
        (2.9, -1.0, 2.9, 0.0, 2.9),
    ],
)
def test_clip_higher_and_dual_clip(
    ratio: float, advantage: float, loss: float, clipped: float, gradient: float
) -> None:
    log_probs = f64([math.log(ratio)]).requires_grad_()
    options = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": 3.0}
    result = losses.ppo_clip(log_probs, f64([0.0]), f64([advantage]), rc.Tokens.full([1]), **options)
    result.loss.sum().backward()
    torch.testing.assert_close(result.loss.detach(), f64([loss]))
    torch.testing.assert_close(log_probs.grad, f64([gradient]))
    assert result.metrics["clipfrac"].item() == clipped
    torch.testing.assert_close(result.metrics["ppo_kl"], f64([-math.log(ratio)]))


@pytest.mark.parametrize("parameter", ["eps_clip", "eps_clip_high", "eps_clip_c"])
def test_every_parameter_changes_the_loss_on_a_witness(parameter: str) -> None:
    def loss(**options: float) -> Tensor:
        log_ratio, advantages = f64([1.0, -1.0, 2.0, -2.0]), f64([1.0, -1.0, -1.0, 1.0])
        options = {"eps_clip": 0.2, "eps_clip_high": 0.3, "eps_clip_c": 3.0} | options
        return losses.ppo_clip(log_ratio, torch.zeros(4).double(), advantages, rc.Tokens.full([4]), **options).loss

    assert not torch.equal(loss(), loss(**{parameter: 1.5 if parameter == "eps_clip_c" else 0.5}))


def test_the_largest_scores_are_chosen_and_of_equal_ones_the_first() -> None:
    tokens = rc.Tokens(torch.tensor([6]), torch.tensor([1, 1, 1, 1, 0, 1]).bool())
    scores, valid = f64([3, 5, 3, 3, 9, -1]), tokens.mask
    for share, chosen in ((0.2, [1]), (0.4, [0, 1]), (0.79, [0, 1, 2]), (0.8, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3, 5])):
        assert losses.largest(scores, valid, share, tokens).nonzero()[:, 0].tolist() == chosen
    assert losses.largest(scores, valid, 0.0, tokens).tolist() == [False, True, False, False, False, False]
    assert losses.largest(scores, scores < 4, 0.4, tokens).nonzero()[:, 0].tolist() == [0, 2]
    assert not losses.largest(scores, scores > 10, 1.0, tokens).any()


# --- KL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_far_from_the_reference_is_finite(kind: kl.Kind) -> None:
    log_probs = torch.tensor([-200.0, -0.1, -5.0], requires_grad=True)
    value = kl.estimate(log_probs, torch.tensor([-0.1, -200.0, -5.0]), kind)
    value.sum().backward()
    assert value.isfinite().all()
    assert log_probs.grad.isfinite().all()
    assert value[2] == 0
    if kind == "low_var_kl":
        assert value.abs().max() == 10
        assert log_probs.grad[0] == 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_rising_above_the_reference_raises_the_penalty(kind: kl.Kind) -> None:
    log_probs = f64([-1.0]).requires_grad_()
    kl.estimate(log_probs, f64([-1.5]), kind).backward()
    assert log_probs.grad > 0


def test_k3_is_accurate_where_policies_are_close() -> None:
    d = torch.tensor([1e-3, -2e-3])
    exact = torch.special.expm1(-d.double()) + d.double()
    torch.testing.assert_close(kl.estimate(d, torch.zeros(2), "k3").double(), exact, rtol=2e-4, atol=0)


def test_k1_and_k3_are_the_divergence_in_expectation() -> None:
    p, q = f64([0.7, 0.3]), f64([0.4, 0.6])
    divergence = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p * kl.estimate(p.log(), q.log(), kind)).sum(), divergence)


def test_importance_multiplies_before_the_clamp_and_is_a_constant() -> None:
    weight = f64([0.5, 100.0]).requires_grad_()
    log_probs = f64([-3.0, -3.0]).requires_grad_()
    value = kl.estimate(log_probs, f64([-1.0, -1.0]), "low_var_kl", weight)
    k3 = math.exp(2) - 3
    torch.testing.assert_close(value.detach(), f64([0.5 * k3, 10.0]))
    value.sum().backward()
    assert weight.grad is None


# --- reducers -------------------------------------------------------------------------------------------------------


def test_sample_mean_token_mean_and_constant_length() -> None:
    tokens = masked([2, 3, 1], [1, 0, 1, 1, 0, 0])
    loss = f64([6.0, float("nan"), 1.0, 2.0, 100.0, 100.0])
    assert reducers.weighted_sum(loss, reducers.sample_mean(tokens)).item() == pytest.approx((6 + 1.5) / 2)
    assert reducers.weighted_sum(loss, reducers.token_mean(tokens)).item() == pytest.approx(3.0)
    assert reducers.weighted_sum(loss, reducers.constant_length(tokens, 10)).item() == pytest.approx(0.45)
    with pytest.raises(ValueError, match="positive"):
        reducers.constant_length(tokens, 0)


def test_token_mean_counts_valid_tokens_only() -> None:
    tokens = masked([2, 2], [1, 0, 1, 0])
    loss = f64([1, 100, 1, -50]).requires_grad_()
    total = reducers.weighted_sum(loss, reducers.token_mean(tokens))
    total.backward()
    assert total.item() == 1.0
    assert loss.grad.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert reducers.token_mean(masked([4, 4], [1] * 4 + [0] * 4)).max() == 0.25


def test_a_token_mean_over_unequal_micro_batches() -> None:
    tokens = rc.Tokens.full([100, 900])
    weights, loss = reducers.token_mean(tokens), torch.cat([torch.full((100,), 0.5), torch.full((900,), 0.3)])
    parts = [tokens.token_slice(start, start + 1) for start in range(2)]
    assert sum(reducers.weighted_sum(loss[part], weights[part]).item() for part in parts) == pytest.approx(0.32)


def test_a_token_mean_is_the_same_for_every_split() -> None:
    """Lengths 1 and 3, advantages 1 and -1: the loss is 0.5, and each token has a quarter of the gradient."""
    tokens, log_probs = rc.Tokens.full([1, 3]), torch.zeros(4).double().requires_grad_()
    loss = losses.ppo_clip(log_probs, log_probs.detach(), f64([1, -1, -1, -1]), tokens, eps_clip=0.2).loss
    weights = reducers.token_mean(tokens)
    for cut in (0, 1, 2, 4):
        parts = [reducers.weighted_sum(loss[part], weights[part]) for part in (slice(cut), slice(cut, None))]
        (gradient,) = torch.autograd.grad(sum(parts), log_probs, retain_graph=True)
        assert sum(parts).item() == 0.5
        assert gradient.tolist() == [-0.25, 0.25, 0.25, 0.25]


def test_a_sample_mean_over_four_ranks_is_a_mean() -> None:
    def run(tokens: rc.Tokens, reduce: rc.collectives.Reduce) -> float:
        return reducers.weighted_sum(torch.ones(tokens.num_tokens), reducers.sample_mean(tokens, reduce=reduce)).item()

    shares, _ = on_ranks([rc.Tokens.full([2, 5])] * 4, run)
    assert shares == [0.25] * 4


def test_reducers_over_ranks_are_those_of_one_process() -> None:
    whole = masked([2, 3, 1, 4], [1, 0, 1, 1, 1, 0, 0, 1, 1, 1])
    shares = [whole.select(0, 1), whole.select(1, 1), whole.select(1, 4)]
    for reducer in (
        reducers.sample_mean,
        reducers.token_mean,
        lambda t, reduce=rc.local: reducers.constant_length(t, 7, reduce=reduce),
    ):
        results, world = on_ranks(shares, lambda share, reduce, reducer=reducer: reducer(share, reduce=reduce))
        assert torch.equal(torch.cat(results), reducer(whole))
        assert world.collectives == 1


def test_no_valid_token_anywhere_is_defined() -> None:
    tokens = masked([2, 0], [0, 0])
    for weights in (reducers.sample_mean(tokens), reducers.token_mean(tokens), reducers.constant_length(tokens, 5)):
        assert reducers.weighted_sum(f64([float("nan"), 1.0]), weights).item() == 0.0


def test_a_bound_that_is_a_multiple_of_the_value_counts_as_clipped() -> None:
    values, advantages = torch.tensor([0.4, 0.8, 0.9, 2.4]), torch.tensor([-1.0, -1.0, -1.0, 1.0])
    inside, clipped = losses.clip_by_sign(values, advantages, 0.8, 1.2)
    torch.testing.assert_close(inside, torch.tensor([0.8, 0.8, 0.9, 1.2]), rtol=0, atol=0)
    assert clipped.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_float32_advantages_do_not_narrow_float64_log_probs() -> None:
    tokens = rc.Tokens.full([3])
    log_probs, old = f64([-1.0, -2.0, -0.7]), f64([-1.1, -1.9, -0.7 + 1e-12])
    narrow = torch.tensor([1.0, -2.0, 0.5])
    found = losses.ppo_clip(log_probs, old, narrow, tokens, eps_clip=0.2)
    expected = losses.ppo_clip(log_probs, old, narrow.double(), tokens, eps_clip=0.2)
    assert found.loss.dtype == torch.float64
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=0)
