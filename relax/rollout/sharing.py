"""Prompts divided among the replicas of a job: each answers its share, one rank of it rewards, and every rank is told.

A user's reward function is so called once for each sample, and all ranks go on with the same rewards even where it
would not repeat itself.
"""

from collections.abc import Callable
from typing import Protocol

from relax.agreement import stage
from relax.megatron import groups
from relax.rollout.sampling import Group


class Share(Protocol):
    """How a job comes to the rewarded answers to many prompts."""

    def __call__(
        self,
        amount: int,
        answer: Callable[[range], list[Group]],
        reward: Callable[[list[Group]], list[Group]],
        *,
        place: str,
    ) -> list[Group]:
        """Those to prompts 0 to `amount`, in their order, on every rank.

        `answer` is called with the places of a run of neighbours, `reward` with what it returned. `place` says what
        this is, for whoever waits.
        """
        ...


def alone(
    amount: int, answer: Callable[[range], list[Group]], reward: Callable[[list[Group]], list[Group]], *, place: str
) -> list[Group]:
    """The share of a single process: everything."""
    return reward(answer(range(amount)))


def among_replicas(
    amount: int, answer: Callable[[range], list[Group]], reward: Callable[[list[Group]], list[Group]], *, place: str
) -> list[Group]:
    """Every replica takes as many, or one more. All its ranks answer, since they share the model; its first rewards.

    A fault in either function is raised on every rank, as one of the stage `place`.
    """
    replica, replicas = groups.replica()
    with stage(place):
        own = answer(range(amount * replica // replicas, amount * (replica + 1) // replicas))
        if groups.leads_replica():
            own = reward(own)
    return [group for part in groups.from_replicas(own) for group in part]
