"""What the rows of a file come to: for each algorithm, each component, and each pair of algorithms."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax.errors import RelaxError
from relax.inspect.asked import Asked
from relax.inspect.table import Table
from relax_core import describe, signal

EXAMPLES: Final = 5
"""Places that are given of everything that was found."""
BARS: Final = 32
WORKERS: Final = 2

Flags = NDArray[np.bool_]


@attrs.frozen
class Histogram:
    """How many numbers lie in each of `counts` bins of equal width from `low` to `high`; outliers are in none."""

    low: float
    high: float
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: Tensor) -> "Histogram":
        inside = values[~describe.outliers(values)].numpy()
        low, high = (float(inside.min()), float(inside.max())) if len(inside) else (0.0, 0.0)
        if low == high:
            low, high = low - 0.5, high + 0.5
        counts, _ = np.histogram(inside, bins=BARS, range=(low, high))
        return cls(low, high, tuple(counts.tolist()))


@attrs.frozen
class Found:
    """How many there are, and where the first of them begin: places as `table.places` gives them."""

    count: int
    examples: tuple[int, ...]

    @classmethod
    def of(cls, flags: Flags, firsts: NDArray[np.int64]) -> "Found":
        return cls(int(flags.sum()), tuple(firsts[flags][:EXAMPLES].tolist()))


@attrs.frozen
class Outlier:
    """A value far from the rest of its column."""

    place: int
    value: float


@attrs.frozen
class Component:
    """A reward component over the file. `flat` and `cancels` are groups; those of one sample are not counted."""

    name: str
    weight: float
    summary: describe.Summary
    flat: Found
    cancels: Found
    outliers: int
    farthest: tuple[Outlier, ...]
    histogram: Histogram


@attrs.frozen
class Outcome:
    """What an algorithm makes of the file. Advantages are its first stage's: a file does not tell optimizer batches.

    Attributes:
        silent: groups without signal, those with too few samples among them.
        too_small: groups of fewer samples than the algorithm asks for.
        distinct: advantages that differ to 1e-6.
        distinct_groups: groups whose advantages differ from those of all others, order aside.
        shares: of each component in the squared advantages of all groups; empty where it reads no component.
        with_length: correlation of advantages and response lengths over the groups with signal, None if not known.
    """

    name: str
    reads: str
    signal: int
    silent: Found
    too_small: int
    distinct: int
    distinct_groups: int
    largest: float
    shares: Mapping[str, float]
    with_length: float | None
    histogram: Histogram


@attrs.frozen
class Difference:
    """Groups that one of two algorithms drops, since they carry no signal for it, and the other keeps."""

    drops: str
    keeps: str
    groups: Found


@attrs.frozen
class Findings:
    """All of it. `sizes` holds how many groups have so many samples; `lengths` are those of responses."""

    rows: int
    groups: int
    sizes: Mapping[int, int]
    components: tuple[Component, ...]
    outcomes: tuple[Outcome, ...]
    differences: tuple[Difference, ...]
    lengths: describe.Summary | None
    log_probs: describe.Summary | None


def examine(table: Table, asked: Sequence[Asked], names: Sequence[str], weights: Tensor) -> Findings:
    """Look at a table whose first columns are the components of those names.

    Errors: `RelaxError` where an algorithm refuses the rewards.
    """
    firsts = table.places[np.searchsorted(table.groups, np.arange(table.number))]
    sizes = np.bincount(table.groups, minlength=table.number)
    tallies = [Tally.empty(one, len(table), table.number, len(names)) for one in asked]
    flat, cancels = (np.zeros((table.number, len(names)), bool) for _ in range(2))

    def look(rows: slice) -> None:
        values, groups = torch.from_numpy(table.values[rows]), torch.from_numpy(table.groups[rows])
        for tally in tallies:
            tally.add(rows, values, groups, weights)
        if (several := torch.from_numpy(sizes[table.groups[rows]] > 1)).any():
            found = signal.components(values[several, : len(names)], groups[several], weights)
            flat[found.groups], cancels[found.groups] = found.flat.numpy(), found.cancels.numpy()

    # A chunk to each worker, and one thread to each chunk: they write to groups and rows of their own.
    with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(look, table.chunks()))
    states = [(Found.of(flat[:, k], firsts), Found.of(cancels[:, k], firsts)) for k in range(len(names))]
    return Findings(
        rows=len(table),
        groups=table.number,
        sizes={int(size): int(count) for size, count in zip(*np.unique(sizes, return_counts=True), strict=True)},
        components=tuple(
            _component(table, column, names[column], float(weights[column]), *state)
            for column, state in enumerate(states)
        ),
        outcomes=tuple(tally.outcome(table, names, firsts, sizes) for tally in tallies),
        differences=tuple(
            Difference(a.name, b.name, Found.of(b.signal & ~a.signal, firsts)) for a, b in permutations(tallies, 2)
        ),
        lengths=_extra(table, "length"),
        log_probs=_extra(table, "log_prob"),
    )


@attrs.frozen(eq=False)
class Tally:
    """What one algorithm makes of the rows: scores [rows], signal [groups], contributions [groups, components]."""

    asked: Asked
    scores: Tensor
    signal: Flags
    given: Tensor

    @classmethod
    def empty(cls, asked: Asked, rows: int, groups: int, components: int) -> "Tally":
        double = torch.float64
        given = torch.zeros(groups, components, dtype=double)
        return cls(asked, torch.zeros(rows, dtype=double), np.zeros(groups, bool), given)

    @property
    def name(self) -> str:
        return self.asked.algorithm.name

    def add(self, rows: slice, values: Tensor, groups: Tensor, weights: Tensor) -> None:
        """Take in rows of whole groups."""
        algorithm, hyperparameters = self.asked.algorithm, self.asked.hyperparameters
        members = slice(int(groups[0]), int(groups[-1]) + 1)
        try:
            scores = signal.group_scores(algorithm, hyperparameters, self.asked.rewards(values, weights), groups)
            if self.asked.scalar is None:
                components = values[:, : len(weights)]
                self.given[members] = signal.contributions(
                    algorithm, hyperparameters, components, groups, weights, scores=scores
                )
        except ValueError as error:
            raise RelaxError(f"{self.name}: {error} (samples and groups counted from row {rows.start})") from error
        self.scores[rows] = scores
        self.signal[members] = signal.scores_with_signal(algorithm, scores, groups).numpy()

    def outcome(
        self, table: Table, names: Sequence[str], firsts: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> Outcome:
        """Once all rows are in."""
        groups, given = torch.from_numpy(table.groups), self.given.sum(dim=0)
        total = float(given.sum())
        return Outcome(
            name=self.name,
            reads=self.asked.reads,
            signal=int(self.signal.sum()),
            silent=Found.of(~self.signal, firsts),
            too_small=int((sizes < self.asked.algorithm.traits.min_group_size).sum()),
            distinct=describe.distinct(self.scores),
            distinct_groups=signal.distinct_groups(self.scores, groups),
            largest=float(self.scores.abs().max()) if len(table) else 0.0,
            shares=dict(zip(names, (given / total).tolist(), strict=True)) if total > 0 else {},
            with_length=self._with_length(table),
            histogram=Histogram.of(self.scores),
        )

    def _with_length(self, table: Table) -> float | None:
        lengths = table.column("length")
        if lengths is None:
            return None
        known = torch.from_numpy(self.signal[table.groups]) & ~lengths.isnan()
        found = describe.correlation(self.scores[known], lengths[known])
        return None if math.isnan(found) else found


def _component(table: Table, column: int, name: str, weight: float, flat: Found, cancels: Found) -> Component:
    values = torch.from_numpy(table.values[:, column])
    summary, far = describe.summary(values), describe.outliers(values).nonzero()[:, 0]
    farthest = far[(values[far] - summary.median).abs().argsort(descending=True, stable=True)][:EXAMPLES]
    return Component(
        name=name,
        weight=weight,
        summary=summary,
        flat=flat,
        cancels=cancels,
        outliers=len(far),
        farthest=tuple(Outlier(int(table.places[row]), float(values[row])) for row in farthest.tolist()),
        histogram=Histogram.of(values),
    )


def _extra(table: Table, name: str) -> describe.Summary | None:
    values = table.column(name)
    return None if values is None else describe.summary(values[~values.isnan()])
