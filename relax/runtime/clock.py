"""Where the time of a step went."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of named phases. Phases do not nest; what no phase claims is `other`."""

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

    def metrics(self) -> Mapping[str, float]:
        """`seconds/<phase>` of all phases, `seconds/step` in all and `seconds/other` for the rest."""
        total = time.perf_counter() - self._start
        seconds = {**self._phases, "other": total - sum(self._phases.values()), "step": total}
        return {f"seconds/{name}": value for name, value in seconds.items()}
