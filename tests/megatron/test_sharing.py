"""The work of a draw among the ranks of a job: every prompt is answered once a replica, and rewarded once."""

import random
from collections.abc import Sequence

import attrs
import pytest

from relax.data.samples import Completion, Sample
from relax.errors import PeerError
from relax.megatron import groups
from relax.megatron.layout import ONE_RANK, Layout
from relax.rollout.sampling import Group
from relax.rollout.sharing import alone, among_replicas
from tests.megatron import jobs

PLACE = "samples and rewards"


@attrs.frozen
class Seen:
    """What one rank answered, rewarded and was told."""

    answered: list[int]
    rewarded: list[int]
    told: list[Group]


def group(place: int) -> Group:
    return (Sample(place, {}, (1, 2), Completion((place, 0), (-0.5, -0.25), True), str(place)),)


def draws(amounts: Sequence[int]) -> list[Seen]:
    """A reward function that never repeats itself, as one that asks a judge may not."""
    seen = []
    for amount in amounts:
        answered: list[int] = []
        rewarded: list[int] = []

        def answer(share: range, answered: list[int] = answered) -> list[Group]:
            answered.extend(share)
            return [group(place) for place in share]

        def reward(found: list[Group], rewarded: list[int] = rewarded) -> list[Group]:
            rewarded.extend(sample.group for (sample,) in found)
            judge = random.SystemRandom()
            return [(attrs.evolve(sample, rewards={"score": judge.random()}),) for (sample,) in found]

        seen.append(Seen(answered, rewarded, among_replicas(amount, answer, reward, place=PLACE)))
    return seen


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, ONE_RANK), (3, ONE_RANK), (2, Layout(tensor=2)), (4, Layout(pipeline=2)), (4, Layout(context=2))],
    ids=["DP 2", "DP 3", "TP 2", "PP 2 x DP 2", "CP 2 x DP 2"],
)
def test_every_prompt_is_rewarded_once_and_every_rank_is_told_the_same(world: int, layout: Layout) -> None:
    amounts = [7, 2, 1, 0]
    replicas = layout.data(world)
    for amount, seen in zip(amounts, zip(*jobs.run(world, layout, draws, amounts), strict=True), strict=True):
        assert [sample.group for (sample,) in seen[0].told] == list(range(amount))
        assert all(rank.told == seen[0].told for rank in seen)
        assert sorted(place for rank in seen for place in rank.rewarded) == list(range(amount))
        assert sum(bool(rank.rewarded) for rank in seen) == min(amount, replicas)
        answered = sorted(place for rank in seen for place in rank.answered)
        assert answered == sorted(list(range(amount)) * layout.replica)
        assert {len(rank.answered) for rank in seen} <= {amount // replicas, -(-amount // replicas)}


def test_alone_everything_is_ones_own() -> None:
    found = alone(3, lambda share: [group(place) for place in share], lambda found: found[::-1], place=PLACE)
    assert found == [group(2), group(1), group(0)]


def fault(broken: int) -> str:
    def reward(found: list[Group]) -> list[Group]:
        if groups.replica()[0] == broken:
            raise ValueError("the judge is out")
        return found

    try:
        among_replicas(4, lambda share: [group(place) for place in share], reward, place=PLACE)
    except (ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_fault_in_one_share_is_raised_on_every_rank() -> None:
    """Before anything is exchanged: who waited in the exchange could not hear of it."""
    told = f"PeerError: rank 1 failed at {PLACE!r}: ValueError: the judge is out"
    assert jobs.run(3, ONE_RANK, fault, 1) == [told, "ValueError: the judge is out", told]
