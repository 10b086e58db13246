"""Line charts as inline SVG: coloured by the page's style sheet, so that they suit light and dark alike."""

import json
import math
from collections.abc import Sequence
from html import escape
from itertools import accumulate
from typing import Final

import attrs

WIDTH, HEIGHT = 360, 176
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
MOST_POINTS: Final = 400
WINDOWS: Final = 40  # a smoothed line reaches to each side over this share of its points


@attrs.frozen
class Points:
    """What was measured: `values` at `steps`, both as long as each other."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)

    def smoothed(self) -> "Points":
        """The centred moving average; at the ends, over the part of the window that there is."""
        sums = [0.0, *accumulate(self.values)]
        half, count = len(self.values) // WINDOWS, len(self.values)
        spans = [(max(0, index - half), min(count, index + half + 1)) for index in range(count)]
        return Points(self.steps, tuple((sums[stop] - sums[start]) / (stop - start) for start, stop in spans))

    def thinned(self) -> "Points":
        """At most `MOST_POINTS`, evenly taken, the last one among them."""
        stride = math.ceil(len(self.steps) / MOST_POINTS)
        return self if stride <= 1 else Points(self.steps[::-1][::stride][::-1], self.values[::-1][::stride][::-1])


@attrs.frozen
class Axis:
    """Values from `low` to `high`, drawn at pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, stop: float) -> "Axis":
        """Room for all values; from 0 to 1 for shares, else with a margin."""
        low, high = min(values), max(values)
        if low >= 0 and high <= 1 and high > 0.25:
            return cls(0.0, 1.0, start, stop)
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        return cls(
            0.0 if 0 <= low < high * 0.4 else low - margin, 0.0 if low < 0 == high else high + margin, start, stop
        )

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self, least: int, *, whole: bool = False) -> list[float]:
        """The roundest values that are at least so many; only `whole` ones may be fewer."""
        power = 10.0 ** math.floor(math.log10(self.high - self.low))
        steps = [multiple * power for multiple in (5, 2.5, 2, 1, 0.5, 0.25, 0.2)]
        found: list[float] = []
        for step in (step for step in steps if not whole or step % 1 == 0):
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            found = [index * step for index in range(first, last + 1)]
            if len(found) >= least:
                break
        return found


def line_chart(title: str, line: Points, dots: Points = Points((), ())) -> str:
    """A chart of `line`, smoothed over its faint self, and of `dots` (held-out evaluations).

    There must be at least one point.
    """
    steps, values = (*line.steps, *dots.steps), (*line.values, *dots.values)
    x = Axis(min(steps), max(*steps, min(steps) + 1), LEFT, WIDTH - RIGHT)
    y = Axis.around(values, HEIGHT - BOTTOM, TOP)
    parts = [_grid(x, y)]
    if line:
        parts.append(f'<path class="raw" d="{_path(line.thinned(), x, y)}"/>')
        parts.append(f'<path class="smooth" d="{_path(line.smoothed().thinned(), x, y)}"/>')
    if dots:
        parts.append(f'<path class="held-line" d="{_path(dots, x, y)}"/>')
    for step, value in zip(dots.steps, dots.values, strict=True):
        parts.append(f'<circle class="held" cx="{x.at(step):.1f}" cy="{y.at(value):.1f}" r="3.5"/>')
    shown = line.smoothed() if line else dots
    label = f"{title}: {number(shown.values[0])} at step {shown.steps[0]:g}, {number(shown.values[-1])} at the end"
    data = {"line": _pairs(line.thinned()), "dots": _pairs(dots), "x": [x.low, x.high, x.start, x.stop]}
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}" '
        f"data-points='{escape(json.dumps(data, separators=(',', ':')))}'>{''.join(parts)}</svg>"
    )


def _pairs(points: Points) -> list[tuple[float, float]]:
    return [(step, float(f"{value:.4g}")) for step, value in zip(points.steps, points.values, strict=True)]


def _path(points: Points, x: Axis, y: Axis) -> str:
    return "M" + "L".join(f"{x.at(s):.1f} {y.at(v):.1f}" for s, v in zip(points.steps, points.values, strict=True))


def _grid(x: Axis, y: Axis) -> str:
    parts = []
    for tick in y.ticks(3):
        level = f"{y.at(tick):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {level}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{level}" dy=".32em" text-anchor="end">{number(tick)}</text>'
        )
    for tick in x.ticks(3, whole=True):
        parts.append(f'<text class="tick" x="{x.at(tick):.1f}" y="{HEIGHT - 7}" text-anchor="middle">{tick:g}</text>')
    return "".join(parts)


def number(value: float) -> str:
    """For people: three digits or so, a true minus sign, no `e` where it can be helped."""
    size = abs(value)
    if size == 0:
        text = "0"
    elif size >= 10_000 or size < 1e-3:
        text = f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace(".0e", "e")
    elif size >= 100:
        text = f"{value:.0f}"
    elif size >= 10:
        text = f"{value:.1f}".removesuffix(".0")
    else:
        text = (f"{value:.3f}" if size < 1 else f"{value:.2f}").rstrip("0").rstrip(".")
    return text.replace("-", "−")
