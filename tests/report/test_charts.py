"""Charts show what was measured, where it was measured."""

import json
import re
from xml.etree import ElementTree

import pytest

from relax.report.charts import HEIGHT, MOST_POINTS, WIDTH, Axis, Points, line_chart, number


def of(*values: float) -> Points:
    return Points(tuple(map(float, range(1, len(values) + 1))), values)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.4273, "0.427"),
        (0.996, "0.996"),
        (-10.94, "−10.9"),
        (9.05, "9.05"),
        (8927.4, "8927"),
        (2e-4, "2e−4"),
        (5e-4, "5e−4"),
        (1.5e7, "1.5e7"),
    ],
)
def test_numbers_are_short_and_not_wrong(value: float, text: str) -> None:
    assert number(value) == text
    assert float(number(value).replace("−", "-")) == pytest.approx(value, rel=6e-3)


def test_a_mean_of_constants_is_the_constant() -> None:
    assert of(*[2.5] * 200).smoothed() == of(*[2.5] * 200)


def test_smoothing_averages_a_window_that_narrows_at_the_ends() -> None:
    points = of(*map(float, range(80))).smoothed()
    assert points.values[40] == 40.0
    assert points.values[0] == 1.0  # of 0, 1, 2
    assert points.values[-1] == 78.0


def test_thinning_keeps_the_last_point() -> None:
    thin = of(*map(float, range(1001))).thinned()
    assert len(thin.steps) <= MOST_POINTS
    assert (thin.steps[-1], thin.values[-1]) == (1001.0, 1000.0)
    assert of(1.0, 2.0).thinned() == of(1.0, 2.0)


@pytest.mark.parametrize(
    "values", [(0.0, 1.0), (-16.2, -9.0), (8500.0, 9600.0), (1e-5, 3e-4), (5.0, 5.0), (-3.0, 0.0), (0.0, 0.0)]
)
def test_axes_have_a_few_round_ticks_around_the_values(values: tuple[float, float]) -> None:
    axis = Axis.around(values, HEIGHT, 0)
    assert axis.low <= min(values) < axis.high
    assert axis.low < max(values) <= axis.high
    ticks = axis.ticks(3)
    assert 3 <= len(ticks) <= 7
    assert all(axis.low - 1e-9 <= tick <= axis.high + 1e-9 for tick in ticks)


@pytest.mark.parametrize("line", [of(1.0), of(0.0, 0.0), of(1e-8, 1e8), of(*[0.5] * 3000)])
def test_points_lie_within_the_picture(line: Points) -> None:
    picture = ElementTree.fromstring(line_chart('a "title" <&', line, Points((1.0,), (line.values[0],))))
    assert 'a "title" <&' in picture.attrib["aria-label"]
    numbers = [float(n) for path in picture.iter("path") for n in re.findall(r"-?\d+\.?\d*", path.attrib["d"])]
    assert all(0 <= n <= max(WIDTH, HEIGHT) for n in numbers)
    for text in picture.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= WIDTH


def test_the_chart_carries_its_numbers_for_the_pointer() -> None:
    picture = ElementTree.fromstring(line_chart("x", of(1.0, 2.0), Points((2.0,), (5.0,))))
    data = json.loads(picture.attrib["data-points"])
    assert data["line"] == [[1, 1], [2, 2]]
    assert data["dots"] == [[2, 5]]
