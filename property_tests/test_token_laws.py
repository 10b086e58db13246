"""Laws of what is computed token by token: normalization, returns, losses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import relax_core as rc
from property_tests.strategies import numbers, permutations, spreads, tokens
from relax_core import advantages, reducers
from tests.core.ranks import on_ranks

KINDS = st.sampled_from(["whiten", "token_global"])


def regroup(values: torch.Tensor, batch: rc.Tokens, samples: torch.Tensor) -> tuple[torch.Tensor, rc.Tokens]:
    """The given samples of a batch, in that order."""
    parts = [batch.token_slice(int(sample), int(sample) + 1) for sample in samples]
    empty = torch.zeros(0, dtype=values.dtype)
    mask = torch.cat([batch.mask[:0], *[batch.mask[part] for part in parts]])
    return torch.cat([empty, *[values[part] for part in parts]]), rc.Tokens(batch.lengths[samples], mask)


@given(data=st.data(), kind=KINDS, batch=tokens(), ranks=st.integers(1, 4))
def test_normalization_gives_the_same_bits_for_every_spread_and_order(data, kind, batch, ranks):
    values = data.draw(numbers(batch.num_tokens))
    values[~batch.mask] = float("nan")
    alone = advantages.normalize(values, batch, kind)
    order = data.draw(permutations(batch.num_samples))
    rank_of = torch.randint(0, ranks, (batch.num_samples,), generator=torch.Generator().manual_seed(ranks))
    held = [order[rank_of == rank] for rank in range(ranks)]
    shares = [regroup(values, batch, samples) for samples in held]
    results, world = on_ranks(shares, lambda share, reduce: advantages.normalize(*share, kind, reduce=reduce))
    for samples, result in zip(held, results, strict=True):
        assert torch.equal(result, regroup(alone, batch, samples)[0])
    assert world.collectives == 3


@given(data=st.data(), kind=KINDS, batch=tokens(), ranks=st.integers(1, 4))
def test_a_response_may_be_spread_over_ranks_token_by_token(data, kind, batch, ranks):
    """As context parallelism does. What a mean over tokens weighs is a matter of tokens as well."""
    values = data.draw(numbers(batch.num_tokens))
    rank_of = data.draw(spreads(batch.num_tokens, ranks))
    held = [rank_of == rank for rank in range(ranks)]
    shares = [(values[mine], rc.Tokens(torch.tensor([int(mine.sum())]), batch.mask[mine])) for mine in held]
    alone = advantages.normalize(values, batch, kind), reducers.token_mean(batch)
    parts, _ = on_ranks(shares, lambda share, reduce: advantages.normalize(*share, kind, reduce=reduce))
    weights, _ = on_ranks(shares, lambda share, reduce: reducers.token_mean(share[1], reduce=reduce))
    for mine, part, weight in zip(held, parts, weights, strict=True):
        assert torch.equal(part, alone[0][mine])
        assert torch.equal(weight, alone[1][mine])


@given(data=st.data(), kind=KINDS, batch=tokens().filter(lambda batch: batch.mask.any()), rank=st.integers(0, 2))
def test_an_advantage_that_is_not_finite_raises_on_every_rank(data, kind, batch, rank):
    values = data.draw(numbers(batch.num_tokens))
    broken, token = values.clone(), data.draw(st.sampled_from(batch.mask.nonzero()[:, 0].tolist()))
    broken[token] = data.draw(st.sampled_from([float("nan"), float("inf"), -1e39]))
    shares = [broken if number == rank else values for number in range(3)]
    errors, world = on_ranks(shares, lambda share, reduce: advantages.normalize(share, batch, kind, reduce=reduce))
    where = f"token {int(batch.position[token])} of sample {int(batch.sample_of[token])} is"
    assert all(isinstance(error, ValueError) and where in str(error) for error in errors)
    assert world.collectives == 1


@given(data=st.data(), kind=KINDS, batch=tokens())
def test_normalization_is_its_formula(data, kind, batch):
    values = data.draw(numbers(batch.num_tokens))
    copy = values.clone()
    out = advantages.normalize(values, batch, kind)
    assert torch.equal(values, copy)
    assert not out[~batch.mask].any()
    x = values[batch.mask].numpy().astype(np.longdouble)
    if len(x) == 0 or np.float32(x).min() == np.float32(x).max():
        assert not out.any()
        return
    variance = x.var(ddof=1) + np.longdouble("1e-8") if kind == "whiten" else max(x.var(), np.longdouble("1e-8"))
    expected = (x - x.mean()) / np.sqrt(variance)
    bound = 1e-13 * (1 + float(np.abs(x).max() / np.sqrt(variance)))
    assert float(np.abs(out[batch.mask].numpy() - expected).max()) <= bound


@given(data=st.data(), batch=tokens(), gamma=st.floats(0, 1), lambd=st.floats(0, 1))
def test_a_responses_returns_do_not_depend_on_its_neighbours(data, batch, gamma, lambd):
    rewards, values = data.draw(numbers(batch.num_tokens)), data.draw(numbers(batch.num_tokens))
    rewards[~batch.mask] = float("nan")
    whole = advantages.gae(rewards, values, batch, gamma=gamma, lambd=lambd)
    returns = advantages.discounted_returns(rewards, batch, gamma=gamma)
    for sample in range(batch.num_samples):
        part, own = batch.token_slice(sample, sample + 1), batch.select(sample, sample + 1)
        alone = advantages.gae(rewards[part], values[part], own, gamma=gamma, lambd=lambd)
        assert torch.equal(alone.advantages, whole.advantages[part])
        assert torch.equal(alone.returns, whole.returns[part])
        assert torch.equal(advantages.discounted_returns(rewards[part], own, gamma=gamma), returns[part])


@pytest.mark.parametrize("name", rc.ALGORITHMS)
@given(data=st.data(), batch=tokens(), poison=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]))
def test_whatever_lies_under_the_mask_reaches_no_loss_and_no_gradient(name, data, batch, poison):
    algorithm = rc.get_algorithm(name)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    drawn = [torch.randn(batch.num_tokens, generator=generator) for _ in range(3)]
    seen = []
    for fill in (0.0, poison):
        log_probs, old, adv = (torch.where(batch.mask, value, fill) for value in drawn)
        copies = [value.clone() for value in (log_probs, old, adv)]
        log_probs.requires_grad_()
        result = algorithm.policy_loss(algorithm.hyperparameters(), log_probs, old, adv, batch)
        result.loss.sum().backward()
        assert all(torch.equal(a, b) or fill != fill for a, b in zip((log_probs, old, adv), copies, strict=True))
        seen.append([result.loss.detach(), log_probs.grad, *result.metrics.values()])
    for clean, dirty in zip(*seen, strict=True):
        assert torch.equal(clean, dirty)
        assert dirty.isfinite().all()
