"""How long a call takes and how much memory it holds at most, of two sides in turn in one process."""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator

import attrs
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
TURN = 0.02
"""Seconds that a turn lasts at least: short calls are repeated."""


@attrs.frozen
class Cost:
    """Milliseconds of a call in its best turn, and the most MiB that it held at a time beyond what was there."""

    best: float
    memory: float


def cost_of(sides: list[Call], rounds: int, memory: bool = True) -> list[Cost]:
    """Each side's cost. They take turns, so that whatever else the machine does meets all of them alike."""
    repeats = [max(1, int(TURN / _seconds(call, 1))) for call in sides]
    held = [peak_memory(call) if memory else 0.0 for call in sides]
    turns: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for call, count, spent in zip(sides, repeats, turns, strict=True):
            spent.append(1e3 * _seconds(call, count))
    return [Cost(min(spent), most) for spent, most in zip(turns, held, strict=True)]


def _seconds(call: Call, count: int) -> float:
    gc.collect()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what C++ code writes to standard error: the profiler announces its start and stop there."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_memory(call: Call) -> float:
    """MiB: the highest sum of what torch's allocator gave out and took back during the call, operators' scratch too."""
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        call()
    # The one place where torch keeps single allocations in their order.
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / 2**20
