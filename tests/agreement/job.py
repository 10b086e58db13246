"""Jobs of several real processes, whose ranks may be stopped or killed, and what became of each of them."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import attrs
import torch
from torch.distributed import TCPStore

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["relax.agreement", "relax.megatron.runtime", "tests.agreement.stages"])
TIME_LIMIT = 60  # seconds, for machines that have other things to do

Work = Callable[[int], None]
"""What a rank does, given its number. Module-level, so that another process can import it."""


@attrs.frozen
class Ending:
    """How a rank ended: exit status (negative: by a signal), what it printed, seconds after the job's first line."""

    status: int | None
    err: str
    seconds: float


def run_job(
    directory: Path, size: int, work: Work, *, stopped: int = -1, timeout_s: float = 60.0, own_store: bool = False
) -> list[Ending]:
    """Run `work` on `size` ranks inside `megatron_process`; a rank still there after `TIME_LIMIT` s has no status.

    Rank `stopped` is not waited for.

    The store is held here, as a launcher does, or with `own_store` by rank 0.
    """
    store = None if own_store else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = _free_port() if store is None else store.port
    errors = [directory / f"{rank}.err" for rank in range(size)]
    ranks = [
        FORKS.Process(target=_rank, args=(rank, size, port, own_store, timeout_s, work, errors[rank]))
        for rank in range(size)
    ]
    began = time.monotonic()
    for process in ranks:
        process.start()
    ended: dict[int, float] = {}
    while not {*range(size)} - {stopped} <= {*ended} and time.monotonic() - began < TIME_LIMIT:
        for rank, process in enumerate(ranks):
            if process.exitcode is not None:
                ended.setdefault(rank, time.monotonic() - began)
        time.sleep(0.02)
    statuses = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()  # SIGKILL ends a stopped process too
        process.join()
    return [
        Ending(status, error.read_text(encoding="utf-8"), ended.get(rank, float("inf")) - _faulted_at(directory, began))
        for rank, (status, error) in enumerate(zip(statuses, errors, strict=True))
    ]


def fault_now(directory: Path) -> None:
    """Note the moment from which the other ranks' seconds count."""
    (directory / "fault").write_text(str(time.monotonic()), encoding="utf-8")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _faulted_at(directory: Path, began: float) -> float:
    path = directory / "fault"
    return float(path.read_text(encoding="utf-8")) - began if path.exists() else 0.0


def _rank(rank: int, size: int, port: int, own_store: bool, timeout_s: float, work: Work, errors: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(not own_store)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    os.chdir(errors.parent)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    from relax.megatron.runtime import megatron_process

    try:
        with megatron_process(0, timeout_s=timeout_s):
            work(rank)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(3)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
