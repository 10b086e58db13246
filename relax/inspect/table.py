"""Rows as numbers: all that is kept of a file.

Groups may be interleaved, so no group is whole before the file ends. Texts are dropped piece by piece; a row leaves a
64-bit digest of its group, its place and its numbers: 16 bytes, and 8 for each number.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Final, cast

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax.inspect.faults import Faults, shown
from relax.inspect.fields import Fields, Path, dotted
from relax.inspect.read import MISSING, Batch, Missing, NoMapping
from relax_core.numerics import FLOAT32_MAX
from relax_core.rewards import component_matrix

EXACT: Final = 1 << 53
"""Whole numbers below it are exact in float64."""
CACHED: Final = 4096
"""Group ids whose digest is remembered."""
CHUNK: Final = 16_384
"""Rows that are looked at together, and the group that they end in."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
GroupKey = tuple[str | tuple[str], ...]
NAMELESS: Final = frozenset({type(None), Missing, NoMapping})
_LINES: Final = 1 << 40  # more than a file has lines


@attrs.frozen(eq=False)
class Table:
    """Rows by group, groups in the order in which they first come; rows of a group in theirs.

    Attributes:
        groups: each row's group, counted from 0.
        places: file * 2**40 + line, see `places`.
        values: [rows, columns].
    """

    columns: tuple[str, ...]
    groups: Ints
    places: Ints
    values: Floats

    @classmethod
    def gathered(cls, columns: Sequence[str], parts: Sequence["Table"]) -> "Table":
        """Of the parts of a file, whose groups are digests."""
        digests = np.concatenate([np.empty(0, np.int64), *(part.groups for part in parts)])
        places = np.concatenate([np.empty(0, np.int64), *(part.places for part in parts)])
        values = np.concatenate([np.empty((0, len(columns))), *(part.values for part in parts)])
        _, first, ids = np.unique(digests, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        groups = rank[ids]
        order = np.argsort(groups, kind="stable")
        return cls(tuple(columns), groups[order], places[order], values[order])

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def number(self) -> int:
        """How many groups there are."""
        return int(self.groups[-1]) + 1 if len(self) else 0

    def column(self, name: str) -> Tensor | None:
        """A column [rows], if there is one of that name; the last of several."""
        places = [place for place, column in enumerate(self.columns) if column == name]
        return torch.from_numpy(self.values[:, places[-1]]) if places else None

    def chunks(self) -> Iterator[slice]:
        """Rows of whole groups."""
        start = 0
        while start < len(self):
            stop = min(start + CHUNK, len(self))
            stop = int(np.searchsorted(self.groups, self.groups[stop - 1], side="right"))
            yield slice(start, stop)
            start = stop


def places(file: int, lines: Sequence[int]) -> Ints:
    """Where rows stand, each as one integer."""
    return file * _LINES + np.asarray(lines, np.int64)


def file_and_line(where: int) -> tuple[int, int]:
    """The inverse of `places`."""
    return divmod(where, _LINES)


@attrs.define
class Reader:
    """Turns batches into rows of numbers; whatever is no such number goes to `faults`.

    Columns: those of `Fields.numbers`, then the length and the mean log-prob of a token, where they are known. A row
    without a group, or with a broken number of the former kind, has no vote: it is left out, and counted.
    """

    fields: Fields
    faults: Faults
    columns: tuple[str, ...] = attrs.field(init=False)
    left_out: int = 0
    _digests: dict[GroupKey, int] = attrs.Factory(dict)

    def __attrs_post_init__(self) -> None:
        extra = {"length": self.fields.length, "log_prob": self.fields.log_probs}
        self.columns = (*self.fields.numbers, *(name for name, path in extra.items() if path))

    def rows(self, batch: Batch, file: str, number: int) -> Table:
        """The batch's rows that have a vote; groups are digests here."""
        numbers = self.fields.numbers
        columns = [self._numbers(batch, file, name, path) for name, path in numbers.items()]
        lengths = None
        if self.fields.length is not None:
            lengths = self._lengths(batch, file, self.fields.length)
            columns.append(lengths)
        if self.fields.log_probs is not None:
            columns.append(self._log_probs(batch, file, self.fields.log_probs, lengths))
        digests, named = self._groups(batch, file)
        values = np.stack(columns, axis=1)
        votes = named & ~np.isnan(values[:, : len(numbers)]).any(axis=1)
        self.left_out += int((~votes).sum())
        return Table(self.columns, digests[votes], places(number, batch.lines)[votes], values[votes])

    def _numbers(self, batch: Batch, file: str, name: str, path: Path) -> Floats:
        values = batch.columns[path]
        numbers = np.full(len(values), np.nan)
        if set(map(type, values)) <= {int, float}:
            with suppress(OverflowError):
                numbers = np.array(values, np.float64)
        for row in np.flatnonzero(~(np.abs(numbers) <= FLOAT32_MAX)).tolist():
            value = values[row]
            problem = reward_fault(value)
            if problem is None:
                numbers[row] = component_matrix([{name: value}], [name]).item()
                continue
            numbers[row] = np.nan
            if not isinstance(value, NoMapping):
                self._fault(batch, file, row, name, problem, value)
            elif path == next(p for p in self.fields.numbers.values() if p[0] == path[0]):  # once for all of its keys
                self._fault(batch, file, row, path[0], problem, value.value)
        return numbers

    def _lengths(self, batch: Batch, file: str, path: Path) -> Floats:
        values = batch.columns[path]
        if set(map(type, values)) == {int}:
            with suppress(OverflowError):
                lengths = np.array(values, np.int64).astype(np.float64)
                if ((lengths >= 0) & (lengths < EXACT)).all():
                    return lengths
        lengths = np.full(len(values), np.nan)
        for row, value in enumerate(values):
            if type(value) is int and 0 <= value < EXACT:
                lengths[row] = value
            else:
                problem = "is missing" if value is MISSING else "must be a whole number, 0 or more"
                self._fault(batch, file, row, dotted(path), problem, value)
        return lengths

    def _log_probs(self, batch: Batch, file: str, path: Path, lengths: Floats | None) -> Floats:
        means = np.full(len(batch.lines), np.nan)
        for row, value in enumerate(batch.columns[path]):
            length = None if lengths is None or np.isnan(lengths[row]) else int(lengths[row])
            problem = log_probs_fault(value, length)
            if problem is not None:
                self._fault(batch, file, row, dotted(path), problem, value)
            elif isinstance(value, list) and value:
                means[row] = sum(value) / len(value)
        return means

    def _groups(self, batch: Batch, file: str) -> tuple[Ints, NDArray[np.bool_]]:
        digests, named = np.zeros(len(batch.lines), np.int64), np.ones(len(batch.lines), bool)
        for path in self.fields.group:
            column = batch.columns[path]
            for row, part in enumerate(column) if NAMELESS & set(map(type, column)) else ():
                if type(part) in NAMELESS:
                    named[row] = False
                    self._fault(batch, file, row, dotted(path), "names no group", part)
        keys = list(zip(*(_hashable(batch.columns[path]) for path in self.fields.group), strict=True))
        known = {key: self._digest(key) for key in dict.fromkeys(keys)}
        digests[:] = [known[key] for key in keys]
        return digests, named

    def _digest(self, key: GroupKey) -> int:
        if (known := self._digests.get(key)) is not None:
            return known
        if len(self._digests) >= CACHED:
            self._digests.clear()
        texts = ((part, True) if isinstance(part, str) else (part[0], False) for part in key)
        whole = "".join(f"{is_text}{len(text)}:{text}" for text, is_text in texts)
        encoded = whole.encode("utf-8", "surrogatepass")
        found = int.from_bytes(blake2b(encoded, digest_size=8).digest(), "little", signed=True)
        self._digests[key] = found
        return found

    def _fault(self, batch: Batch, file: str, row: int, key: str, problem: str, value: object) -> None:
        self.faults.add(file, batch.lines[row], key, problem, "" if value is MISSING or value is None else shown(value))


def _hashable(column: Sequence[object]) -> Sequence[str | tuple[str]]:
    """A column of group ids: texts as they are, all else as JSON in a tuple, so that 1 and "1" are two groups."""
    kinds = set(map(type, column))
    if kinds == {str}:
        return cast(Sequence[str], column)
    if kinds == {int}:  # ten times as fast
        texts = {number: (str(number),) for number in set(column)}
        return [texts[number] for number in column]
    return [part if isinstance(part, str) else (json.dumps(part, default=str),) for part in column]


def reward_fault(value: object) -> str | None:
    """What is wrong with a reward, as `relax_core.rewards.component_matrix` sees it; None if nothing is."""
    inner = value.value if isinstance(value, NoMapping) else value
    if inner is MISSING:
        return "is missing"
    if inner is None:
        return "is null (aborted)"
    if isinstance(value, NoMapping):
        return f"must map keys to numbers, not be {_kind(inner)}"
    try:
        component_matrix([{"reward": value}], ["reward"])
    except TypeError:
        return f"must be a number, not {_kind(value)}"
    except ValueError:
        return "must be finite and fit into float32"
    return None


def log_probs_fault(value: object, length: int | None) -> str | None:
    """What is wrong with a response's log-probs; None if nothing is."""
    if value is MISSING:
        return "is missing"
    if not isinstance(value, list) or not set(map(type, value)) <= {float, int}:
        return "must be a list of numbers, one for each token"
    if not all(-FLOAT32_MAX <= number <= 0 for number in value):
        return "must be finite and at most 0"
    if length is not None and len(value) != length:
        return "must have as many entries as the response has tokens"
    return None


def _kind(value: object) -> str:
    names = {bool: "true or false", str: "text", list: "a list", dict: "a mapping", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
