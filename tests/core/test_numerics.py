"""Sums of groups and of batches: exact until they are rounded once, at every order and beside any neighbour."""

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from relax_core import numerics
from tests.core.ranks import f64

UNIT = Fraction(1, 2**806)
"""What sums over batches are counted in."""


def column(*values: float) -> Tensor:
    """One group of one column."""
    return f64(values).view(1, -1, 1)


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_formula_gets_each_group_in_its_order_once_for_each_size() -> None:
    groups = torch.tensor([7, 3, 7, 5, 3, 5, 9])
    values = torch.arange(7, dtype=torch.float64)
    seen: list[list[list[float]]] = []

    def formula(group: Tensor, other: Tensor) -> Tensor:
        assert torch.equal(other, -group)
        seen.append(group.tolist())
        return group * group.shape[1] + group[:, :1]

    results = numerics.by_group(formula, groups, values, -values)
    assert seen == [[[6]], [[1, 4], [3, 5], [0, 2]]]
    assert results.tolist() == [0, 3, 4, 9, 9, 13, 12]
    assert len(numerics.by_group(formula, groups[:0], values[:0], values[:0])) == 0


def test_a_group_that_is_too_small_is_named() -> None:
    groups, values = torch.tensor([4, 4, 8, 6, 6, 6]), torch.zeros(6)
    with pytest.raises(ValueError, match=r"^group 8 has 1 samples, expected at least 2$"):
        numerics.by_group(torch.neg, groups, values, least=2)
    with pytest.raises(ValueError, match="group 8 has 1 samples, expected at least 3"):
        numerics.by_group(torch.neg, groups, values, least=3)
    assert numerics.by_group(torch.neg, groups[:2], values[:2], least=2).tolist() == [0, 0]


def test_a_group_may_have_one_sample() -> None:
    assert [rows.tolist() for rows in numerics.group_rows(torch.tensor([3, 5, 3]))] == [[[1]], [[0, 2]]]


def test_the_first_of_several_groups_that_are_too_small_is_named() -> None:
    with pytest.raises(ValueError, match=r"^group 5 has 1 samples, expected at least 2$"):
        list(numerics.group_rows(torch.tensor([9, 7, 7, 5, 8, 8]), least=2))


def test_results_are_like_the_first_of_the_values() -> None:
    values, others = torch.ones(3, 2, dtype=torch.float64), torch.ones(3, 1)
    results = numerics.by_group(lambda one, two: one / 3 + two, torch.tensor([0, 1, 0]), values, others)
    assert torch.equal(results, torch.full((3, 2), 4 / 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [0.0, 0.0],
        [0.1, 0.2, 0.3],
        [0.1] * 7,
        [1.0, 2.0**-52, -1.0, 2.0**-90],
        [1.0 + 2.0**-52, 1.0 + 2.0**-51, 1.0],
        [2.0**53 - 1, 2.0**53 - 3, 1.0, -(2.0**52) - 1],
        [3.4e38, -3.4e38, 3.3e38],
        [1e-250, 3e-250, -7e-251],
        [1 - 2.0**-53] * 9,
        [0.3 * 1.7**power * (-1) ** power for power in range(33)],
    ],
)
def test_sums_and_deviations_round_once(values: list[float]) -> None:
    exact, size = [Fraction(value) for value in values], len(values)
    assert numerics.group_sums(column(*values)).item() == float(sum(exact))
    numerators = [float(size * value - sum(exact)) for value in exact]
    assert numerics.group_deviations(column(*values)).flatten().tolist() == [each / size for each in numerators]


def test_sums_that_come_to_half_a_last_place_go_to_the_even() -> None:
    """The two integers are added first, then rounded: rounding one of them before would go the other way."""
    last = 2.0**-52
    assert numerics.group_sums(column(1.0, last / 2)).item() == 1.0
    assert numerics.group_sums(column(1.0 + last, last / 2)).item() == 1.0 + 2 * last
    assert numerics.group_sums(column(1.0, last / 2, 2.0**-92)).item() == 1.0 + last
    assert numerics.group_sums(column(1.0, last / 2, -(2.0**-92))).item() == 1.0


def test_a_group_of_many_keeps_its_sums_exact() -> None:
    values = (torch.arange(4097, dtype=torch.float64) * 0.1 + 1e6).view(1, -1, 1)
    exact = sum(map(Fraction, values.flatten().tolist()))
    assert numerics.group_sums(values).item() == float(exact)
    first, last = numerics.group_deviations(values)[0, [0, -1], 0].tolist()
    assert first == float(4097 * Fraction(values[0, 0, 0].item()) - exact) / 4097
    assert last == float(4097 * Fraction(values[0, -1, 0].item()) - exact) / 4097


def test_bits_far_below_the_largest_are_left_out_alike_in_every_order() -> None:
    values = [1e20, 1.0, -1e20, 3e-5, 2e-30]
    sums = {numerics.group_sums(column(*order)).item() for order in itertools.permutations(values)}
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(1.00003, rel=0, abs=2.0**-30)


@pytest.mark.parametrize(("size", "place"), [(4, -98), (5, -96), (8, -96), (9, -94)])
def test_the_last_place_that_counts_beside_a_largest_value_of_1(size: int, place: int) -> None:
    def total(small: float) -> float:
        return numerics.group_sums(column(1.0, small, -1.0, *[0.0] * (size - 3))).item()

    assert total(2.0**place) == 2.0**place
    assert total(3 * 2.0**place) == 3 * 2.0**place
    assert total(0.75 * 2.0**place) == 2.0**place  # finer bits go to the nearest
    assert total(0.5 * 2.0**place) == 0


