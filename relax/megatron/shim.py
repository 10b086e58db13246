"""Megatron-core on a machine without a GPU: where it asks for "cuda" it gets the CPU."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def device() -> torch.device:
    """The device this process computes on: its current GPU where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def _is_cuda(value: object) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class _CpuForCuda(TorchFunctionMode):
    """Reads a CUDA device argument as the CPU, and lets CPU tensors name themselves as CUDA ones do.

    Megatron-core hard-codes `device="cuda"` in its schedules and asserts `grad.type() == "torch.cuda.FloatTensor"`
    before it clips. The mode belongs to the thread that enters it and costs microseconds per torch call, so it is
    entered around Megatron's own bookkeeping and not around sampling.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def cpu_for_cuda() -> AbstractContextManager[object]:
    """The context in which Megatron-core's own code runs; does nothing where there is a GPU."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CpuForCuda()


def as_torch_is() -> AbstractContextManager[object]:
    """Inside `cpu_for_cuda`: torch as it is, for what names no device itself, and calls it thousands of times."""
    return contextlib.nullcontext() if torch.cuda.is_available() else torch._C.DisableTorchFunction()


@contextlib.contextmanager
def cuda_queries_answered() -> Iterator[None]:
    """Answers `torch.cuda.current_device()` with the CPU and makes `torch.cuda.synchronize()` return at once."""
    if torch.cuda.is_available():
        yield
        return
    original = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = original
