"""A report for the terminal, and for programs."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs

from relax.inspect.fields import dotted
from relax.inspect.findings import Component, Found, Outcome
from relax.inspect.report import Report
from relax.inspect.table import file_and_line
from relax.report.charts import number

SHOWN_FAULTS: Final = 20


def as_text(report: Report) -> str:
    """For people: what was read, the algorithms, the components, the differences, outliers, broken values."""
    parts = [heading(report)]
    if report.findings.rows:
        parts += [algorithms(report), components(report), notes(report)]
    parts.append(broken(report))
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def heading(report: Report) -> Iterator[str]:
    """What was read, and as what."""
    found, fields = report.findings, report.fields
    names = (
        report.files[0]
        if len(report.files) == 1
        else f"{report.files[0]} and {counted(len(report.files) - 1, 'more file')}"
    )
    writer = f", written by {fields.source}" if fields.source else ""
    yield f"{names}: {counted(found.rows, 'row')} in {counted(found.groups, 'group')}{_sizes(found.sizes)}{writer}"
    groups, rewards = (", ".join(map(dotted, paths)) for paths in (fields.group, fields.components.values()))
    yield f"group: {groups}; rewards: {rewards}"
    if report.left_out:
        yield f"{counted(report.left_out, 'row')} left out: a broken reward or no group (see below)"
    if fields.left_out:
        yield f"not taken for rewards: {', '.join(fields.left_out)}"


def algorithms(report: Report) -> Iterator[str]:
    """A line for each."""
    rows = [
        ["algorithm", "reads", "groups with signal", "without", "distinct advantages", "distinct groups", "largest"]
    ]
    for outcome in report.findings.outcomes:
        share = f"{outcome.signal} ({percent(outcome.signal / report.findings.groups)})"
        counts = [share, str(outcome.silent.count), str(outcome.distinct), str(outcome.distinct_groups)]
        rows.append([outcome.name, outcome.reads, *counts, number(outcome.largest)])
    yield from aligned(rows, left=2)


def components(report: Report) -> Iterator[str]:
    """A line for each, with its share of each algorithm's advantages."""
    outcomes = [outcome for outcome in report.findings.outcomes if outcome.shares]
    rows = [["component", "weight", "mean", "std", "min", "max", "flat in", "cancels in"]]
    rows[0] += [f"share in {outcome.name}" for outcome in outcomes]
    for component in report.findings.components:
        s = component.summary
        numbers = [number(value) for value in (component.weight, s.mean, s.std, s.low, s.high)]
        counts = [str(component.flat.count), str(component.cancels.count)]
        rows.append([component.name, *numbers, *counts, *(share(outcome, component) for outcome in outcomes)])
    yield from aligned(rows, left=1)


def share(outcome: Outcome, component: Component) -> str:
    """A component's share of an algorithm's advantages."""
    return percent(outcome.shares[component.name])


def notes(report: Report) -> Iterator[str]:
    """What stands out, a sentence each."""
    found = report.findings
    for difference in found.differences:
        if difference.groups.count:
            yield f"{difference.drops} drops, {difference.keeps} keeps: {examples(report, difference.groups)}"
    if not any(difference.groups.count for difference in found.differences) and len(found.outcomes) > 1:
        yield "No algorithm drops a group that another keeps."
    for outcome in found.outcomes:
        if outcome.silent.count:
            small = f", {outcome.too_small} of them too small for it" if outcome.too_small else ""
            yield f"without signal for {outcome.name}: {examples(report, outcome.silent)}{small}"
        if outcome.with_length is not None:
            yield f"advantages of {outcome.name} and response lengths correlate by {number(outcome.with_length)}"
    for component in found.components:
        for state, groups in (("flat", component.flat), ("cancelled", component.cancels)):
            if groups.count:
                yield f"{component.name} is {state} in {examples(report, groups)}"
        if component.outliers:
            far = ", ".join(f"{number(o.value)} at {report.where(o.place)}" for o in component.farthest)
            more = ", ..." if component.outliers > len(component.farthest) else ""
            yield f"{component.name} has {component.outliers} far out of its usual range: {far}{more}"
    for name, summary in (("response lengths", found.lengths), ("log-probs a token", found.log_probs)):
        if summary is not None and summary.count:
            yield f"{name}: mean {number(summary.mean)}, {number(summary.low)} to {number(summary.high)}"


def broken(report: Report) -> Iterator[str]:
    """Each fault that was kept; the rest counted."""
    faults = report.faults
    if not faults.total:
        yield "no broken values"
        return
    yield counted(faults.total, "broken value")
    shown = faults.kept[:SHOWN_FAULTS]
    yield from (f"  {fault}" for fault in shown)
    if faults.total > len(shown):
        kinds = ", ".join(f"{count} × {key} {problem}" for (key, problem), count in faults.counts.items())
        yield f"  ... in all: {kinds}"


def examples(report: Report, found: Found) -> str:
    """`3 groups (line 1, line 9, ...)`: the first lines of the first of them."""
    places = ", ".join(map(report.where, found.examples))
    more = ", ..." if found.count > len(found.examples) else ""
    return f"{counted(found.count, 'group')} ({places}{more})"


def aligned(rows: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    """A table: the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def percent(value: float) -> str:
    """For people; a true minus sign."""
    return f"{round(value * 100, 1) + 0:.1f} %".replace("-", "−")


def counted(count: int, thing: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _sizes(sizes: Mapping[int, int]) -> str:
    if not sizes:
        return ""
    return f" of {min(sizes)}" if len(sizes) == 1 else f" of {min(sizes)} to {max(sizes)}"


def as_json(report: Report) -> str:
    """For programs: all findings; places as file and line, what is not known as null."""
    found = attrs.asdict(report.findings, value_serializer=_plain(report))
    faults = {
        "total": report.faults.total,
        "counts": [{"key": k, "problem": p, "count": n} for (k, p), n in report.faults.counts.items()],
        "first": [attrs.asdict(fault) for fault in report.faults.kept],
    }
    fields = attrs.asdict(report.fields)
    fields |= {"group": [*map(dotted, report.fields.group)]}
    fields |= {"components": {name: dotted(path) for name, path in report.fields.components.items()}}
    for name in ("scalar", "length", "log_probs"):
        path = getattr(report.fields, name)
        fields[name] = None if path is None else dotted(path)
    whole = {"files": report.files, "fields": fields, "left_out": report.left_out, **found, "broken": faults}
    return json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False)


class _plain:
    """Serializes places as file and line, and NaN as null."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __call__(self, _owner: type, field: "attrs.Attribute[object] | None", value: object) -> object:
        if field is not None and field.name == "place" and isinstance(value, int):
            return self._place(value)
        if field is not None and field.name == "examples" and isinstance(value, Iterable):
            return [self._place(place) for place in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    def _place(self, place: int) -> dict[str, object]:
        file, line = file_and_line(place)
        return {"file": self.report.files[file], "line": line}
