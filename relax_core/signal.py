"""Does a group still carry signal for an algorithm? Its own first stage is asked, so that the answer cannot drift."""

from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from relax_core.algorithm import Algorithm
from relax_core.checks import checked
from relax_core.numerics import group_extrema, numbered

H = TypeVar("H")


@checked
def carries_signal(algorithm: Algorithm[H], hyperparameters: H, rewards: Float[Tensor, "samples components"]) -> bool:
    """Would this one group's scores, as a trainer sees them in float32, differ at all? A group of no samples: no.

    A group of fewer samples than the algorithm asks for has nothing to differ from and carries none.

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
    _, ids, counts = numbered(groups)
    enough = (counts >= algorithm.traits.min_group_size)[ids]
    scores = torch.zeros(len(rewards), dtype=torch.float32, device=rewards.device)
    if enough.any():
        scores[enough] = algorithm.normalize_rewards(hyperparameters, rewards[enough], groups[enough]).float()
    low, high = group_extrema(scores[:, None], ids, len(counts))
    return torch.ne(low, high).squeeze(1)
