"""Prompts from a JSON-lines file, and the order in which they are drawn."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import attrs
import numpy as np

from relax.data.seeds import derived_seed
from relax.data.wording import Wording
from relax.errors import RelaxError

Record = Mapping[str, object]
Wordings = Mapping[str, Wording]


@attrs.frozen
class Worded:
    """A record, and the texts that it means under the keys that were asked for."""

    record: Record
    texts: Mapping[str, str]

    @classmethod
    def of(cls, record: Record, wordings: Wordings, where: str) -> "Worded":
        """Errors: `RelaxError` naming `where`, and the key that is missing or whose value does not mean a text."""
        texts = {}
        for key, wording in wordings.items():
            if key not in record:
                raise RelaxError(f"{where}: has no key {key!r}; its keys are {sorted(record)}")
            try:
                texts[key] = wording(record[key])
            except ValueError as error:
                raise RelaxError(f"{where}: {key!r} {error}") from error
        return cls(record, texts)


def read_records(path: Path, wordings: Wordings) -> tuple[Worded, ...]:
    """The objects of a JSON-lines file, each holding something that means a text under every key of `wordings`.

    Errors: `RelaxError` naming file, line and key, for a missing, empty or malformed file.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: texts may hold its other breaks
    except FileNotFoundError:
        raise RelaxError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RelaxError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    records = tuple(_record(path, number, line, wordings) for number, line in enumerate(lines, start=1) if line.strip())
    if not records:
        raise RelaxError(f"{path}: holds no records; expected one JSON object a line with {_keys(wordings)}")
    return records


def _record(path: Path, number: int, line: str, wordings: Wordings) -> Worded:
    where = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise RelaxError(f"{where}: not JSON ({error.msg} at column {error.colno}): {line[:60]!r}") from None
    if not isinstance(record, dict):
        raise RelaxError(f"{where}: expected a JSON object with {_keys(wordings)}, got {line[:60]!r}")
    return Worded.of(record, wordings, where)


def _keys(wordings: Wordings) -> str:
    return " and ".join(map(repr, wordings))


@attrs.frozen
class DrawOrder:
    """Draws `count` items epoch by epoch, each epoch in a fresh order that only `seed` decides.

    The state is a position: the number of items drawn since the beginning.
    """

    count: int
    seed: int
    name: str

    def take(self, position: int, amount: int) -> list[int]:
        """The indices of the draws `position` to `position + amount`."""
        return [self._epoch(at // self.count)[at % self.count] for at in range(position, position + amount)]

    def _epoch(self, epoch: int) -> tuple[int, ...]:
        return _permutation(self.count, derived_seed(self.seed, self.name, epoch))


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).permutation(count).tolist())
