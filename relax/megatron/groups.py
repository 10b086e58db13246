"""What the ranks of a job tell each other beside gradients. Costs nothing where there is nobody to tell."""

from typing import Literal, TypeVar

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed
from torch.nn import functional

from relax.megatron import shim
from relax_core.collectives import Reduce, local

T = TypeVar("T")


def over_replicas(values: Tensor, op: Literal["sum", "max"]) -> Tensor:
    """The sum or the largest over the data-parallel ranks, as `relax_core` takes it."""
    combined = values.to(shim.device(), copy=True)
    kind = distributed.ReduceOp.SUM if op == "sum" else distributed.ReduceOp.MAX
    distributed.all_reduce(combined, kind, group=parallel_state.get_data_parallel_group())
    return combined.to(values.device)


def data_parallel_reduce() -> Reduce:
    """`over_replicas`, or `relax_core.local` where there is one replica."""
    return over_replicas if parallel_state.get_data_parallel_world_size() > 1 else local


def replica() -> tuple[int, int]:
    """Which of the data-parallel replicas this rank belongs to, and how many there are."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def leads_replica() -> bool:
    """Whether this rank is the first of those that hold its replica together."""
    return not any(
        (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
        )
    )


def from_replicas(value: T) -> list[T]:
    """What the first rank of each replica passes, in the replicas' order, on every rank of the job; it is pickled."""
    own, replicas = replica()
    if distributed.get_world_size() == 1:
        return [value]
    leaders = torch.zeros(replicas, dtype=torch.int64, device=shim.device())
    if leads_replica():
        leaders[own] = distributed.get_rank()
    distributed.all_reduce(leaders)
    held = [[value] for _ in range(replicas)]
    for found, leader in zip(held, leaders.tolist(), strict=True):
        distributed.broadcast_object_list(found, leader)
    return [found[0] for found in held]


def gathered(values: Tensor) -> tuple[Tensor, slice]:
    """The data-parallel ranks' vectors, of whatever lengths, one behind another, and which part is this rank's."""
    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        return values, slice(len(values))
    lengths = torch.zeros(group.size(), dtype=torch.float64)
    lengths[group.rank()] = len(values)
    counts = over_replicas(lengths, "sum").long().tolist()
    padded = functional.pad(values.to(shim.device()), (0, max(counts) - len(values)))
    parts = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(parts, padded, group=group)
    start = sum(counts[: group.rank()])
    whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return whole.to(values.device), slice(start, start + len(values))


def leads() -> bool:
    """Whether this rank is the job's first."""
    return distributed.get_rank() == 0


def everywhere(holds: bool) -> bool:
    """Whether something holds on all ranks of the job."""
    if distributed.get_world_size() == 1:
        return holds
    answer = torch.tensor(float(holds), device=shim.device())
    distributed.all_reduce(answer, distributed.ReduceOp.MIN)
    return bool(answer)


def tensor_from_last_stage(values: Tensor | None, *shape: int) -> Tensor:
    """On every pipeline stage what the last one holds, float32 of this shape; the others pass None. On the CPU."""
    found = torch.empty(shape) if values is None else values
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        found = found.to(shim.device())
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        distributed.broadcast(found, source, group=parallel_state.get_pipeline_model_parallel_group())
    return found.cpu()


def object_from_last_stage(value: T) -> T:
    """On every pipeline stage what the last one passes; it is pickled."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    held = [value]
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    distributed.broadcast_object_list(held, source, group=parallel_state.get_pipeline_model_parallel_group())
    return held[0]
