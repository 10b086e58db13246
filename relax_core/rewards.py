"""Rewards -> scores: what a reward function returned becomes one number for each sample, group by group."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from numbers import Real

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from relax_core.checks import checked
from relax_core.numerics import (
    FLOAT32_MAX,
    GDPO_EPS,
    GROUP_EPS,
    by_group,
    group_deviations,
    group_extrema,
    group_sums,
    is_flat,
    numbered,
)


@checked
def component_matrix(rewards: Sequence[object], keys: Sequence[str]) -> Float64[Tensor, "samples components"]:
    """The named components of each sample's reward mapping, strictly: nothing is filled in, nothing is repaired.

    Raises:
        ValueError: no keys or duplicate keys; a reward that is no mapping or lacks a key; a number that is NaN,
            infinite, or larger than float32 holds.
        TypeError: a component that is no real number (bool and str are none).
    """
    if not keys or len(set(keys)) != len(keys):
        raise ValueError(f"reward keys must be at least one, without duplicates, got {list(keys)}")
    rows = [[_component(reward, key, sample) for key in keys] for sample, reward in enumerate(rewards)]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(keys))


def _component(reward: object, key: str, sample: int) -> float:
    if not isinstance(reward, Mapping):
        raise ValueError(f"the reward of sample {sample} is no mapping from keys to numbers, got {reward!r}")
    if key not in reward:
        raise ValueError(f"the reward of sample {sample} has no key {key!r}, only {sorted(map(str, reward))}")
    value: object = reward[key]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"reward {key!r} of sample {sample} must be a real number, got {value!r}")
    # Compared before it is converted: a huge int has no float, and a NaN compares false.
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX:  # type: ignore[operator]
        raise ValueError(f"reward {key!r} of sample {sample} must be finite and fit into float32, got {value!r}")
    return float(value)


def group_ids(ids: Sequence[Hashable], size: int | None = None) -> Int[Tensor, " samples"]:
    """Group ids of any kind as integers, counted from 0 in order of appearance.

    Args:
        size: the number of samples that every group must have; None allows any.

    Raises:
        ValueError: a missing id (None), or a group of another size; names group, count and expected.
    """
    numbers: dict[Hashable, int] = {}
    for sample, group in enumerate(ids):
        if group is None:
            raise ValueError(f"sample {sample} has no group id")
        numbers.setdefault(group, len(numbers))
    for group, count in Counter(ids).items():
        if size is not None and count != size:
            raise ValueError(f"group {group!r} has {count} samples, expected {size}")
    return torch.tensor([numbers[group] for group in ids], dtype=torch.long)


def single_reward(rewards: Float[Tensor, "samples components"]) -> Float[Tensor, " samples"]:
    """The one component of an algorithm that reads a scalar.

    Raises:
        ValueError: more or less than one component; a value that float32 cannot hold (names sample and value).
    """
    if rewards.shape[1] != 1:
        raise ValueError(
            f"this algorithm reads one scalar reward for each sample, but got {rewards.shape[1]} components; "
            "choose one, or sum them before"
        )
    expect_finite(rewards)
    return rewards[:, 0]


def named_components(
    rewards: Float[Tensor, "samples components"], *names: str
) -> tuple[Float[Tensor, " samples"], ...]:
    """The columns of an algorithm that reads components of fixed meaning, in this order.

    Raises:
        ValueError: another number of components; a value that float32 cannot hold.
    """
    if rewards.shape[1] != len(names):
        raise ValueError(f"expected the reward components {', '.join(names)}, got {rewards.shape[1]} components")
    expect_finite(rewards)
    return rewards.unbind(dim=1)


def expect_finite(rewards: Float[Tensor, "samples components"]) -> None:
    """Raise a ValueError that names sample, component and value unless float32 holds every reward."""
    broken = ~(rewards.abs() <= FLOAT32_MAX)
    if broken.any():
        sample, component = broken.nonzero()[0].tolist()
        raise ValueError(
            f"component {component} of the reward of sample {sample} is {rewards[sample, component].item()}, "
            f"which is not finite in float32 ({int(broken.sum())} such values)"
        )


@checked
def group_mean_std(
    rewards: Float[Tensor, " samples"], groups: Int[Tensor, " samples"], *, scale: bool = True, eps: float = GROUP_EPS
) -> Float[Tensor, " samples"]:
    """c / (std(c) + eps) with c = r - mean(r) over each group; only c where not `scale`. GRPO, arXiv 2402.03300.

    In the rewards' own precision, what `c = r - r.mean(); c / (c.std() + eps)` gives for the rewards of each group in
    their order: in float32 on a CPU to the bit, in float64 but for the last one. With one exception: a group whose
    rewards are all equal gets exact zeros, as one of one.

    Raises:
        ValueError: rewards so large that the statistics overflow.
    """

    def standardize(group: Tensor) -> Tensor:
        centred = group - group.mean(dim=1, keepdim=True)
        if scale and group.shape[1] > 1:
            centred = centred / (_std(centred) + eps)
        return torch.where(is_flat(group), 0.0, centred)

    scores = by_group(standardize, groups, rewards)
    if not scores.isfinite().all():
        sample = int((~scores.isfinite()).nonzero()[0])
        raise ValueError(f"the statistics of group {int(groups[sample])} overflow {rewards.dtype}")
    return scores


def _std(values: Float[Tensor, "groups size"]) -> Float[Tensor, "groups 1"]:
    """`row.std()` of each row, as torch computes it of one tensor on a CPU.

    `std(dim=1)` of more than one row takes another way and now and then rounds to a neighbour: then a group's scores
    would depend on whether there are others.
    """
    deviations = values.double() - values.mean(dim=1, keepdim=True).double()
    squares = deviations.square().cumsum(dim=1)[:, -1:]  # added one after another, as there
    return (squares / (values.shape[1] - 1)).sqrt().to(values.dtype)


@checked
def leave_one_out(rewards: Float[Tensor, " samples"], groups: Int[Tensor, " samples"]) -> Float[Tensor, " samples"]:
    """r - mean of the other rewards of the group = G / (G - 1) * (r - mean). RLOO, arXiv 2402.14740.

    Computed in float64, with exact zeros where all rewards of a group are equal.

    Raises:
        ValueError: a group of one sample; a reward that is not finite (names group, positions and values).
    """
    _expect_finite_groups(rewards, groups)

    def centre(group: Tensor) -> Tensor:
        size = group.shape[1]
        return group_deviations(group) * (size / (size - 1))

    return by_group(centre, groups, rewards.detach().double()[:, None], least=2)[:, 0].to(rewards.dtype)


def _expect_finite_groups(rewards: Tensor, groups: Tensor) -> None:
    broken = (~(rewards.abs() <= FLOAT32_MAX)).nonzero()[:, 0]
    if len(broken):
        group = int(groups[broken[0]])
        positions = broken[groups[broken] == group]
        raise ValueError(f"group {group} has rewards {rewards[positions].tolist()} at samples {positions.tolist()}")


@checked
def length_weighted_baseline(
    rewards: Float[Tensor, " samples"], lengths: Float[Tensor, " samples"], groups: Int[Tensor, " samples"]
) -> Float64[Tensor, " samples"]:
    """r - sum(length * r) / sum(length) over each group. OPO, arXiv 2505.23585.

    In float64, to the bit the same for every order of the samples; exact zeros where all rewards of a group are equal.

    Raises:
        ValueError: a group of one sample; a negative length, or a group of lengths 0 only.
    """

    def deviate(group: Tensor, weights: Tensor) -> Tensor:
        baseline = group_sums(weights * group) / group_sums(weights)
        return torch.where(is_flat(group), 0.0, group - baseline)

    names, ids, counts = numbered(groups)
    values, weights = rewards.detach().double()[:, None], lengths.double()[:, None]
    least, most = group_extrema(weights, ids, len(counts))
    broken = (least < 0) | (most == 0)
    if broken.any():
        raise ValueError(f"lengths must be 0 or more and not all 0 in group {int(names[broken.nonzero()[0, 0]])}")
    return by_group(deviate, groups, values, weights, least=2)[:, 0]


@checked
def overlong_penalty(lengths: Int[Tensor, " samples"], *, max_length: int, buffer: int) -> Float64[Tensor, " samples"]:
    """What to add to the reward of long responses: 0 until `buffer` tokens before `max_length`, -1 from there on.

    Falls linearly within the buffer. Soft overlong punishment of DAPO, arXiv 2503.14476, Eq. 13.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the buffer must be 1 to max_length ({max_length}) tokens, got {buffer}")
    return ((max_length - buffer - lengths.double()) / buffer).clamp(-1, 0)