def test_unlike_magnitudes_of_groups_and_columns() -> None:
    """Nothing shares a place: the small keep all of their digits beside the large."""
    values = f64([[[1e300, 3e-200], [1e300, 5e-200]], [[7e-250, 1.0], [9e-250, 1e30]]])
    assert numerics.group_sums(values).tolist() == [[[2e300, 8e-200]], [[1.6e-249, 1e30]]]
    deviations = numerics.group_deviations(values)
    expected = f64([[[0, -1e-200], [0, 1e-200]], [[-1e-250, -5e29], [1e-250, 5e29]]])
    torch.testing.assert_close(deviations, expected, rtol=1e-15, atol=0)
    assert not numerics.group_sums(f64([[[1e-310], [1e-309]]])).item() > 2e-309  # left out or right, never large


def test_flat_groups() -> None:
    flat = numerics.is_flat(f64([[[1, 0.1], [1, 0.1], [1, 0.1]], [[1, 2], [1, 1], [1, 2]]]))
    assert flat.tolist() == [[[True, True]], [[True, False]]]


def test_extrema_of_groups() -> None:
    low, high = numerics.group_extrema(f64([[3, -1], [1, -2], [2, 0]]), torch.tensor([1, 1, 0]), 2)
    assert low.tolist() == [[2, 0], [1, -2]]
    assert high.tolist() == [[2, 0], [3, -1]]


# --- optimizer batches and ranks --------------------------------------------------------------------------------------


def test_sums_of_batches_are_exact() -> None:
    values = f64([3.0, 2.0**27, 2.0**-26, -1.0, 5.0, 0.1])
    sums = numerics.exact_sums(values, torch.tensor([0, 0, 1, 1, 1, 3]), 4)
    assert [each * UNIT for each in sums] == [2**27 + 3, 4 + Fraction(1, 2**26), 0, Fraction(0.1)]
    assert numerics.exact_sums(f64([]), torch.zeros(0, dtype=torch.long), 2) == [0, 0]
    assert numerics.exact_sums(f64([0.0]), torch.zeros(1, dtype=torch.long), 1) == [0]


def test_sums_of_several_columns() -> None:
    values, index = f64([[1, 2, 4, 8], [16, 32, 64, 128]]), torch.tensor([0, 2, 0, 1])
    assert numerics.sum_by(values, index, 3).tolist() == [[5, 8, 2], [80, 128, 32]]
    assert numerics.sum_by(values, torch.zeros(4, dtype=torch.long), 1).tolist() == [[15], [240]]


@pytest.mark.parametrize("number", [15, 31, 1023])
def test_as_many_bits_as_can_be_added_up_exactly(number: int) -> None:
    for bits in range(40, 53):
        value = 1 - 2.0**-bits
        sums = numerics.exact_sums(f64([value] * number), torch.zeros(number, dtype=torch.long), 1)
        assert sums[0] * UNIT == number * Fraction(value)


def test_magnitudes_that_lie_far_apart() -> None:
    def total(*values: float) -> Fraction:
        return numerics.exact_sums(f64(values), torch.zeros(len(values), dtype=torch.long), 1)[0] * UNIT

    assert total(1e308, 1e-220, 1.0, -1e308) == 1 + Fraction(int(Fraction(1e-220) / UNIT)) * UNIT
    assert total(1e308, 1e-220, -1e308) == Fraction(1e-220)
    assert total(2.0**-806, 3 * 2.0**-806, 1e30) == Fraction(1e30) + 4 * UNIT
    # Finer bits go to the nearest unit.
    assert total(0.75 * 2.0**-806) == UNIT
    assert total(2.0**-808, 1.0) == 1
    assert total(5e-324) == 0


def test_digits_of_ranks_add_up() -> None:
    sums = [0, 1, -1, 2**26 - 1, 2**26, -(2**26), 12345678901234567890 << 700, -(3**500), (1 << 48 * 26) - 1]
    digits = numerics.to_digits(sums)
    assert digits.shape == (9, 48)
    assert digits.abs().max() < 2**26
    assert digits[3:6, :2].tolist() == [[2**26 - 1, 0], [0, 1], [0, -1]]
    assert numerics.from_digits(digits) == sums
    others = [3**600, -1, -5, 1, 2**26 - 1, 7, 3**500, 3**499, 0]
    both = digits * 2.0**20 + numerics.to_digits(others)
    assert numerics.from_digits(both) == [one * 2**20 + two for one, two in zip(sums, others, strict=True)]
    assert numerics.to_digits([]).shape == (0, 48)


def test_a_quotient_rounds_once() -> None:
    one = 2**806
    assert numerics.quotient(one, 3) == 1 / 3
    assert numerics.quotient(10 * one + 1, 10) == 1.0
    # 2**53 + 1 rounds to 2**53, whose third is another number than the third of 2**53 + 1.
    assert numerics.quotient((2**53 + 1) * one, 3) == float(Fraction(2**53 + 1, 3))
    assert numerics.quotient(-7 * one, 1) == -7
    assert numerics.quotient(0, 0) == 0
