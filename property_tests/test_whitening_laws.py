"""Whitening gives the same bits however a batch is spread over ranks and ordered."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import relax_core as rc
from property_tests.strategies import numbers, permutations, spreads
from relax_core.advantages import whiten_samples
from tests.core.ranks import on_ranks


def whiten(values, segment=rc.whole_batch, reduce=rc.local):
    return whiten_samples(values, rc.Tokens.full([1] * len(values)), segment=segment, reduce=reduce)


@given(data=st.data(), ranks=st.integers(1, 4), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_every_spread_and_order_gives_the_same_bits(data, ranks, sizes):
    batches = [data.draw(numbers(size)) for size in sizes]
    alone = [whiten(batch) for batch in batches]
    orders = [data.draw(permutations(size)) for size in sizes]
    rank_of = [data.draw(spreads(size, ranks)) for size in sizes]
    held = [[order[rank_of[b] == rank] for b, order in enumerate(orders)] for rank in range(ranks)]
    shares = [[batches[b][index] for b, index in enumerate(own)] for own in held]
    results, world = on_ranks(
        shares, lambda share, reduce: whiten(torch.cat(share), rc.split_by([len(part) for part in share]), reduce)
    )
    for own, result in zip(held, results, strict=True):
        for b, part in enumerate(result.split([len(index) for index in own])):
            assert torch.equal(part, alone[b][own[b]])
    assert world.collectives == 3


@given(data=st.data(), size=st.integers(2, 40))
def test_whitening_is_the_formula(data, size):
    values = data.draw(numbers(size))
    copy = values.clone()
    out = whiten(values)
    assert torch.equal(values, copy)
    seen = values.float()
    if seen.min() == seen.max():
        assert torch.equal(out, torch.zeros_like(out))
        return
    x = values.numpy().astype(np.longdouble)
    expected = (x - x.mean()) / (x.std(ddof=1) + np.longdouble("1e-4"))
    # The mean is rounded once: at most half an ulp of the largest value, seen through the division.
    bound = 1e-13 * (1 + float(np.abs(x).max() / (x.std(ddof=1) + 1e-4)))
    assert float(np.abs(out.numpy() - expected).max()) <= bound


@given(data=st.data(), size=st.integers(2, 12), position=st.integers(0, 11))
def test_a_non_finite_score_on_one_rank_raises_on_all(data, size, position):
    values = data.draw(numbers(size))
    broken = values.clone()
    broken[position % size] = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e39]))
    results, _ = on_ranks([values, broken], lambda share, reduce: whiten(share, reduce=reduce))
    assert [type(result) for result in results] == [ValueError, ValueError]
    assert all(f"sample {position % size} is" in str(result) for result in results)
