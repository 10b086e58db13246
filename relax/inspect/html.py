"""A report as one page that needs nothing else."""

from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Final

import attrs

from relax.inspect import text
from relax.inspect.findings import Histogram
from relax.inspect.report import Report
from relax.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, number
from relax.report.page import Figure, environment
from relax.runtime.files import write_whole

SHADES: Final = 5  # of the style sheet's colours for parts of a bar


@attrs.frozen
class Part:
    """A part of a bar: `share` is its width, from 0 to 1."""

    name: str
    shade: str
    share: float
    label: str


@attrs.frozen
class Bar:
    """A bar of parts under a title."""

    title: str
    note: str
    parts: tuple[Part, ...]


def write_page(path: Path, report: Report) -> None:
    """Write the page."""
    write_whole(path, render(report))


def render(report: Report) -> str:
    """The page."""
    found = report.findings
    pages = environment("relax.inspect")
    return pages.get_template("inspect.html").render(
        title=Path(report.files[0]).name if len(report.files) == 1 else f"{len(report.files)} files",
        report=report,
        heading=list(text.heading(report)),
        notes=list(text.notes(report)) if found.rows else [],
        broken=list(text.broken(report)),
        signal=signal_bars(report),
        shares=share_bars(report),
        advantages=[
            Figure(
                o.name, f"reads {o.reads}", f"{o.distinct} distinct", histogram(f"advantages of {o.name}", o.histogram)
            )
            for o in found.outcomes
        ],
        components=[
            Figure(c.name, _usual(c.outliers), f"mean {number(c.summary.mean)}", histogram(c.name, c.histogram))
            for c in found.components
        ],
        percent=text.percent,
        version=version("relax-rl"),
    )


def _usual(outliers: int) -> str:
    return f"without {outliers} far out of the usual range" if outliers else "over all samples"


def signal_bars(report: Report) -> list[Bar]:
    """Of each algorithm: the groups with signal, and those without."""
    bars = []
    for outcome in report.findings.outcomes:
        kept = outcome.signal / max(report.findings.groups, 1)
        parts = (
            Part("with signal", "model1", kept, f"{outcome.signal} ({text.percent(kept)})"),
            Part("without", "pause1", 1 - kept, f"{outcome.silent.count} ({text.percent(1 - kept)})"),
        )
        bars.append(Bar(outcome.name, f"reads {outcome.reads}", parts))
    return bars


def share_bars(report: Report) -> list[Bar]:
    """Of each algorithm: its components' shares. A negative share has no width; the numbers tell it."""
    bars = []
    for outcome in report.findings.outcomes:
        parts = tuple(
            Part(name, f"ours{index % SHADES + 1}", max(share, 0.0), text.percent(share))
            for index, (name, share) in enumerate(outcome.shares.items())
        )
        if parts:
            bars.append(Bar(outcome.name, f"reads {outcome.reads}", parts))
    return bars


def histogram(title: str, bins: Histogram) -> str:
    """Bars as inline SVG, counts upwards."""
    x = Axis(bins.low, bins.high, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, float(max(*bins.counts, 1)), HEIGHT - BOTTOM, TOP)
    width = (x.stop - x.start) / len(bins.counts)
    parts = [
        f'<path class="grid" d="M{LEFT} {y.at(tick):.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y.at(tick):.1f}" dy=".32em" text-anchor="end">{number(tick)}</text>'
        for tick in y.ticks(3, whole=True)
    ]
    for index, count in enumerate(bins.counts):
        left, top = x.start + index * width, y.at(count)
        if count:
            parts.append(
                f'<rect class="bin" x="{left:.1f}" y="{top:.1f}" width="{width - 1:.1f}" '
                f'height="{max(y.start - top, 1):.1f}"><title>{count} from {_edge(bins, index)} to '
                f"{_edge(bins, index + 1)}</title></rect>"
            )
    parts += [
        f'<text class="tick" x="{x.at(tick):.1f}" y="{HEIGHT - 7}" text-anchor="middle">{number(tick)}</text>'
        for tick in x.ticks(3)
    ]
    label = f"{title}: {sum(bins.counts)} values from {number(bins.low)} to {number(bins.high)}"
    start = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    return f"{start}{''.join(parts)}</svg>"


def _edge(bins: Histogram, index: int) -> str:
    return number(bins.low + (bins.high - bins.low) * index / len(bins.counts))
