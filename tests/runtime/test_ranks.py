"""`relax train` in several processes: the numbers of one process, told and written once."""

import os
import shutil
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.runtime.conftest import GDPO
from tests.runtime.launch import Finished, lines, relax, start, timeless


def be_rank(rank: int, size: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def job(directory: Path, size: int, words: Sequence[object]) -> list[Finished]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [start(directory, ("train", *words), partial(be_rank, rank, size, port)) for rank in range(size)]
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
    ours, theirs = (timeless(lines(path / "metrics.jsonl")) for path in (run, base))
    assert len(ours) == len(theirs) == 7
    for record, expected in zip(ours, theirs, strict=True):
        assert record.pop("phase") == expected.pop("phase")
        assert record == pytest.approx(expected, rel=1e-3, abs=1e-5)
    weights, expected = (load_file(path / "export" / "model.safetensors") for path in (run, base))
    assert weights.keys() == expected.keys()
    assert max((weights[name] - expected[name]).abs().max() for name in weights) < 1e-4


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
    refused = relax(desk, "train", *GDPO, "--pipeline-model-parallel-size", 2, "--output", "split")
    assert refused.status == 2
    assert "--pipeline-model-parallel-size 2: not available yet" in refused.err
