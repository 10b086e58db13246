"""Sums that do not depend on the order of their terms, and the constants that the formulas add.

Both ways to get them add integers, which is exact in float64 below 2**53. Within a group, every value is split into two
integers at places that its group's largest value sets. Over optimizer batches and ranks, the sum itself is one integer,
as long as it needs to be (Kulisch's long accumulator), that goes from rank to rank in *digits* of 26 bits. Only the
last step rounds, and it rounds the exact result.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

GROUP_EPS: Final = 1e-6
"""Added to a group's standard deviation by the single-reward algorithms (what their users migrate from)."""
GDPO_EPS: Final = 1e-4
"""Added to both standard deviations of GDPO (NVlabs' TRL implementation; the paper, arXiv 2601.05242, gives none)."""
FLOAT32_MAX: Final = torch.finfo(torch.float32).max
"""Rewards and scores reach the trainer in float32: what is larger in size has no place there."""

_TO_NEAREST: Final = 1.5 * 2.0**52
"""Added to a float64 and taken away again, it leaves the nearest integer: nothing finer fits beside it."""


def _nearest(values: Tensor) -> Tensor:
    """The nearest integers of numbers below 2**51, in place. (`round_` starts threads for a few thousand numbers.)"""
    return values.add_(_TO_NEAREST).sub_(_TO_NEAREST)


# --- groups -----------------------------------------------------------------------------------------------------------


def numbered(groups: Int[Tensor, " samples"]) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct group ids in ascending order, each sample's place among them, and the groups' sizes."""
    names, ids, counts = groups.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    return names, ids, counts


def group_rows(groups: Int[Tensor, " samples"], *, least: int = 1) -> Iterator[Int[Tensor, "groups size"]]:
    """The samples of each group in their order, as rows: one tensor for each size that occurs.

    Raises:
        ValueError: a group of fewer samples than `least`.
    """
    in_order, order = groups.sort(stable=True)
    names, counts = in_order.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    sizes = sorted(set(counts.tolist()))
    for size in sizes:
        if size < least:
            raise ValueError(f"group {int(names[counts == size][0])} has {size} samples, expected at least {least}")
        members = order if len(sizes) == 1 else order[(counts == size).repeat_interleave(counts)]
        yield members.view(-1, size)


def by_group(
    formula: Callable[..., Tensor], groups: Int[Tensor, " samples"], *values: Tensor, least: int = 1
) -> Tensor:
    """What `formula` makes of each group's values, at their samples' places. Raises as `group_rows` does.

    Args:
        formula: of the values of groups of one size, each [groups, size, ...]; it returns a tensor like the first.
        values: [samples, ...].
        least: how many samples a group must have.
    """
    results = torch.empty_like(values[0])
    for rows in group_rows(groups, least=least):
        results[rows] = formula(*(each[rows] for each in values))
    return results


def is_flat(values: Float[Tensor, "groups size *columns"]) -> Bool[Tensor, "groups 1 *columns"]:
    """Are all values of a group equal, exactly? That is what "collapsed" means everywhere."""
    return values.amin(dim=1, keepdim=True) == values.amax(dim=1, keepdim=True)


def group_extrema(
    values: Float[Tensor, "samples columns"], ids: Int[Tensor, " samples"], groups: int
) -> tuple[Float[Tensor, "groups columns"], Float[Tensor, "groups columns"]]:
    """Each group's smallest and largest values."""
    index, start = ids[:, None].expand_as(values), values.new_zeros(groups, values.shape[1])
    low, high = (start.scatter_reduce(0, index, values, op, include_self=False) for op in ("amin", "amax"))
    return low, high


_EXPONENT: Final = 0x7FF << 52
"""The bits of a float64 that hold its exponent: alone, they are the power of two that does not exceed it."""
_LEAST_POWER: Final = 2.0**-900
"""So that a power's reciprocal is finite, with room for 2**51. No eps here is anywhere near it."""


