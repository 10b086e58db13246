"""What a group's rewards tell: whether it carries signal for an algorithm, and how sound that signal is.

The first is asked of the algorithm's own first stage, so that the answer cannot drift. All answers are values.
"""

import math
from typing import Final, TypeVar

import attrs
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from relax_core.algorithm import Algorithm
from relax_core.checks import checked, checked_record
from relax_core.numerics import (
    GDPO_EPS,
    by_group,
    group_deviations,
    group_extrema,
    group_rows,
    group_sums,
    is_flat,
    numbered,
)
from relax_core.rewards import combined, standardized

H = TypeVar("H")

_UNIT: Final = 2.0**-53
"""Half the distance from 1 to the next float64: the largest relative error of one rounding."""


@checked
def carries_signal(algorithm: Algorithm[H], hyperparameters: H, rewards: Float[Tensor, "samples components"]) -> bool:
    """Would this one group's scores, as a trainer sees them in float32, differ at all? A group of no samples: no.

    A group of fewer samples than the algorithm asks for has nothing to differ from and carries none. Scores less the
    greedy response's reward have their baseline already: equal ones carry signal, too, unless they are 0.

    Raises:
        ValueError: rewards that the algorithm's first stage refuses.
    """
    groups = torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)
    return bool(groups_with_signal(algorithm, hyperparameters, rewards, groups).any())


@checked
def groups_with_signal(
    algorithm: Algorithm[H],
    hyperparameters: H,
    rewards: Float[Tensor, "samples components"],
    groups: Int[Tensor, " samples"],
) -> Bool[Tensor, " groups"]:
    """`carries_signal` of each group, groups in ascending order of their ids. Raises as it does."""
    return scores_with_signal(algorithm, group_scores(algorithm, hyperparameters, rewards, groups), groups)


@checked
def scores_with_signal(
    algorithm: Algorithm[H], scores: Float[Tensor, " samples"], groups: Int[Tensor, " samples"]
) -> Bool[Tensor, " groups"]:
    """`groups_with_signal` of scores that its first stage has given already."""
    found = scores_differ(scores, groups)
    if "greedy_reward" in algorithm.traits.component_names:
        _, ids, counts = numbered(groups)
        found |= _group_max(scores.float().abs(), ids, len(counts)) > 0
    return found


@checked
def group_scores(
    algorithm: Algorithm[H],
    hyperparameters: H,
    rewards: Float[Tensor, "samples components"],
    groups: Int[Tensor, " samples"],
) -> Float64[Tensor, " samples"]:
    """The algorithm's first stage; 0 in groups of fewer samples than it asks for. Raises as `carries_signal` does."""
    _, ids, counts = numbered(groups)
    enough = (counts >= algorithm.traits.min_group_size)[ids]
    scores = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    if enough.any():
        scores[enough] = algorithm.normalize_rewards(hyperparameters, rewards[enough], groups[enough]).double()
    return scores


@checked
def readable(
    algorithm: Algorithm[H], components: Float64[Tensor, "samples components"], weights: Float64[Tensor, " components"]
) -> Float64[Tensor, "samples columns"]:
    """What the algorithm's first stage reads of components: themselves, or their weighted sum as the one reward.

    Raises:
        ValueError: a sum that float32 cannot hold.
    """
    return components if algorithm.traits.reads_components else combined(components, weights)[:, None]


@checked
def contributions(
    algorithm: Algorithm[H],
    hyperparameters: H,
    components: Float64[Tensor, "samples components"],
    groups: Int[Tensor, " samples"],
    weights: Float64[Tensor, " components"],
    *,
    scores: Float64[Tensor, " samples"] | None = None,
) -> Float64[Tensor, "groups components"]:
    """What each component gave to a group's scores; groups in ascending order of their ids.

    With d the scores' deviations from their group's mean and p_k the part of component k, likewise centred, a group's
    row is sum_i p_ik d_i, scaled so that it adds up to sum_i d_i^2. The part is w_k x_k for an algorithm that reads the
    sum; for one that reads components it is the scores it gives where all other components are their group's mean. So
    the row over its sum is `Components.share` for decoupled scores, and the covariance with the sum over the sum's
    variance for a group mean/std. Zeros where scores or parts do not vary. Raises as `carries_signal` does.

    Args:
        scores: those of `group_scores`, where they are known already.
    """
    _, ids, counts = numbered(groups)
    if scores is None:
        scores = group_scores(algorithm, hyperparameters, readable(algorithm, components, weights), groups)
    parts = _parts(algorithm, hyperparameters, components, groups, weights, scores)
    deviations = _centred(scores[:, None], ids, counts)
    work = _group_sums(_centred(parts, ids, counts) * deviations, ids, counts)
    energy, total = _group_sums(deviations.square(), ids, counts), work.sum(dim=1, keepdim=True)
    return torch.where(total > 0, work * (energy / torch.where(total > 0, total, 1.0)), 0.0)


def _parts(
    algorithm: Algorithm[H], hyperparameters: H, components: Tensor, groups: Tensor, weights: Tensor, scores: Tensor
) -> Tensor:
    """See `contributions`."""
    if not algorithm.traits.reads_components:
        return components * weights
    _, ids, counts = numbered(groups)
    several = (counts > 1)[ids]
    parts = torch.zeros_like(components)
    parts[several] = standardized(components[several], groups[several]) * weights
    if torch.equal(combined(parts, torch.ones_like(weights)), scores):
        return parts  # decoupled scores: their parts are known, without one run of the stage for each
    means = (_group_sums(components, ids, counts) / counts[:, None])[ids]
    own = torch.eye(components.shape[1], dtype=torch.bool, device=components.device)
    alone = [group_scores(algorithm, hyperparameters, torch.where(column, components, means), groups) for column in own]
    return torch.stack(alone, dim=1)


