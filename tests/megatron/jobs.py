"""Jobs of several Megatron processes, for what one process cannot show."""

import io
import multiprocessing
import os
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

import relax.megatron.trainer  # noqa: F401 - imported once, by the process that all ranks are forked from
from relax.megatron.layout import Layout
from relax.megatron.runtime import megatron_process

TIMEOUT_S = 60.0


def run(world: int, layout: Layout, work: Callable[..., object], *arguments: object, seconds: float = 240.0) -> Any:
    """What `work(*arguments)`, a module-level function, returned on each of `world` ranks inside `megatron_process`.

    Fails with the traceback of the first rank that raises, or after `seconds`; no process outlives the call.
    """
    return start(world, _inside_process, layout, work, arguments, seconds=seconds)


def start(world: int, work: Callable[..., object], *arguments: object, seconds: float = 240.0) -> Any:
    """The same outside any job: only the environment says which rank a process is."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    results = context.Queue()
    port = _free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, world, port, work, arguments, results), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    by_rank: dict[int, Any] = {}
    try:
        while len(by_rank) < world:
            rank, failure, result = results.get(timeout=seconds)
            assert failure is None, f"rank {rank} of {world}:\n{failure}"
            by_rank[rank] = torch.load(io.BytesIO(result), weights_only=False)
    except queue.Empty:
        raise AssertionError(f"only ranks {sorted(by_rank)} of {world} were done after {seconds} s") from None
    finally:
        for process in ranks:
            process.join(timeout=10 if len(by_rank) == world else 0)
            process.kill()
    return [by_rank[rank] for rank in range(world)]


def _inside_process(layout: Layout, work: Callable[..., object], arguments: tuple[object, ...]) -> object:
    with megatron_process(0, layout, timeout_s=TIMEOUT_S):
        return work(*arguments)


def _rank(
    rank: int, world: int, port: int, work: Callable[..., object], arguments: tuple[object, ...], results: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        stored = io.BytesIO()
        torch.save(work(*arguments), stored)
        results.put((rank, None, stored.getvalue()))
    except Exception:
        results.put((rank, traceback.format_exc(), None))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
