"""Threads play the ranks of a data-parallel group, and golden numbers are read from tests/data."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from relax_core.collectives import Reduce

T = TypeVar("T")
GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class World:
    """A meeting place for `size` threads; counts collectives and refuses shapes that differ.

    Whoever waits in vain for a rank that raised breaks off after some seconds, with another error than that rank's.
    """

    def __init__(self, size: int, seconds: float = 10.0) -> None:
        self.size, self.collectives = size, 0
        self._slots: list[Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=seconds)

    def reduce(self, rank: int) -> Reduce:
        def reduce(values: Tensor, op: str) -> Tensor:
            self._slots[rank] = values.clone()
            self._barrier.wait()
            shapes = {slot.shape for slot in self._slots}
            assert len(shapes) == 1, f"ranks reduce tensors of different shapes: {shapes}"
            # Another order on every rank: what is reduced must not depend on it.
            stacked = torch.stack(self._slots[rank:] + self._slots[:rank])
            self.collectives += rank == 0
            self._barrier.wait()
            return stacked.sum(0) if op == "sum" else stacked.amax(0)

        return reduce


def on_ranks(shares: Sequence[T], run: Callable[[T, Reduce], object]) -> tuple[list[object], World]:
    """Run one thread for each share; what a rank returned or raised, in rank order, and their world."""
    world = World(len(shares))
    results: list[object] = [None] * len(shares)

    def rank(number: int) -> None:
        try:
            results[number] = run(shares[number], world.reduce(number))
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, world
