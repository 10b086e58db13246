"""`relax train` in several processes: the numbers of one process, told and written once."""

import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.runtime.conftest import GDPO
from tests.runtime.launch import Finished, Started, lines, relax, start, timeless
from tests.runtime.test_resume import assert_same


def be_rank(rank: int, size: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def begin(directory: Path, size: int, words: Sequence[object]) -> list[Started]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [start(directory, ("train", *words), partial(be_rank, rank, size, port)) for rank in range(size)]


def job(directory: Path, size: int, words: Sequence[object]) -> list[Finished]:
    return [process.finish() for process in begin(directory, size, words)]


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, ("--balance-data",)),
        (2, ("--context-parallel-size", 2, "--qkv-format", "thd")),
    ],
    ids=["DP 2", "CP 2"],
)
def test_several_processes_train_as_one_does(
    desk: Path, base: Path, size: int, layout: tuple[object, ...], tmp_path: Path
) -> None:
    run = tmp_path / "job"
    first, *others = job(desk, size, (*GDPO, *layout, "--output", run))
    assert [rank.status for rank in (first, *others)] == [0] * size, (first, others)
    assert "Report:" in first.out
    assert {rank.out + rank.err for rank in others} == {""}
    assert_close(run, base, steps=7)


def assert_close(run: Path, base: Path, *, steps: int) -> None:
    """Both recorded the same, but for rounding, and export the same weights."""
    ours, theirs = (timeless(lines(path / "metrics.jsonl")) for path in (run, base))
    assert len(ours) == len(theirs) == steps
    for record, expected in zip(ours, theirs, strict=True):
        assert record.pop("phase") == expected.pop("phase")
        assert record == pytest.approx(expected, rel=1e-3, abs=1e-5)
    ours, theirs = (timeless(lines(path / "eval.jsonl")) for path in (run, base))
    assert ours == theirs
    weights, expected = (load_file(path / "export" / "model.safetensors") for path in (run, base))
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert max((weights[name] - expected[name]).abs().max() for name in weights) < 1e-4


# A model that two ranks can share, layers or matrices; its vocabulary of 107 they cannot but with padding.
SHARED = (*GDPO, "--num-layers", 2, "--num-query-groups", 2, "--warm-start-steps", 1, "--num-rollout", 3)


@pytest.fixture(scope="module")
def alone(desk: Path) -> Path:
    """A run of one SFT step and three rollouts in one process."""
    finished = relax(desk, "train", *SHARED, "--save-interval", 0, "--output", "alone")
    assert finished.status == 0, finished
    return desk / "alone"


SOON = 20  # seconds within which a rank ends that has lost another; some 5 of them are the time limits that it has


def share_a_model(desk: Path, kind: str, run: Path) -> tuple[object, ...]:
    """A job of two ranks, which must end well, and its settings."""
    shared = (*SHARED, f"--{kind}-model-parallel-size", 2, "--save-interval", 1)
    ranks = job(desk, 2, (*shared, "--output", run))
    assert [rank.status for rank in ranks] == [0, 0], ranks
    assert "Report:" in ranks[0].out
    assert ranks[1].out + ranks[1].err == ""
    return shared


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_shared_model_is_trained_and_exported_as_in_one_process(
    desk: Path, alone: Path, kind: str, tmp_path: Path
) -> None:
    share_a_model(desk, kind, tmp_path / "job")
    assert_close(tmp_path / "job", alone, steps=4)
    measured, expected = (relax(desk, "eval", directory) for directory in (tmp_path / "job", alone))
    assert (measured.status, measured.out) == (0, expected.out), measured


# On a crowded machine the surviving rank was once seen to wait for longer than this test does: not understood yet.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "struck", "told"),
    [
        pytest.param("tensor", 1, "rank 1 was last seen at .* and shows no sign of life", id="TP 2, rank 1"),
        pytest.param("pipeline", 0, "the store of the job is gone", id="PP 2, rank 0"),
    ],
)
def test_a_rank_that_shares_a_model_is_killed_and_the_run_resumed(
    desk: Path,
    eventually: Callable[[Callable[[], bool]], None],
    kind: str,
    struck: int,
    told: str,
    tmp_path: Path,
) -> None:
    """As without, to the bit."""
    run, broken = tmp_path / "job", tmp_path / "broken"
    shared = share_a_model(desk, kind, run)
    started = begin(desk, 2, (*shared, "--output", broken))
    metrics = broken / "metrics.jsonl"
    eventually(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    started[struck].process.kill()
    since = time.monotonic()
    ended = [process.finish() for process in started]
    assert time.monotonic() - since < SOON
    assert ended[struck].status == -signal.SIGKILL
    assert ended[1 - struck].status > 0
    assert re.search(told, ended[1 - struck].err), ended[1 - struck].err
    resumed = job(desk, 2, ("--resume", broken))
    assert [rank.status for rank in resumed] == [0, 0], resumed
    assert_same(broken, run)


def test_a_job_goes_on_in_one_process(desk: Path, base: Path, tmp_path: Path) -> None:
    run = tmp_path / "job"
    assert {rank.status for rank in job(desk, 2, (*GDPO, "--save-interval", 1, "--output", run))} == {0}
    for newest in sorted((run / "checkpoints").iterdir())[-2:]:
        shutil.rmtree(newest)
    resumed = relax(desk, "train", "--resume", run)
    assert (resumed.status, resumed.err) == (0, "")
    ours, theirs = (timeless(lines(path / "metrics.jsonl")) for path in (run, base))
    assert [line.pop("phase") for line in ours] == [line.pop("phase") for line in theirs]
    assert ours[-1] == pytest.approx(theirs[-1], rel=1e-3, abs=1e-5)


def test_layouts_that_do_not_fit_are_refused(desk: Path) -> None:
    finished = relax(desk, "train", *GDPO, "--tensor-model-parallel-size", 2, "--output", "split")
    assert finished.status == 2
    assert "--tensor-model-parallel-size 2" in finished.err
    assert "do not divide the job's 1 processes" in finished.err
    assert not (desk / "split").exists()
    for rank in job(desk, 2, (*GDPO, "--tensor-model-parallel-size", 2, "--output", "split")):
        assert rank.status != 0  # one key-value head is not shared by two
        assert "key-value heads (--num-query-groups)" in rank.err
    assert not (desk / "split").exists()
    for rank in job(desk, 2, (*GDPO, "--pipeline-model-parallel-size", 2, "--output", "split")):
        assert rank.status != 0
        assert "--pipeline-model-parallel-size 2: does not divide the 1 layers (--num-layers)" in rank.err
