"""Losses, returns and KL terms: the formula, its gradient, and what must not matter to either."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import relax_core as rc
from property_tests import reference
from property_tests.strategies import numbers, seeds, tokens
from relax_core import advantages, corrections, kl, losses, reducers

NAMES = list(rc.ALGORITHMS)
CHOOSING = ("clip_cov", "kl_cov")  # where two covariances are as good as equal, a rounding decides which token it is
GEOMETRY = st.tuples(tokens(), seeds())


def drawn(geometry: tuple[rc.Tokens, int], spread: float = 0.5) -> tuple[rc.Tokens, Tensor, Tensor, Tensor]:
    """Log-probs, old ones within a factor of about 1 +- spread, and advantages with ties and zeros."""
    batch, seed = geometry
    generator = torch.Generator().manual_seed(seed)
    log_probs, noise, level = (torch.randn(batch.num_tokens, generator=generator).double() for _ in range(3))
    return batch, -log_probs.abs(), -log_probs.abs() + spread * noise, (level * 2).round() / 2


def loss_of(name: str, log_probs: Tensor, old: Tensor, advantage: Tensor, batch: rc.Tokens) -> rc.TokenLoss:
    algorithm = rc.get_algorithm(name)
    return algorithm.policy_loss(algorithm.hyperparameters(), log_probs, old, advantage, batch)


def rows_of(batch: rc.Tokens) -> list[np.ndarray]:
    """Each response's tokens that count."""
    parts = [batch.token_slice(sample, sample + 1) for sample in range(batch.num_samples)]
    return [np.arange(part.start, part.stop)[batch.mask[part].numpy()] for part in parts]


@pytest.mark.parametrize("name", reference.LOSSES)
@given(geometry=GEOMETRY, spread=st.sampled_from([0.0, 0.01, 0.3, 3.0]), scale=st.sampled_from([1e-30, 1.0, 1e30]))
def test_a_loss_is_its_formula(name, geometry, spread, scale):
    batch, log_probs, old, advantage = drawn(geometry, spread)
    advantage = advantage * scale
    copies = [value.clone() for value in (log_probs, old, advantage)]
    out = loss_of(name, log_probs, old, advantage, batch)
    assert all(torch.equal(one, other) for one, other in zip((log_probs, old, advantage), copies, strict=True))
    right = reference.LOSSES[name](log_probs.numpy(), old.numpy(), advantage.numpy(), rows_of(batch))
    expected = torch.where(batch.mask, torch.from_numpy(right), 0.0)
    torch.testing.assert_close(out.loss, expected, rtol=1e-11, atol=1e-12 * scale)
    assert not out.loss[~batch.mask].any()
    assert torch.equal(out.metrics["ppo_kl"], torch.where(batch.mask, old - log_probs, 0.0))


@pytest.mark.parametrize("name", CHOOSING)
@given(geometry=GEOMETRY, share=st.sampled_from([0.0, 0.05, 0.3, 1.0]))
def test_the_tokens_that_covary_most_are_chosen(name, geometry, share):
    """Of numbers whose sums are exact, so that covariances are the same to the bit, however they are added up."""
    batch, seed = geometry
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-16, 17, (3, batch.num_tokens), generator=generator).double()
    log_probs, old, advantage = -steps[0].abs() / 8, steps[1] / 64 - steps[0].abs() / 8, steps[2] / 4
    rows = rows_of(batch)
    options = {"kl_cov_ratio": share, "kl_cov_coef": 3.0}
    if name == "clip_cov":
        options = {"clip_cov_ratio": share, "clip_cov_low": 0.25, "clip_cov_high": 4.0}
    algorithm = rc.get_algorithm(name)
    out = algorithm.policy_loss(algorithm.hyperparameters(**options), log_probs, old, advantage, batch)
    lp, before, a = log_probs.numpy(), old.numpy(), advantage.numpy()
    expected, chosen = reference.covarying(lp, before, a, rows, share, 3.0 if name == "kl_cov" else None)
    torch.testing.assert_close(out.loss, torch.where(batch.mask, torch.from_numpy(expected), 0.0))
    assert torch.equal(out.metrics["clipfrac"] * batch.mask, torch.from_numpy(chosen))


