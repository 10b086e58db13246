"""One picture of several runs."""

from pathlib import Path

import pytest

from relax.errors import RelaxError
from relax.report.figure import write_figure
from tests.report.conftest import WriteRun, evaluation


def test_runs_are_compared_by_algorithm(write_run: WriteRun, tmp_path: Path) -> None:
    runs = [write_run("a"), write_run("b", seed=2), write_run("c", advantage_estimator="grpo")]
    drawing = write_figure(runs, tmp_path / "figure.svg").read_text()
    for text in ("gdpo, 2 runs", "grpo", "held-out correctness", "held-out format", "held-out length"):
        assert f"<!-- {text} -->" in drawing
    picture = write_figure(runs, tmp_path / "figure.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert 10_000 < len(picture) < 500_000


def test_runs_that_cannot_be_compared(write_run: WriteRun, tmp_path: Path) -> None:
    run = write_run("a")
    other = {key: value for key, value in evaluation("after", "rl", 5, 0.5).items() if not key.startswith("reward/")}
    with pytest.raises(RelaxError, match="no reward component"):
        write_figure([run, write_run("b", evaluations=[other])], tmp_path / "x.png")
    with pytest.raises(RelaxError, match="cannot be written"):
        write_figure([run], tmp_path / "missing" / "x.png")
    with pytest.raises(RelaxError, match="cannot be written"):
        write_figure([run], tmp_path / "x.unheard")