def _group_sums(values: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    """Plain sums: for a diagnosis, not for advantages, whose exact ones take ten times as long."""
    return values.new_zeros(len(counts), values.shape[1]).index_add(0, ids, values)


def _centred(values: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    return values - (_group_sums(values, ids, counts) / counts[:, None])[ids]


@checked
def scores_differ(scores: Float[Tensor, " samples"], groups: Int[Tensor, " samples"]) -> Bool[Tensor, " groups"]:
    """Where a group's scores are not all equal in float32; groups in ascending order of their ids."""
    _, ids, counts = numbered(groups)
    low, high = group_extrema(scores.float()[:, None], ids, len(counts))
    return torch.ne(low, high).squeeze(1)


@checked_record
@attrs.frozen(eq=False)
class Components:
    """How each group's reward components make up its decoupled scores; groups in ascending order of their ids.

    Attributes:
        groups: the groups' ids.
        flat: all samples of the group have the same value there, exactly.
        share: sum_i w_k z_ik A_i / sum_i A_i^2, how much the component gave to the scores A. A group's shares add up to
            1, and a component that works against the others has a negative one. 0 where the group's scores are all 0.
        condition: max_i sum_k |w_k z_ik| / max_i |A_i|, what any error of the components is magnified by. 1 is sound;
            infinite where they cancel exactly; 1 where all are flat. Large as well where opposite components of unlike
            scale leave a residue of eps only.
        rounding: the share of the largest score that may be rounding, at most: of the rewards themselves, each half a
            last place of its group's largest, and of the arithmetic. 1 or more: nothing of the scores is certain.
        cancels: the component is not flat and has a weight, yet all its group's scores may be rounding.
    """

    groups: Int[Tensor, " groups"]
    flat: Bool[Tensor, "groups components"]
    share: Float64[Tensor, "groups components"]
    condition: Float64[Tensor, " groups"]
    rounding: Float64[Tensor, " groups"]
    cancels: Bool[Tensor, "groups components"]


@checked
def components(
    rewards: Float[Tensor, "samples components"],
    groups: Int[Tensor, " samples"],
    weights: Float64[Tensor, " components"],
    *,
    eps: float = GDPO_EPS,
) -> Components:
    """Diagnose the decoupled scores of `relax_core.rewards.decoupled`. Raises as it does."""
    names, ids, counts = numbered(groups)
    number, values = len(counts), rewards.detach().double()
    parts = standardized(values, groups, eps=eps) * weights
    scores = combined(parts, torch.ones_like(weights))
    low, high = group_extrema(values, ids, number)
    flat = low == high
    energy = _group_sums(scores.square()[:, None], ids, counts)
    share = _group_sums(parts * scores[:, None], ids, counts) / torch.where(energy > 0, energy, 1.0)
    error = _error_bound(values, parts, weights, groups, eps)
    largest = _group_max(scores.abs(), ids, number)
    alive = ~flat.all(dim=1)
    return Components(
        groups=names,
        flat=flat,
        share=share,
        condition=torch.where(alive, _group_max(parts.abs().sum(dim=1), ids, number) / largest, 1.0),
        rounding=torch.where(alive, _group_max(error, ids, number) / largest, 0.0),
        cancels=~flat & (weights != 0) & (_group_max(scores.abs() - error, ids, number) <= 0)[:, None],
    )


def _error_bound(
    values: Tensor, parts: Tensor, weights: Tensor, groups: Tensor, eps: float
) -> Float64[Tensor, " samples"]:
    """A bound for |computed - exact| of each score, where "exact" starts from rewards before they were rounded.

    Let M be the group's largest |x|, u = 2^-53 and n its size. Each x is off by at most uM, so d = x - mean by 2uM, and
    s = std + eps by e = 2uM sqrt(n / (n - 1)), since a seminorm changes by no more than the seminorm of the change. For
    computed d', s', z' = d' / s': d / s - z' = (d - d') / s + z' (s' - s) / s, at most (2uM + |z'| e) / (s' - e), and
    without bound where e reaches s'. The arithmetic itself rounds a handful of times relative to |w z|, and once more
    for each component added.
    """

    def bound(group: Tensor, part: Tensor) -> Tensor:
        size, largest = group.shape[1], group.abs().amax(dim=1, keepdim=True)
        scale = (group_sums(group_deviations(group).square()) / (size - 1)).sqrt() + eps
        z = torch.where(weights == 0, 0.0, part / torch.where(weights == 0, 1.0, weights)).abs()
        drift = 2 * _UNIT * largest * math.sqrt(size / (size - 1))
        inherited = (2 * _UNIT * largest + z * drift) / (scale - drift).clamp(min=0)
        arithmetic = (8 + group.shape[2]) * _UNIT * part.abs()
        return torch.where(is_flat(group), 0.0, weights.abs() * inherited + arithmetic)

    return by_group(bound, groups, values, parts).sum(dim=1)


def _group_max(values: Tensor, ids: Tensor, groups: int) -> Tensor:
    return group_extrema(values[:, None], ids, groups)[1][:, 0]


@checked
def distinct_groups(
    scores: Float[Tensor, " samples"], groups: Int[Tensor, " samples"], *, resolution: float = 1e-6
) -> int:
    """How many groups differ in their scores, order within a group aside; equal is equal to within `resolution`.

    What the GDPO paper counts (arXiv 2601.05242, Figure 2): the more, the finer the advantages tell groups apart.
    """
    steps, found = (scores.double() / resolution).round(), 0
    for rows in group_rows(groups):  # by size, so that one large group does not widen the rows of all
        found += len(steps[rows].sort(dim=1).values.unique(dim=0))  # type: ignore[no-untyped-call]
    return found
