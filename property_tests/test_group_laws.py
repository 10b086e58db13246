"""Group statistics: the same bits for every order, exact collapse and cancellation, the plain expression to the bit."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import relax_core as rc
from property_tests.strategies import grouped, numbers, permutations
from relax_core import rewards
from relax_core.numerics import by_group, exact_sums, from_digits, group_deviations, group_sums, quotient, to_digits

ONES = torch.ones(2, dtype=torch.float64)


@given(data=st.data(), batch=grouped(components=2))
def test_decoupled_gives_the_same_bits_for_every_order(data, batch):
    matrix, groups = batch
    out, copy = rewards.decoupled(matrix, groups, ONES), matrix.clone()
    order = data.draw(permutations(len(groups)))
    assert torch.equal(rewards.decoupled(matrix[order], groups[order], ONES), out[order])
    assert torch.equal(matrix, copy)


@given(batch=grouped(components=2))
def test_a_group_is_untouched_to_the_bit_by_its_neighbours(batch):
    matrix, groups = batch
    out = rewards.decoupled(matrix, groups, ONES)
    for group in groups.unique():
        members = groups == group
        assert torch.equal(rewards.decoupled(matrix[members], groups[members], ONES), out[members])


@given(batch=grouped(components=3), weights=st.lists(st.floats(-10, 10), min_size=3, max_size=3))
def test_decoupled_is_the_formula(batch, weights):
    matrix, groups = batch
    out = rewards.decoupled(matrix, groups, torch.tensor(weights, dtype=torch.float64))
    for group in groups.unique():
        members = (groups == group).numpy()
        x = matrix.numpy()[members].astype(np.longdouble)
        flat = x.min(0) == x.max(0)
        z = np.where(flat, 0, (x - x.mean(0)) / (x.std(0, ddof=1) + np.longdouble("1e-4")))
        # longdouble itself is only so good when a spread sits on a large offset.
        slack = 1e-18 * np.abs(x).max(0) / (x.std(0, ddof=1) + 1e-4)
        bound = float((np.abs(weights) * (1e-14 + slack)).sum()) * 10
        assert float(np.abs(out.numpy()[members] - (z * weights).sum(1)).max()) <= bound


@given(batch=grouped(), constant=st.integers(-(2**40), 2**40), spread=st.integers(1, 2**40), power=st.integers(-60, 60))
def test_an_exact_constant_minus_a_component_cancels_it(batch, constant, spread, power):
    _, groups = batch
    first = torch.randint(0, spread + 1, (len(groups),), generator=torch.Generator().manual_seed(spread))
    matrix = torch.stack([first, constant - first], 1).double() * 2.0**power
    assert not rewards.decoupled(matrix, groups, ONES).any()


@given(data=st.data(), batch=grouped(components=1))
def test_a_flat_component_leaves_the_other_untouched_to_the_bit(data, batch):
    matrix, groups = batch
    flat = torch.full_like(matrix, data.draw(st.sampled_from([0.0, 0.1, 0.3, -1e30])))
    alone = rewards.standardized(matrix, groups)[:, 0]
    assert torch.equal(rewards.decoupled(torch.cat([flat, matrix], 1), groups, ONES), alone)
    assert torch.equal(rewards.decoupled(torch.cat([matrix, flat], 1), groups, ONES), alone)


@given(batch=grouped(components=2), shift=st.integers(-1000, 1000), power=st.integers(0, 6))
def test_shift_and_positive_scale_change_nothing_beyond_eps(batch, shift, power):
    _, groups = batch
    generator = torch.Generator().manual_seed(abs(shift))
    matrix = torch.randint(-8, 9, (len(groups), 2), generator=generator).double()
    moved = matrix * torch.tensor([2.0**power, 1.0], dtype=torch.float64) + torch.tensor([shift, 0.0])
    plain, changed = (rewards.decoupled(values, groups, ONES, eps=0.0) for values in (matrix, moved))
    torch.testing.assert_close(changed, plain, rtol=1e-14, atol=1e-14)
    with_eps = rewards.decoupled(moved, groups, ONES)
    torch.testing.assert_close(with_eps, plain, rtol=1e-3, atol=2e-3)


@given(batch=grouped(components=1, least=1), scale=st.booleans())
def test_group_mean_std_is_the_plain_expression_to_the_bit(batch, scale):
    values, groups = batch[0][:, 0].float(), batch[1]
    assume(values.abs().max() < 1e18)  # beyond, the plain expression itself overflows
    out = rewards.group_mean_std(values, groups, scale=scale)
    for group in groups.unique():
        r = values[groups == group]
        c = r - r.mean()
        if scale and len(r) > 1:
            c = c / (c.std() + 1e-6)
        assert torch.equal(out[groups == group], torch.zeros_like(c) if r.min() == r.max() else c)


@given(batch=grouped(components=2))
def test_signal_is_what_the_scores_say(batch):
    matrix, groups = batch
    algorithm = rc.get_algorithm("gdpo")
    scores = algorithm.normalize_rewards(algorithm.hyperparameters(), matrix, groups).float()
    signal = rc.signal.groups_with_signal(algorithm, algorithm.hyperparameters(), matrix, groups)
    expected = [bool(scores[groups == group].min() != scores[groups == group].max()) for group in groups.unique()]
    assert signal.tolist() == expected


@given(batch=grouped())
def test_leave_one_out_is_the_mean_of_the_others_subtracted(batch):
    values, groups = batch[0][:, 0], batch[1]
    out = rewards.leave_one_out(values, groups)
    x = values.numpy().astype(np.longdouble)
    for i, group in enumerate(groups.tolist()):
        others = [x[j] for j in range(len(x)) if j != i and groups[j] == group]
        size = max(map(abs, [x[i], *others]))
        assert abs(out[i].item() - (x[i] - sum(others) / len(others))) <= 1e-15 * size


@given(data=st.data(), batch=grouped())
def test_the_length_weighted_baseline_is_its_formula_for_every_order(data, batch):
    values, groups = batch[0][:, 0], batch[1]
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=len(groups), max_size=len(groups)))).double()
    out = rewards.length_weighted_baseline(values, lengths, groups)
    order = data.draw(permutations(len(groups)))
    assert torch.equal(rewards.length_weighted_baseline(values[order], lengths[order], groups[order]), out[order])
    for group in groups.unique():
        members = (groups == group).numpy()
        x, w = values.numpy()[members].astype(np.longdouble), lengths.numpy()[members]
        expected = np.where(x.min() == x.max(), 0, x - (w * x).sum() / w.sum())
        assert float(np.abs(out.numpy()[members] - expected).max()) <= 1e-15 * float(np.abs(x).max())


ONE_REWARD = [name for name, algorithm in rc.ALGORITHMS.items() if not algorithm.traits.reads_components]


@pytest.mark.parametrize("name", [*ONE_REWARD, "gdpo", "opo"])
@given(data=st.data(), batch=grouped(), value=st.sampled_from([0.1, 0.3, 0.35, 100000.1, -1000000.3, 1e30, 1e-30]))
def test_a_group_of_equal_rewards_gets_exact_zeros(name, data, batch, value):
    """Whatever its size and its neighbours; but for the algorithms that use the reward as it is."""
    algorithm, (matrix, groups) = rc.get_algorithm(name), batch
    values = torch.where(groups == groups[0], value, matrix[:, 0].clamp(-1e15, 1e15))
    columns = {"gdpo": [values, values], "opo": [values, torch.arange(1.0, len(groups) + 1).double()]}
    matrix = torch.stack(columns.get(name, [values]), 1)
    copy = matrix.clone()
    scores = algorithm.normalize_rewards(algorithm.hyperparameters(), matrix, groups)
    assert torch.equal(matrix, copy)
    flat = scores[groups == groups[0]]
    as_they_are = name in ("m2po", "ppo", "reinforce_plus_plus")
    assert torch.equal(flat, torch.full_like(flat, value if as_they_are else 0.0))


@pytest.mark.parametrize("name", rc.ALGORITHMS)
@given(batch=grouped(components=2), position=st.integers(0, 10**6), poison=st.sampled_from([np.nan, np.inf, -1e39]))
def test_a_reward_that_is_not_finite_raises_and_says_where(name, batch, position, poison):
    algorithm, (matrix, groups) = rc.get_algorithm(name), batch
    matrix = matrix[:, : 1 + algorithm.traits.reads_components].clone()
    sample, component = position % len(groups), position % matrix.shape[1]
    matrix[sample, component] = poison
    with pytest.raises(ValueError, match=rf"component {component} of the reward of sample {sample} is "):
        algorithm.normalize_rewards(algorithm.hyperparameters(), matrix, groups)


# --- the sums underneath ----------------------------------------------------------------------------------------------


@given(data=st.data(), count=st.integers(1, 60))
def test_sums_of_batches_are_exact(data, count):
    values = torch.cat([data.draw(numbers(count)), -data.draw(numbers(count))])
    exact = sum(map(Fraction, values.tolist()))
    index = torch.zeros(len(values), dtype=torch.long)
    sums = exact_sums(values, index, 1)
    assert sums[0] == exact * 2**806
    assert quotient(sums[0], count) == float(exact / count)
    order = data.draw(permutations(len(values)))
    assert exact_sums(values[order], index, 1) == sums
    ranks = [exact_sums(share, index[: len(share)], 1) for share in values.tensor_split(3)]
    assert from_digits(sum(map(to_digits, ranks))) == sums


@given(batch=grouped(components=2, least=1))
def test_group_sums_and_deviations(batch):
    matrix, groups = batch
    sums = by_group(lambda group: group_sums(group).expand_as(group), groups, matrix)
    deviations = by_group(group_deviations, groups, matrix)
    for group in groups.unique():
        members = matrix[groups == group].numpy().astype(np.longdouble)
        scale = np.abs(members).max(0)
        assert (np.abs(sums[groups == group].numpy() - members.sum(0)) <= 1e-15 * scale * len(members)).all()
        expected = members - members.mean(0)
        assert (
            np.abs(deviations[groups == group].numpy() - expected) <= 3e-16 * np.abs(expected) + 1e-18 * scale
        ).all()


@given(data=st.data(), size=st.integers(1, 40))
def test_sums_and_deviations_of_a_group_round_once(data, size):
    """Of values that do not lie further apart than 2**30: all of their bits count."""
    drawn = data.draw(st.lists(st.floats(2.0**-30, 1), min_size=size, max_size=size))
    signs = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=size, max_size=size))
    values = [value * sign for value, sign in zip(drawn, signs, strict=True)]
    exact = list(map(Fraction, values))
    group = torch.tensor(values, dtype=torch.float64).view(1, -1, 1)
    assert group_sums(group).item() == float(sum(exact))
    expected = [float(size * value - sum(exact)) / size for value in exact]
    assert group_deviations(group).flatten().tolist() == expected
