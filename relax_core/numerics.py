"""Sums that do not depend on the order of their terms, and the constants that the formulas add.

A float64 is split into *digits* of 26 bits: value = sum over j of digit_j * 2**(26 * (top - j)), where `top` is the
place of the first digit. Digits are integers of at most 2**26 in size, so up to 2**27 of them add up exactly, in any
order and over any number of ranks; only the last step, from digits back to one float64, rounds. (Kulisch's long
accumulator.)
"""

from typing import Final

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

GROUP_EPS: Final = 1e-6
"""Added to a group's standard deviation by the single-reward algorithms (what their users migrate from)."""
GDPO_EPS: Final = 1e-4
"""Added to both standard deviations of GDPO (NVlabs' TRL implementation; the paper, arXiv 2601.05242, gives none)."""
FLOAT32_MAX: Final = torch.finfo(torch.float32).max
"""Rewards and scores reach the trainer in float32: what is larger in size has no place there."""

_BITS: Final = 26
_RADIX: Final = 2.0**_BITS
_WIDTH: Final = 4
_HIGHEST: Final = 32
_LOWEST: Final = _HIGHEST - 63
_PLACES: Final = _HIGHEST - _LOWEST + 1
_TO_NEAREST: Final = 1.5 * 2.0**52
"""Added to a float64 and taken away again, it leaves the nearest integer: nothing finer fits beside it."""


def _nearest(values: Tensor) -> Tensor:
    """The nearest integers of numbers below 2**51, in place. (`round_` starts threads for a few thousand numbers.)"""
    return values.add_(_TO_NEAREST).sub_(_TO_NEAREST)


def _scale(place: Tensor) -> Tensor:
    """2**(26 * place), exactly: the exponent's bits of a float64, written where they stand."""
    return (_BITS * place + 1023 << 52).view(torch.float64)


def top_place(values: Tensor) -> Tensor:
    """The place of each value's first digit. Bits below 2**-806 do not count; no eps here is anywhere near them."""
    exponent = torch.frexp(values).exponent.long()
    return ((exponent - 1) // _BITS).clamp(_LOWEST + _WIDTH - 1, _HIGHEST)


def to_digits(values: Tensor, top: Tensor) -> Tensor:
    """Four digits of each value, from place `top` down, on a new last axis: exact down to 2**-78 of `top`."""
    rest, digits = values * _scale(-top), []
    for _ in range(_WIDTH):
        digits.append(_nearest(rest.clone()))
        rest = rest.sub_(digits[-1]).mul_(_RADIX)
    return torch.stack(digits, dim=-1)


def from_digits(digits: Tensor, top: Tensor) -> Tensor:
    """The float64 that digits (last axis, integers of any size below 2**53) stand for.

    Carries first, so that digits that cancel do so exactly, then adds neighbours pairwise, a fixed tree.
    """
    # Places first: whole tensors are added then, not many short rows.
    digits = digits.movedim(-1, 0).clone(memory_format=torch.contiguous_format)
    # The first sweep leaves digits below 2**28, the second some that are too large by 3, the third by 1.
    for _ in range(3):
        carry = _nearest(digits[1:] / _RADIX)
        digits[1:].sub_(carry, alpha=_RADIX)
        digits[:-1].add_(carry)
    places = torch.arange(len(digits), device=digits.device).view(-1, *[1] * top.ndim)
    terms = digits * _scale(top - places)
    while len(terms) > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def accumulate(
    values: Float64[Tensor, "*columns n"], index: Int[Tensor, " n"], count: int
) -> Float64[Tensor, "*columns count 64"]:
    """Exact sums of the values that share an index, as digits at all 64 places.

    These rows may be added to other ranks' rows by a plain "sum" reduction, which is exact as well. One pass for each
    place from that of the largest value down to where no digits are left: a handful, unless magnitudes are mixed.
    """
    sums, rest = values.new_zeros(*values.shape[:-1], count, _PLACES), values.clone()
    place, digits = int(top_place(values.abs().amax())) if values.numel() else 0, torch.empty_like(values)
    while place >= _LOWEST and rest.any():
        unit = 2.0 ** (_BITS * place)
        _nearest(torch.mul(rest, 1 / unit, out=digits))
        sums[..., _HIGHEST - place] = sum_by(digits, index, count)
        rest.sub_(digits, alpha=unit)  # digits * unit has no rounding, so neither has this
        place -= 1
    return sums


def sum_by(
    values: Float64[Tensor, "*columns n"], index: Int[Tensor, " n"], count: int
) -> Float64[Tensor, "*columns count"]:
    """Plain sums of the values that share an index: exact of integers below 2**53, in any order."""
    if count == 1:
        return values.sum(dim=-1, keepdim=True)
    return values.new_zeros(*values.shape[:-1], count).index_add(-1, index, values)


def rounded(sums: Float64[Tensor, "*counts 64"]) -> Float64[Tensor, "*counts"]:
    """The float64 values of rows that `accumulate` made."""
    return from_digits(sums, torch.full(sums.shape[:-1], _HIGHEST, device=sums.device))


def numbered(groups: Int[Tensor, " samples"]) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct group ids in ascending order, each sample's place among them, and the groups' sizes."""
    names, ids, counts = groups.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    return names, ids, counts


def group_extrema(
    values: Float[Tensor, "samples columns"], ids: Int[Tensor, " samples"], groups: int
) -> tuple[Float[Tensor, "groups columns"], Float[Tensor, "groups columns"]]:
    """Each group's smallest and largest values. Their equality, exact, is what "collapsed" means everywhere."""
    index, start = ids[:, None].expand_as(values), values.new_zeros(groups, values.shape[1])
    low, high = (start.scatter_reduce(0, index, values, op, include_self=False) for op in ("amin", "amax"))
    return low, high


def _group_digits(values: Tensor, ids: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each value's digits, aligned to its group's largest; the groups' sums of them; and the groups' top places."""
    index, size = ids[:, None].expand_as(values), values.abs()
    top = top_place(size.new_zeros(groups, values.shape[1]).scatter_reduce(0, index, size, "amax"))
    digits = to_digits(values, top[ids])
    return digits, digits.new_zeros(*top.shape, _WIDTH).index_add(0, ids, digits), top


def group_sums(
    values: Float64[Tensor, "samples columns"], ids: Int[Tensor, " samples"], groups: int
) -> Float64[Tensor, "groups columns"]:
    """Each group's sums, to the last bit the same for every order of the samples."""
    _, sums, top = _group_digits(values, ids, groups)
    return from_digits(sums, top)


def group_deviations(
    values: Float64[Tensor, "samples columns"], ids: Int[Tensor, " samples"], counts: Int[Tensor, " groups"]
) -> Float64[Tensor, "samples columns"]:
    """value - mean of its group, as (count * value - sum) / count with an exact numerator.

    So a component that is an exact constant minus another deviates by exactly the negative, and the two cancel.
    """
    digits, sums, top = _group_digits(values, ids, len(counts))
    size = counts[ids, None].to(torch.float64)
    return from_digits(size[..., None] * digits - sums[ids], top[ids]) / size
