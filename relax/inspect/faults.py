"""What is wrong in a file: counted by kind, the first of each kept with its place. Nothing is repaired."""

from typing import Final

import attrs

KEPT: Final = 20
"""Faults of one kind that are shown in full; all are counted."""


@attrs.frozen
class Fault:
    """A broken value, and where it stands. `line` counts from 1; in Parquet it is the row."""

    file: str
    line: int
    key: str
    value: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.key} {self.problem}" + (f", got {self.value}" if self.value else "")


@attrs.define
class Faults:
    """All that was found, in the order of the file."""

    counts: dict[tuple[str, str], int] = attrs.Factory(dict)
    kept: list[Fault] = attrs.Factory(list)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, file: str, line: int, key: str, problem: str, value: str = "") -> None:
        """Count a fault, and keep it if it is one of the first of its kind."""
        kind = (key, problem)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.counts[kind] <= KEPT:
            self.kept.append(Fault(file, line, key, value, problem))


def shown(value: object) -> str:
    """A value as one short printable line."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in repr(value)[:200])
    return text if len(text) <= 60 else text[:57] + "..."