# The others' values depend on log-probs through a stopped gradient as well, which differences see.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("cispo", "gspo_token", *CHOOSING)])
@settings(max_examples=8)
@given(geometry=GEOMETRY)
def test_the_gradient_is_that_of_differences(name, geometry):
    """Within 10 % of a ratio of 1, and without advantages of 0: away from the kinks of clipping."""
    batch, log_probs, old, advantage = drawn(geometry, 0.03)
    advantage = advantage + torch.where(advantage == 0, 0.25, 0.0)
    old = torch.where((log_probs - old).abs() < 1e-4, log_probs - 0.01, old)
    function = lambda leaf: loss_of(name, leaf, old, advantage, batch).loss  # noqa: E731
    assert torch.autograd.gradcheck(function, (log_probs.requires_grad_(),), atol=1e-6)


@settings(max_examples=20)
@given(geometry=GEOMETRY)
def test_the_value_losss_too(geometry):
    batch, values, old, target = drawn(geometry, 0.03)
    expected = reference.value(values.numpy(), old.numpy(), target.numpy())
    loss = lambda leaf: losses.value_loss(leaf, old, target, batch, value_clip=0.2).loss  # noqa: E731
    torch.testing.assert_close(loss(values), torch.where(batch.mask, torch.from_numpy(expected), 0.0))
    assert torch.autograd.gradcheck(loss, (values.requires_grad_(),), atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@given(geometry=GEOMETRY)
def test_at_ratio_one_the_gradient_is_reinforces(name, geometry):
    """Given one advantage for a response, as a group's score is; but for the tokens that clip_cov drops on purpose."""
    batch, log_probs, _, _ = drawn(geometry)
    advantage = batch.per_token(torch.linspace(-2, 3, batch.num_samples).double())
    out = loss_of(name, log_probs.requires_grad_(), log_probs.detach(), advantage, batch)
    (gradient,) = torch.autograd.grad(reducers.weighted_sum(out.loss, reducers.sample_mean(batch)), log_probs)
    kept = 1 - out.metrics["clipfrac"] if name == "clip_cov" else 1
    torch.testing.assert_close(gradient, -reducers.sample_mean(batch) * advantage * kept)


def as_rows(batch: rc.Tokens, extra: int) -> rc.Tokens:
    """The same tokens as padded rows, each with `extra` more beyond the longest, all of the padding masked."""
    time = max(batch.lengths.tolist()) + extra
    mask = torch.nn.functional.pad(batch.to_padded(batch.mask, fill=False), (0, extra))
    return rc.Tokens(torch.full((batch.num_samples,), time), mask.flatten())


@pytest.mark.parametrize("name", NAMES)
@given(geometry=GEOMETRY, extra=st.integers(0, 3), fill=st.sampled_from([0.0, -7.0, float("nan")]))
def test_padded_losses_are_the_ragged_ones(name, geometry, extra, fill):
    batch, *values = drawn(geometry)
    padded = as_rows(batch, extra)
    spread = [torch.nn.functional.pad(batch.to_padded(v, fill=fill), (0, extra), value=fill) for v in values]
    rows = loss_of(name, *(value.flatten() for value in spread), padded).loss.view(batch.num_samples, -1)
    torch.testing.assert_close(batch.from_padded(rows), loss_of(name, *values, batch).loss, rtol=1e-12, atol=1e-12)
    assert rows.isfinite().all()


@given(data=st.data(), batch=tokens(), extra=st.integers(0, 3), gamma=st.floats(0, 1), lambd=st.floats(0, 1))
def test_padded_advantages_are_the_ragged_ones(data, batch, extra, gamma, lambd):
    padded, nan = as_rows(batch, extra), float("nan")
    r, v = data.draw(numbers(batch.num_tokens)), data.draw(numbers(batch.num_tokens))

    def both(function):
        spread = [
            torch.nn.functional.pad(batch.to_padded(x, fill=nan), (0, extra), value=nan).flatten() for x in (r, v)
        ]
        rows = function(*spread, padded).view(batch.num_samples, -1)
        assert rows.isfinite().all()
        return batch.from_padded(rows), function(r, v, batch)

    for kind in ("whiten", "token_global"):
        rows, ragged = both(lambda r, v, t, kind=kind: advantages.normalize(r, t, kind))
        assert torch.equal(rows, ragged)
    for function in (
        lambda r, v, t: advantages.gae(r, v, t, gamma=gamma, lambd=lambd).advantages,
        lambda r, v, t: advantages.gae(r, v, t, gamma=gamma, lambd=lambd).returns,
        lambda r, v, t: advantages.discounted_returns(r, t, gamma=gamma),
    ):
        rows, ragged = both(function)
        torch.testing.assert_close(rows, ragged, rtol=1e-12, atol=1e-12 * float(r.abs().sum() + v.abs().sum()))


@given(data=st.data(), batch=tokens(), gamma=st.floats(0, 1), lambd=st.floats(0, 1))
def test_returns_are_the_recursions(data, batch, gamma, lambd):
    r, v = data.draw(numbers(batch.num_tokens)), data.draw(numbers(batch.num_tokens))
    copies = r.clone(), v.clone()
    scale = 1e-12 * float(r.abs().sum() + 3 * v.abs().sum())
    out = advantages.gae(r, v, batch, gamma=gamma, lambd=lambd).advantages
    right = reference.gae(r.numpy(), v.numpy(), rows_of(batch), gamma, lambd)
    torch.testing.assert_close(out, torch.from_numpy(right), rtol=1e-12, atol=scale)
    out = advantages.discounted_returns(r, batch, gamma=gamma)
    right = reference.returns(r.numpy(), batch.lengths.tolist(), batch.mask.numpy(), gamma)
    torch.testing.assert_close(out, torch.from_numpy(right), rtol=1e-12, atol=scale)
    assert torch.equal(r, copies[0])
    assert torch.equal(v, copies[1])


# What the docstring of `relax_core.losses` states: of the inputs as they came in.
BOUNDS = {torch.float64: 0.0, torch.float32: 3e-6, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHOOSING])
@given(geometry=GEOMETRY, spread=st.sampled_from([0.01, 0.3, 1.0]))
def test_each_dtype_is_within_its_bound_of_float64(name, dtype, geometry, spread):
    batch, *values = drawn(geometry, spread)
    values = [value.to(dtype) for value in values]
    out, exact = loss_of(name, *values, batch), loss_of(name, *(value.double() for value in values), batch)
    assert {out.loss.dtype} | {metric.dtype for metric in out.metrics.values()} == {dtype}
    size = exact.loss.abs() + values[2].double().abs()
    assert ((out.loss.double() - exact.loss).abs() <= BOUNDS[dtype] * size).all()