class _Halves:
    """Values [groups, size, columns] as high / scale + low / (scale * finer): two integers, each below 2**51 / size.

    So the sums of a group's integers are exact, and `size` times one of them less their sum is, too. What the second
    integer leaves is below 2**-(103 - 2 * log2(size)) of the group's largest value: nothing, but for unlike magnitudes.
    """

    def __init__(self, values: Tensor) -> None:
        width = 51 - (values.shape[1] - 1).bit_length()
        power = (values.abs().amax(dim=1, keepdim=True).view(torch.int64) & _EXPONENT).view(torch.float64)
        self.scale = 2.0 ** (width - 1) / power.clamp_(min=_LEAST_POWER)
        self.finer = 2.0 ** (width + 1)
        scaled = values * self.scale
        self.high = _nearest(scaled.clone())
        self.low = _nearest(scaled.sub_(self.high).mul_(self.finer))

    def rounded(self, high: Tensor, low: Tensor) -> Tensor:
        """The float64 that two integers stand for, in place. The sum rounds; the rest are powers of two."""
        return high.add_(low, alpha=1 / self.finer).div_(self.scale)


def group_sums(values: Float64[Tensor, "groups size columns"]) -> Float64[Tensor, "groups 1 columns"]:
    """Each group's sums, to the last bit the same for every order of its samples."""
    halves = _Halves(values)
    return halves.rounded(halves.high.sum(dim=1, keepdim=True), halves.low.sum(dim=1, keepdim=True))


def group_deviations(values: Float64[Tensor, "groups size columns"]) -> Float64[Tensor, "groups size columns"]:
    """value - mean of its group, as (size * value - sum) / size with an exact numerator, rounded once.

    So a component that is an exact constant minus another deviates by exactly the negative, and the two cancel.
    """
    halves, size = _Halves(values), values.shape[1]
    high, low = (half.mul(size).sub_(half.sum(dim=1, keepdim=True)) for half in (halves.high, halves.low))
    return halves.rounded(high, low).div_(size)


# --- optimizer batches and ranks --------------------------------------------------------------------------------------

_BITS: Final = 26
_PLACES: Final = 48
_LOWEST: Final = -31 * _BITS
"""Sums are counted in units of 2**-806. Finer bits do not count; no eps here is anywhere near them."""


def sum_by(
    values: Float64[Tensor, "*columns n"], index: Int[Tensor, " n"], count: int
) -> Float64[Tensor, "*columns count"]:
    """Plain sums of the values that share an index: exact of integers below 2**53, in any order."""
    if count == 1:
        return values.sum(dim=-1, keepdim=True)
    return values.new_zeros(*values.shape[:-1], count).index_add(-1, index, values)


def exact_sums(values: Float64[Tensor, " n"], index: Int[Tensor, " n"], count: int) -> list[int]:
    """The sums of the values that share an index, in units of 2**-806.

    In each pass every value gives as many of its bits as can be added up exactly. Two passes or three leave nothing,
    unless magnitudes are mixed.
    """
    sums = [0] * count
    if not values.numel():
        return sums
    rest, whole = values.clone(), torch.empty_like(values)
    width = min(50, 53 - values.numel().bit_length())
    place = max(math.frexp(values.abs().amax().item())[1] - width, _LOWEST)
    while True:
        _nearest(torch.mul(rest, 2.0**-place, out=whole))
        for each, part in enumerate(sum_by(whole, index, count).tolist()):
            sums[each] += int(part) << (place - _LOWEST)
        rest.sub_(whole, alpha=2.0**place)  # `whole * 2**place` has no rounding, so neither has this
        if place == _LOWEST or not rest.any():
            return sums
        place = max(place - width - 1, _LOWEST)


def to_digits(sums: Sequence[int]) -> Float64[Tensor, "count 48"]:
    """Sums as rows of digits, lowest first, with the sum's sign.

    Rows of up to 2**27 ranks may be added up by a plain "sum" reduction, which is exact as well.
    """
    radix = 1 << _BITS
    signed = [(abs(each), 1 if each > 0 else -1) for each in sums]
    rows = [[sign * ((size >> (_BITS * place)) % radix) for place in range(_PLACES)] for size, sign in signed]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, _PLACES)


def from_digits(digits: Float64[Tensor, "count 48"]) -> list[int]:
    """The sums that rows of digits of any size stand for."""
    return [sum(int(digit) << (_BITS * place) for place, digit in enumerate(row) if digit) for row in digits.tolist()]


def quotient(total: int, count: int) -> float:
    """total / count of a total that `exact_sums` gave, rounded once; 0 / 0 is 0."""
    return total / (max(count, 1) << -_LOWEST)
