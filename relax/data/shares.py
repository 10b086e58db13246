"""Which samples each of several ranks works on."""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import pairwise


def shares(lengths: Sequence[int], ranks: int, *, balanced: bool) -> list[list[int]]:
    """The places of each rank's samples, ascending; every sample of `lengths` tokens belongs to one rank.

    Without `balanced` neighbours stay together and ranks get as many samples as they go. With it they get about as many
    tokens: the longest sample first, each to the rank that has the fewest so far.
    """
    count = len(lengths)
    if not balanced:
        ends = [count * rank // ranks for rank in range(ranks + 1)]
        return [list(range(start, stop)) for start, stop in pairwise(ends)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for place in sorted(range(count), key=lambda place: -lengths[place]):
        tokens, rank = loads[0]
        parts[rank].append(place)
        heapreplace(loads, (tokens + lengths[place], rank))
    return [sorted(part) for part in parts]
