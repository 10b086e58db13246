"""A run that was stopped and went on equals the undisturbed one, to the last bit."""

import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.runtime.conftest import GDPO
from tests.runtime.launch import lines, relax, signal_at_step, start, timeless


def assert_same(run: Path, other: Path) -> None:
    """The same numbers, evaluations and weights."""
    assert timeless(lines(run / "metrics.jsonl")) == timeless(lines(other / "metrics.jsonl"))
    assert lines(run / "eval.jsonl") == lines(other / "eval.jsonl")
    ours, theirs = (safe_open(path / "export" / "model.safetensors", "pt") for path in (run, other))
    assert set(ours.keys()) == set(theirs.keys())
    for name in ours.keys():  # noqa: SIM118 - a file, not a mapping
        assert ours.get_tensor(name).equal(theirs.get_tensor(name)), name


@pytest.mark.parametrize("step", [1, 3, 5, 7], ids=["warm start", "its end", "reinforcement", "the end"])
def test_ctrl_c_and_resume_change_nothing(desk: Path, base: Path, step: int) -> None:
    name = f"stopped-{step}"
    stopped = relax(desk, "train", *GDPO, "--output", name, prepare=partial(signal_at_step, step))
    last = step == 7
    assert stopped.status == (0 if last else 130)
    assert "finishing this step" in stopped.err
    assert (f"relax train --resume {name}" in stopped.err) != last
    assert len(lines(desk / name / "metrics.jsonl")) == step
    if not last:
        resumed = relax(desk, "train", "--resume", name)
        assert (resumed.status, resumed.err) == (0, "")
    assert_same(desk / name, base)


@pytest.mark.parametrize("step", [2, 6], ids=["without a checkpoint", "after the last checkpoint"])
def test_a_killed_run_goes_on_from_its_last_checkpoint(desk: Path, base: Path, step: int) -> None:
    name = f"killed-{step}"
    killed = relax(desk, "train", *GDPO, "--output", name, prepare=partial(signal_at_step, step, signal.SIGKILL))
    assert killed.status == -signal.SIGKILL
    (desk / name / "metrics.jsonl").open("a").write('{"step": 7, "phase": "r')  # as if killed while writing
    resumed = relax(desk, "train", "--resume", name)
    assert (resumed.status, resumed.err) == (0, "")
    assert_same(desk / name, base)


def test_ctrl_c_at_any_moment(desk: Path, base: Path, eventually: Callable[[Callable[[], bool]], None]) -> None:
    """A signal from outside, wherever it falls."""
    going = start(desk, ["train", *GDPO, "--output", "pressed"])
    metrics = desk / "pressed" / "metrics.jsonl"
    eventually(lambda: not going.process.is_alive() or (metrics.exists() and metrics.read_text().count("\n") >= 4))
    if going.process.is_alive():
        going.interrupt()
    if going.finish().status != 0:
        assert relax(desk, "train", "--resume", "pressed").status == 0
    assert_same(desk / "pressed", base)


def test_a_second_ctrl_c_stops_at_once_and_the_run_can_go_on(desk: Path, base: Path) -> None:
    stopped = relax(desk, "train", *GDPO, "--output", "twice", prepare=partial(signal_at_step, 6, times=2))
    assert stopped.status == 130
    assert "Traceback" not in stopped.err
    assert "relax train --resume twice" in stopped.err
    assert relax(desk, "train", "--resume", "twice").status == 0
    assert_same(desk / "twice", base)


def test_a_finished_run_is_not_run_again(desk: Path, base: Path) -> None:
    shutil.copytree(base, desk / "again")
    resumed = relax(desk, "train", "--resume", "again")
    assert (resumed.status, resumed.err) == (0, "")
    assert_same(desk / "again", base)


def test_config_yaml_runs_the_same_again(desk: Path, base: Path) -> None:
    finished = relax(desk, "train", "--config", "base/config.yaml", "--output", "from-file")
    assert (finished.status, finished.err) == (0, "")
    assert_same(desk / "from-file", base)
    assert (desk / "from-file" / "config.yaml").read_text() == (base / "config.yaml").read_text()


def test_another_seed_gives_other_numbers(desk: Path, base: Path) -> None:
    assert relax(desk, "train", *GDPO, "--num-rollout", 1, "--seed", 1, "--output", "seed-1").status == 0
    ours, theirs = (lines(run / "metrics.jsonl")[3] for run in (desk / "seed-1", base))
    assert ours["loss"] != theirs["loss"]
    prompts = [lines(run / "data" / "prompts.jsonl") for run in (desk / "seed-1", base)]
    assert prompts[0] != prompts[1]


CHANCE = """
import random
import numpy
import torch
def score(sample):
    drawn = random.random() + numpy.random.rand() + float(torch.rand(()))
    return {"chance": drawn, "length": float(len(sample.response))}
"""


def test_rewards_drawn_by_chance_are_drawn_again(desk: Path) -> None:
    """The generators of the whole process, which users' functions draw from, are part of what is resumed."""
    (desk / "chance.py").write_text(CHANCE)
    words = ("--custom-rm-path", "chance.score", "--gdpo-reward-keys", "chance", "length", "--reward-key", "chance")
    asked = (*GDPO, *words)
    assert relax(desk, "train", *asked, "--output", "chance").status == 0
    stopped = relax(desk, "train", *asked, "--output", "chance-stopped", prepare=partial(signal_at_step, 5))
    assert stopped.status == 130
    assert relax(desk, "train", "--resume", "chance-stopped").status == 0
    assert_same(desk / "chance-stopped", desk / "chance")


def test_data_that_are_there_are_left_alone(desk: Path, base: Path) -> None:
    stopped = relax(desk, "train", *GDPO, "--output", "data", prepare=partial(signal_at_step, 2))
    assert stopped.status == 130
    files = sorted((desk / "data" / "data").iterdir())
    before = [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in files]
    files[0].write_text(files[0].read_text()[:100])  # as if it had been torn
    assert relax(desk, "train", "--resume", "data").status == 0
    after = [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in files]
    assert after[1:] == before[1:]
    assert after[0] != before[0]
    assert_same(desk / "data", base)


def test_a_checkpoint_tells_what_it_was_trained_with(base: Path) -> None:
    from relax.megatron.checkpoint import latest, read_extra

    found = latest(base / "checkpoints")
    assert found is not None
    assert read_extra(found)["config"] == (base / "config.yaml").read_text()
