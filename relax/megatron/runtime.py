"""One process of a Megatron job: torch.distributed, model-parallel groups, seeds."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from relax import agreement
from relax.megatron import memory, shim
from relax.megatron.layout import ONE_RANK, Layout


def job_size() -> int:
    """Processes of the job that torchrun describes in the environment; 1 where there is none."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


@contextmanager
def megatron_process(seed: int, layout: Layout = ONE_RANK, *, timeout_s: float = 600.0) -> Iterator[None]:
    """Joins the job that torchrun describes in the environment, or makes one of this process alone.

    The job's processes share models as `layout` says. Collectives and ends of stages (see `relax.agreement`) give up
    after `timeout_s` seconds. The backend is NCCL on GPUs and gloo elsewhere. A job of one process opens no port.
    Everything that touches Megatron-core must happen inside; the job is left at the end.

    Raises RuntimeError when this process already is part of a job, and ValueError on every rank when the layout does
    not fit the number of processes.
    """
    if distributed.is_initialized():
        raise RuntimeError("torch.distributed is already initialized in this process: leave that job first")
    layout.check_job(job_size())
    on_gpu = torch.cuda.is_available()
    flushed = _flushes_denormals()
    if on_gpu:
        # One queue to the device, read when CUDA starts: what is sent to other tensor ranks overtakes nothing then.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        memory.keep_freed()
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = HashStore(), 0, 1
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
    with agreement.joined(store, rank, size, timeout_s=timeout_s), warnings.catch_warnings():
        # Megatron calls collectives by names that torch is about to retire: nothing that a user could mend.
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*is deprecated", category=FutureWarning)
        if not on_gpu:  # and this is advice on CUDA's queues
            warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS", category=UserWarning)
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=timeout
        )
        try:
            torch.set_flush_denormal(flushed or not on_gpu)
            with shim.cuda_queries_answered(), shim.cpu_for_cuda():
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=layout.tensor,
                    pipeline_model_parallel_size=layout.pipeline,
                    context_parallel_size=layout.context,
                    distributed_timeout_minutes=timeout_s / 60,
                    create_gloo_process_groups=False,
                )
                # The inference tracker is Megatron's switch for "no random streams of its own": dropout is off here.
                tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
            with shim.cuda_queries_answered():
                yield
        finally:
            parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()
            torch.set_flush_denormal(flushed)  # a mode of the whole thread: whatever runs next computes as before


def _flushes_denormals() -> bool:
    """Whether this thread rounds subnormal numbers to zero; torch sets this mode but does not tell it."""
    smallest_normal = torch.tensor(torch.finfo(torch.float64).tiny, dtype=torch.float64)
    return not bool(smallest_normal / 2 > 0)
