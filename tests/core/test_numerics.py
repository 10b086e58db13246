"""Digits: which place is a number's first, what they stand for, and that their sums are exact."""

from fractions import Fraction

import pytest
import torch

from relax_core import numerics
from tests.core.ranks import f64


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (1.0, 0),
        (2.0**26 - 1, 0),
        (2.0**26, 1),
        (1 - 2.0**-53, -1),
        (2.0**-26, -1),
        (-(2.0**-26) + 2.0**-70, -2),
        (2.0**-728, -28),
        (0.0, -1),
        (1e-300, -28),
        (1.7e308, 32),
    ],
)
def test_the_place_of_the_first_digit(value: float, place: int) -> None:
    assert numerics.top_place(f64([value])).item() == place


@pytest.mark.parametrize("value", [1.0, -1.0, 0.1, 2.0**26 - 2.0**-26, -123456789.123456789, 1e-30, 1e38, 0.0])
def test_digits_stand_for_their_value(value: float) -> None:
    top = numerics.top_place(f64([value]))
    digits = numerics.to_digits(f64([value]), top)
    assert digits.shape == (1, 4)
    assert digits.abs().max() <= 2.0**26
    whole = [int(digit) for digit in digits[0].tolist()]
    places = [Fraction(2) ** (26 * (int(top) - j)) for j in range(4)]
    assert sum(d * place for d, place in zip(whole, places, strict=True)) == Fraction(value)
    assert numerics.from_digits(digits, top).item() == value


def test_each_digit_is_the_nearest_integer() -> None:
    digits = numerics.to_digits(f64([5.0, 0.75, 7 * 2.0**-30]), torch.zeros(3, dtype=torch.long))
    assert digits[:, :2].tolist() == [[5, 0], [1, -(2**24)], [0, 0]]
    assert digits[2, 2] == 7 * 2**22
    below_zero = numerics.to_digits(f64([-5.6, -5.3, -0.5, -1.5]), torch.zeros(4, dtype=torch.long))
    assert below_zero[:, 0].tolist() == [-6, -5, 0, -2]


@pytest.mark.parametrize(
    "digits",
    [
        [1, -(2**26), 0, 0],
        [0, 1, -(2**26) + 1, -(2**26)],
        [2**51, -(2**52), 2**50, 3],
        [1, -(2**26) + 1, -(2**26) + 1, -(2**26)],
        [3, 2**25, 2**25, 2**25],
        [-(2**27), 2**52 + 2**51, -(2**52), 12345],
        [2**26, 2**52 + 1, -(2**26), 0],
    ],
)
@pytest.mark.parametrize("top", [0, -3, 2])
def test_digits_of_any_size_round_once(digits: list[int], top: int) -> None:
    exact = sum(digit * Fraction(2) ** (26 * (top - j)) for j, digit in enumerate(digits))
    assert numerics.from_digits(f64(digits), torch.tensor(top)).item() == float(exact)


def test_sums_stand_at_their_places() -> None:
    values = f64([3.0, 2.0**27, 2.0**-26, -1.0, 5.0])
    rows = numerics.accumulate(values, torch.tensor([0, 0, 1, 1, 1]), 3)
    # The 33rd place is that of units.
    assert {(row, place): rows[row, place].item() for row, place in rows.nonzero().tolist()} == {
        (0, 31): 2.0,
        (0, 32): 3.0,
        (1, 32): 4.0,
        (1, 33): 1.0,
    }
    assert numerics.rounded(rows).tolist() == [2.0**27 + 3, 4 + 2.0**-26, 0.0]
    assert not numerics.accumulate(f64([]), torch.zeros(0, dtype=torch.long), 2).any()


def test_places_that_lie_far_apart() -> None:
    values = f64([1e308, 1e-220, 1.0, -1e308])
    assert numerics.rounded(numerics.accumulate(values, torch.zeros(4, dtype=torch.long), 1)).item() == 1.0
    values = f64([1e308, 1e-220, -1e308])
    sums = numerics.rounded(numerics.accumulate(values, torch.zeros(3, dtype=torch.long), 1))
    torch.testing.assert_close(sums, f64([1e-220]), rtol=1e-6, atol=0)


def test_group_sums_and_deviations_of_unlike_magnitudes() -> None:
    """Groups do not share a place: the small one keeps all of its digits beside the large one."""
    values, ids = f64([[1e300], [3e-200], [1e300], [5e-200]]), torch.tensor([0, 1, 0, 1])
    assert numerics.group_sums(values, ids, 2).tolist() == [[2e300], [8e-200]]
    deviations = numerics.group_deviations(values, ids, torch.tensor([2, 2]))
    torch.testing.assert_close(deviations, f64([[0], [-1e-200], [0], [1e-200]]), rtol=1e-15, atol=0)


def test_extrema_of_groups() -> None:
    low, high = numerics.group_extrema(f64([[3, -1], [1, -2], [2, 0]]), torch.tensor([1, 1, 0]), 2)
    assert low.tolist() == [[2, 0], [1, -2]]
    assert high.tolist() == [[2, 0], [3, -1]]