# Not `checked`: the two that it calls are.
def decoupled(
    rewards: Float[Tensor, "samples components"],
    groups: Int[Tensor, " samples"],
    weights: Float64[Tensor, " components"],
    *,
    eps: float = GDPO_EPS,
) -> Float64[Tensor, " samples"]:
    """Steps 1 and 2 of GDPO: the weighted sum of each component's own group mean/std. arXiv 2601.05242, Eqs. 4, 5.

    z = (x - mean) / (std + eps) for each component in its group (unbiased std), exactly 0 where all its values there
    are equal; the score is sum_k w_k z_k and nothing else. In float64 from end to end; to the bit the same for every
    order of the samples; a component that is an exact constant minus another cancels it exactly under equal weights.

    Raises:
        ValueError: a reward that float32 cannot hold; a group of one sample; a score that float32 cannot hold.
    """
    return combined(standardized(rewards, groups, eps=eps), weights)


@checked
def standardized(
    rewards: Float[Tensor, "samples components"], groups: Int[Tensor, " samples"], *, eps: float = GDPO_EPS
) -> Float64[Tensor, "samples components"]:
    """Step 1 of GDPO alone: every component's z. Raises as `decoupled` does."""
    expect_finite(rewards)

    def standardize(group: Tensor) -> Tensor:
        deviations = group_deviations(group)
        variances = group_sums(deviations.square()) / (group.shape[1] - 1)
        return torch.where(is_flat(group), 0.0, deviations / (variances.sqrt() + eps))

    return by_group(standardize, groups, rewards.detach().double(), least=2)


