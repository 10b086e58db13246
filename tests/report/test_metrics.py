"""Records are whole lines of finite numbers, or they are not written."""

import json
import resource
import signal
from pathlib import Path

import pytest

from relax.errors import RelaxError
from relax.report.metrics import JsonLines, read_records


def test_records_come_back_line_by_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    records = [{"step": 1, "loss": 0.1 + 0.2, "text": "é\n"}, {"step": 2, "nested": {"a": [1.5, None]}}]
    with JsonLines(path) as lines:
        for index, record in enumerate(records):
            lines.write(record)
            assert [json.loads(line) for line in path.read_text().splitlines()] == records[: index + 1]
    with JsonLines(path) as lines:
        lines.write({"step": 3})
    assert read_records(path) == [*records, {"step": 3}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused_by_name(tmp_path: Path, value: float) -> None:
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        with pytest.raises(RelaxError, match=rf"grad_norm is {value} at step 12"):
            lines.write({"step": 12, "grad_norm": value})
        with pytest.raises(RelaxError, match=r"samples\[1\]\.rewards\.format is"):
            lines.write({"step": 1, "samples": [{}, {"rewards": {"format": value}}]})
    assert path.read_bytes() == b""


def test_a_value_that_json_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "m.jsonl") as lines, pytest.raises(RelaxError, match=r"loss is .* a complex"):
        lines.write({"step": 1, "loss": 1j})


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with JsonLines(path) as lines:
        lines.write({"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, old[1]))
        try:
            with pytest.raises(RelaxError, match=r"cannot be written.*intact"):
                lines.write({"step": 2, "text": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            signal.signal(signal.SIGXFSZ, handler)
        assert path.read_text() == '{"step": 1}\n'
        lines.write({"step": 2})
    assert read_records(path) == [{"step": 1}, {"step": 2}]


def test_a_directory_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RelaxError, match="cannot be written"):
        JsonLines(tmp_path)


def test_the_torn_last_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert read_records(path) == [{"step": 1}]
    assert read_records(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
    ("text", "said"), [("{}\nx\n{}\n", "line 2: not JSON"), ("[1]\n", "line 1: expected an object")]
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    with pytest.raises(RelaxError, match=said):
        read_records(path)