@given(geometry=GEOMETRY, poison=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_nothing_under_the_mask_reaches_a_correction_or_a_term(geometry, poison):
    batch, *values = drawn(geometry)
    seen = []
    for fill in (0.0, poison):
        log_probs, old, advantage = (torch.where(batch.mask, value, fill) for value in values)
        log_probs.requires_grad_()
        loss = losses.ppo_clip(log_probs, old, advantage, batch, eps_clip=0.2)
        loss = corrections.truncated_importance(loss, old, log_probs, batch)
        loss = corrections.masked_importance(loss, log_probs, old, batch, low=0.5)
        loss = corrections.off_policy_masking(loss, log_probs, old, advantage, batch)
        loss = corrections.with_entropy(loss, -log_probs, batch, coef=0.1)
        loss = corrections.with_kl(loss, kl.loss(*losses.select(batch, log_probs, old), "k3"), batch, coef=0.1)
        critic = losses.value_loss(log_probs, old, advantage, batch, value_clip=0.2)
        total = reducers.weighted_sum(loss.loss + critic.loss, reducers.token_mean(batch))
        (gradient,) = torch.autograd.grad(total, log_probs)
        seen.append([total.detach(), gradient, loss.loss.detach(), *loss.metrics.values(), *critic.metrics.values()])
    for clean, dirty in zip(*seen, strict=True):
        assert torch.equal(clean, dirty)
        assert dirty.isfinite().all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@given(seed=seeds(), spread=st.sampled_from([1e-8, 0.1, 3.0]), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_a_kl_estimate_is_its_formula(kind, seed, spread, dtype):
    generator = torch.Generator().manual_seed(seed)
    log_probs, noise = (torch.randn(9, generator=generator, dtype=dtype) for _ in range(2))
    ref = log_probs - spread * noise
    right = reference.kl(log_probs.double().numpy() - ref.double().numpy(), kind)
    unit = torch.finfo(dtype).eps
    for out in (kl.estimate(log_probs, ref, kind), kl.loss(log_probs, ref, kind)):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), torch.from_numpy(right), rtol=32 * unit, atol=8 * max(unit, 2.0**-52))
