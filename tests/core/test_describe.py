"""Moments, outliers, correlation of a column of numbers."""

import math

import attrs
import pytest

from relax_core import describe
from tests.core.ranks import f64


def test_a_summary() -> None:
    found = describe.summary(f64([4, 1, 3, 0]))
    assert attrs.astuple(found) == pytest.approx((4, 2.0, math.sqrt(10 / 3), 0.0, 1.0, 4.0))
    assert attrs.astuple(describe.summary(f64([7]))) == (1, 7.0, 0.0, 7.0, 7.0, 7.0)
    nothing = describe.summary(f64([]))
    assert nothing.count == 0
    assert math.isnan(nothing.mean)


def test_large_numbers_keep_their_spread() -> None:
    assert describe.summary(f64([1e9, 1e9 + 1, 1e9 + 2])).std == 1.0


def test_distinct() -> None:
    assert describe.distinct(f64([1, 1 + 1e-9, -1, 2])) == 3
    assert describe.distinct(f64([1, 1 + 1e-9]), resolution=1e-10) == 2
    assert describe.distinct(f64([])) == 0


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([], []),
        ([0.0] * 99 + [1.0], []),  # a rare success
        ([1.0] * 99 + [0.0], []),
        ([1.0] * 199 + [1000.0], [199]),
        ([0.0, 1.0] * 100 + [6.0, 6.1, -6.0], [201, 202]),
        ([2.0] * 10, []),
    ],
)
def test_outliers(values: list[float], found: list[int]) -> None:
    assert describe.outliers(f64(values)).nonzero()[:, 0].tolist() == found


def test_correlation() -> None:
    assert describe.correlation(f64([1, 2, 3]), f64([1, 3, 2])) == pytest.approx(0.5)
    assert describe.correlation(f64([1, 2, 3]), f64([-2, -4, -6])) == pytest.approx(-1.0)
    assert math.isnan(describe.correlation(f64([1, 2]), f64([3, 3])))
    assert math.isnan(describe.correlation(f64([]), f64([])))
