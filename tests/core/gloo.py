"""Real processes in a gloo group, for the tests that threads cannot stand in for."""

import multiprocessing
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import relax_core as rc

Scenario = tuple[Sequence[float], Any]
"""A rank's scores and the sizes it passes to split_by ("missing" for no segmentation at all)."""


def _reduce(values: Tensor, op: str) -> Tensor:
    values = values.clone()
    dist.all_reduce(values, op=dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
    return values


def _rank(rank: int, scenarios: Sequence[Sequence[Scenario]], store: str, results: Any) -> None:
    torch.set_num_threads(1)
    world = len(scenarios[0])
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=10)
    )
    outcomes: list[object] = []
    for scenario in scenarios:
        scores, sizes = scenario[rank]
        segment = None if sizes == "missing" else rc.split_by(sizes)
        try:
            algorithm = rc.get_algorithm("gdpo")
            out = algorithm.estimate_advantages(
                algorithm.hyperparameters(),
                torch.tensor(scores, dtype=torch.float64),
                rc.Tokens.full([1] * len(scores)),
                segment=segment,
                reduce=_reduce,
            )
            outcomes.append(out.advantages.tolist())
        except Exception as error:
            outcomes.append((type(error).__name__, str(error)))
    results.put((rank, outcomes))
    dist.destroy_process_group()


def run_scenarios(scenarios: Sequence[Sequence[Scenario]]) -> list[list[object]]:
    """What every rank got in every scenario, one after another in the same processes: [scenario][rank]."""
    world = len(scenarios[0])
    # One process imports torch, and the ranks are forked from it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [context.Process(target=_rank, args=(rank, scenarios, store, results)) for rank in range(world)]
        for process in processes:
            process.start()
        by_rank = dict(results.get(timeout=120) for _ in processes)
        for process in processes:
            process.join(timeout=60)
            assert process.exitcode == 0
    return [[by_rank[rank][number] for rank in range(world)] for number in range(len(scenarios))]
