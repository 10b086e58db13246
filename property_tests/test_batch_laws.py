"""Ragged and padded forms agree; cutting a batch into micro-batches or ranks cannot change a loss or its gradient."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

import relax_core as rc
from property_tests.strategies import tokens
from relax_core import reducers
from tests.core.ranks import on_ranks

REDUCERS = {
    "sample_mean": reducers.sample_mean,
    "token_mean": reducers.token_mean,
    "constant_length": lambda tokens, *, reduce=rc.local: reducers.constant_length(tokens, 6, reduce=reduce),
}


def cuts(draw, count):
    return [0, *sorted(draw(st.lists(st.integers(0, count), max_size=4))), count]


@given(tokens=tokens(), fill=st.sampled_from([0.0, -1.0, float("nan")]))
def test_padding_and_back_changes_nothing(tokens, fill):
    values = torch.randn(tokens.num_tokens)
    padded = tokens.to_padded(values, fill=fill)
    assert torch.equal(tokens.from_padded(padded), values)
    assert padded.shape == (tokens.num_samples, max(tokens.lengths.tolist()))
    assert tokens.valid.tolist() == tokens.to_padded(tokens.mask, fill=False).sum(1).tolist()


@given(data=st.data(), tokens=tokens(), name=st.sampled_from(sorted(REDUCERS)))
def test_micro_batches_add_up_to_the_batch(data, tokens, name):
    weights, bounds = REDUCERS[name](tokens), cuts(data.draw, tokens.num_samples)
    loss = torch.randn(tokens.num_tokens, dtype=torch.float64)
    loss[~tokens.mask] = float("nan")
    whole, parts = loss.clone().requires_grad_(), loss.clone().requires_grad_()
    total = reducers.weighted_sum(whole, weights)
    total.backward()
    shares = []
    for start, stop in pairwise(bounds):
        part = tokens.token_slice(start, stop)
        shares.append(reducers.weighted_sum(parts[part], weights[part]))
    sum(shares).backward()
    torch.testing.assert_close(sum(shares), total, rtol=1e-12, atol=1e-12)
    assert torch.equal(parts.grad, whole.grad)
    assert torch.equal(whole.grad[~tokens.mask], torch.zeros(int((~tokens.mask).sum()), dtype=torch.float64))


@given(data=st.data(), tokens=tokens(), name=st.sampled_from(sorted(REDUCERS)))
def test_ranks_have_the_weights_of_one_process_to_the_bit(data, tokens, name):
    bounds = cuts(data.draw, tokens.num_samples)
    shares = [tokens.select(start, stop) for start, stop in pairwise(bounds)]
    results, _ = on_ranks(shares, lambda share, reduce: REDUCERS[name](share, reduce=reduce))
    assert torch.equal(torch.cat(results), REDUCERS[name](tokens))


@given(tokens=tokens(), name=st.sampled_from(sorted(REDUCERS)))
def test_weights_are_a_mean(tokens, name):
    loss = torch.full((tokens.num_tokens,), 2.0, dtype=torch.float64)
    total = reducers.weighted_sum(loss, REDUCERS[name](tokens)).item()
    voting = int((tokens.valid > 0).sum())
    expected = {"constant_length": 2 * int(tokens.mask.sum()) / 6 / max(voting, 1)}.get(name, 2.0 * (voting > 0))
    assert abs(total - expected) < 1e-12
