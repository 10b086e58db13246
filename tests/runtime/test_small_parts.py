"""The clock, a run's files, and the orderly stop."""

import json
import os
import signal
from pathlib import Path

import pytest

from relax.runtime import clock as clock_module
from relax.runtime.clock import Clock
from relax.runtime.files import RunFiles, write_whole
from relax.runtime.stop import StopRequest


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(clock_module, "time", time)
    return time


def test_a_lap_tells_phases_and_the_rest(fake: FakeTime) -> None:
    clock = Clock()
    for seconds in (2.0, 3.0):
        with clock.phase("rollout"):
            fake.now += seconds
    fake.now += 1.0
    clock.add("optimizer", 0.25)
    assert clock.lap() == {
        "seconds/rollout": 5.0,
        "seconds/optimizer": 0.25,
        "seconds/other": 0.75,
        "seconds/step": 6.0,
    }
    fake.now += 4.0
    assert clock.lap() == {"seconds/other": 4.0, "seconds/step": 4.0}


def test_a_phase_that_fails_is_counted(fake: FakeTime) -> None:
    clock = Clock()

    def work() -> None:
        with clock.phase("reward"):
            fake.now += 1.5
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert clock.lap()["seconds/reward"] == 1.5


def test_rewinding_leaves_what_a_checkpoint_knows(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    entries = [json.dumps({"step": step, "text": "a\u2028b\x85"}, ensure_ascii=False) for step in (1, 2, 3)]
    files.metrics.write_text("\n".join(entries) + '\n{"step": 4, "te', encoding="utf-8")
    files.evaluations.write_text('{"step": 0}\n{"step": 2}\n', encoding="utf-8")
    files.rewind(2, 0)
    assert files.metrics.read_text(encoding="utf-8") == "\n".join(entries[:2]) + "\n"
    assert files.evaluations.read_text() == '{"step": 0}\n'
    files.rewind(0, -1)
    assert files.metrics.read_text() == files.evaluations.read_text() == ""


def test_rewinding_a_run_that_recorded_nothing(tmp_path: Path) -> None:
    RunFiles(tmp_path).rewind(3, 3)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    write_whole(path, "one\n")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "two\n")
    assert path.read_text() == "one\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_does_not(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert "finishing this step" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
