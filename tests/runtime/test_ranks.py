"""`relax train` in several processes: the numbers of one process, told and written once."""

import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path

import attrs
import pytest
from safetensors.torch import load_file

from tests.runtime.conftest import GDPO
from tests.runtime.launch import Finished, lines, relax, start, timeless
from tests.runtime.test_resume import assert_same


def be_rank(rank: int, size: int, port: int, blow: signal.Signals | None) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if blow is not None:
        be_struck_in_third_step(blow)


def be_struck_in_third_step(blow: signal.Signals) -> None:
    """Where the other ranks wait for the gradient."""
    from relax.megatron.learner import Learner

    original, steps = Learner._step, count(1)

    def step(self: Learner, metrics: dict[str, float]) -> object:
        if next(steps) == 3:
            os.kill(os.getpid(), blow)
        return original(self, metrics)

    Learner._step = step


def job(
    directory: Path,
    size: int,
    words: Sequence[object],
    *,
    struck: int | None = None,
    blow: signal.Signals = signal.SIGKILL,
) -> list[Finished]:
    """`relax train WORDS` in `size` processes, of which rank `struck` is killed or stopped in the middle."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    prepared = [partial(be_rank, rank, size, port, blow if rank == struck else None) for rank in range(size)]
    started = [start(directory, ("train", *words), prepare) for prepare in prepared]
    if struck is not None:
        for rank, process in enumerate(started):
            if rank != struck:
                process.finish()
        started[struck].process.kill()  # which ends a stopped one, too
    return [process.finish() for process in started]


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


@attrs.frozen
class Job:
    """An undisturbed run of two ranks that share a model: how it was called, what it left, what the ranks said."""

    words: tuple[object, ...]
    run: Path
    ranks: Sequence[Finished]


@pytest.fixture(scope="module")
def shared(desk: Path) -> Callable[[str], Job]:
    """The run of which the ranks share matrices ("tensor") or layers ("pipeline")."""

    @cache
    def made(kind: str) -> Job:
        words = (*SHARED, f"--{kind}-model-parallel-size", 2, "--save-interval", 1)
        run = desk / f"shared-{kind}"
        return Job(words, run, job(desk, 2, (*words, "--output", run)))

    return made


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_shared_model_is_trained_exported_and_measured_as_in_one_process(
    desk: Path, alone: Path, shared: Callable[[str], Job], kind: str
) -> None:
    made = shared(kind)
    assert [rank.status for rank in made.ranks] == [0, 0], made
    assert "Report:" in made.ranks[0].out
    assert made.ranks[1].out + made.ranks[1].err == ""
    assert_close(made.run, alone, steps=4)
    measured, expected = (relax(desk, "eval", run) for run in (made.run, alone))
    assert (measured.status, measured.out) == (0, expected.out), measured


@pytest.mark.parametrize(
    ("kind", "struck", "told"),
    [
        pytest.param("pipeline", 1, "rank 1 .* shows no sign of life: stopped or gone", id="PP 2, rank 1"),
        pytest.param("pipeline", 0, "store of the job is gone", id="PP 2, rank 0", marks=pytest.mark.slow),
        pytest.param("tensor", 1, "rank 1 .* no sign of life", id="TP 2, rank 1", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_lost_a_rank_goes_on_to_the_same_bits(
    desk: Path, shared: Callable[[str], Job], kind: str, struck: int, told: str, tmp_path: Path
) -> None:
    """Killed in the middle of a step: the other rank says so, and what is resumed ends as what was not disturbed."""
    undisturbed, run = shared(kind), tmp_path / "job"
    ended = job(desk, 2, (*undisturbed.words, "--output", run), struck=struck)
    assert ended[struck].status == -signal.SIGKILL
    assert ended[1 - struck].status > 0
    assert re.search(told, ended[1 - struck].err), ended[1 - struck].err
    resumed = job(desk, 2, ("--resume", run))
    assert [rank.status for rank in resumed] == [0, 0], resumed
    assert_same(run, undisturbed.run)


def test_nobody_waits_for_a_stopped_rank_beyond_the_limit(desk: Path, tmp_path: Path) -> None:
    words = (*GDPO, "--distributed-timeout-minutes", 0.5, "--save-interval", 1, "--output", tmp_path / "job")
    waiting, _ = job(desk, 2, words, struck=1, blow=signal.SIGSTOP)
    assert waiting.status > 0
    assert re.search("rank 1 .* shows no sign of life: stopped or gone", waiting.err), waiting.err


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