@checked
def combined(
    z: Float64[Tensor, "samples components"], weights: Float64[Tensor, " components"]
) -> Float64[Tensor, " samples"]:
    """Step 2 of GDPO alone: sum_k w_k z_k. Raises as `decoupled` does."""
    scores = (z * weights).sum(dim=1)
    if not (scores.abs() <= FLOAT32_MAX).all():
        sample = int((~(scores.abs() <= FLOAT32_MAX)).nonzero()[0])
        raise ValueError(f"the weighted score of sample {sample} is {scores[sample].item()}, which float32 cannot hold")
    return scores


@checked
def conditioned(
    rewards: Float[Tensor, " samples"], condition: Float[Tensor, " samples"], threshold: float
) -> Float[Tensor, " samples"]:
    """A reward that counts only where another reaches a threshold, else 0. arXiv 2601.05242, Eq. 8."""
    return torch.where(condition >= threshold, rewards, torch.zeros_like(rewards))


def weight_vector(weights: Sequence[float], components: int) -> Float64[Tensor, " components"]:
    """Component weights in float64; none given means 1 each.

    Raises:
        ValueError: another number of weights than components; a weight that is not finite, or all zero; the same after
            a cast to float32.
    """
    if weights and len(weights) != components:
        raise ValueError(f"{len(weights)} reward weights for {components} reward components")
    fault = weights_fault(weights)
    if fault is not None:
        raise ValueError(f"reward weights {fault}, got {tuple(weights)}")
    return torch.tensor(weights or [1.0] * components, dtype=torch.float64)


def weights_fault(weights: object) -> str | None:
    """What is wrong with component weights, or None. Empty weights are right: they stand for 1 each."""
    if not isinstance(weights, tuple | list):
        return "must be a tuple of numbers"
    if any(isinstance(weight, bool) or not isinstance(weight, Real) for weight in weights):
        return "must be real numbers"
    if any(not math.isfinite(weight) or abs(weight) > FLOAT32_MAX for weight in weights):
        return "must be finite and fit into float32"
    if weights and not torch.tensor(weights, dtype=torch.float32).any():
        return "must not all be zero (in float32)"
    return None
