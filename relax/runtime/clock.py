"""Where the time of a step went."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of named phases until `lap` reads them. Phases do not nest; the rest is `other`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's seconds under `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` that somebody else measured."""
        self._phases[name] = self._phases.get(name, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap by phase, `other` for the rest and `step` for all; the next lap begins."""
        now = time.perf_counter()
        total = now - self._start
        seconds = {**self._phases, "other": total - sum(self._phases.values()), "step": total}
        self._start, self._phases = now, {}
        return {f"seconds/{name}": value for name, value in seconds.items()}
