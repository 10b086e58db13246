"""What a column of numbers looks like: its moments, what stands far out of it, what goes along with what."""

import math
from typing import Final

import attrs
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from relax_core.checks import checked

OUTLIER_REACH: Final = 5.0
"""Of `outliers`: how many widths of the bulk a value may stand away from the median."""


@attrs.frozen
class Summary:
    """Of some numbers, in their own unit. All NaN for none.

    Attributes:
        count: how many they are.
        mean: their mean.
        std: their unbiased standard deviation, 0 for one number.
        low: the least.
        median: the lower of the two in the middle.
        high: the largest.
    """

    count: int
    mean: float
    std: float
    low: float
    median: float
    high: float


@checked
def summary(values: Float[Tensor, " samples"]) -> Summary:
    """In float64, two-pass; the median is the lower of two."""
    if not len(values):
        return Summary(0, *[math.nan] * 5)
    x = values.double()
    std = float(x.std()) if len(x) > 1 else 0.0
    return Summary(len(x), float(x.mean()), std, float(x.min()), float(x.median()), float(x.max()))


@checked
def distinct(values: Float[Tensor, " samples"], *, resolution: float = 1e-6) -> int:
    """How many numbers differ, to within `resolution`."""
    found: Tensor = (values.double() / resolution).round().unique()  # type: ignore[no-untyped-call]
    return len(found)


@checked
def outliers(values: Float[Tensor, " samples"], *, reach: float = OUTLIER_REACH) -> Bool[Tensor, " samples"]:
    """Farther from the median than `reach` times the larger of |median| and the width of the middle 98 %.

    Wide on purpose: a rare success among zeros is no outlier, a sum of tokens among shares is. No values: none.
    """
    if not len(values):
        return torch.zeros_like(values, dtype=torch.bool)
    ordered = values.double().sort().values
    low, median, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.01, 0.5, 0.99))
    scale = torch.maximum(high - low, median.abs())
    return (scale > 0) & ((values.double() - median).abs() > reach * scale)


@checked
def correlation(a: Float[Tensor, " samples"], b: Float[Tensor, " samples"]) -> float:
    """Pearson's, in float64, two-pass; NaN where either does not vary or there are no samples."""
    x, y = (values.double() - values.double().mean() for values in (a, b))
    scale = (x.square().sum() * y.square().sum()).sqrt()
    return float((x * y).sum() / scale) if scale > 0 else math.nan
