"""The two callables that carry the world into pure functions, and how ranks agree before they go on.

`segment` says which samples belong to which optimizer batch, `reduce` combines tensors over the data-parallel ranks.
"""

import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, Literal, Protocol, TypeVar, runtime_checkable

import attrs
import torch
from torch import Tensor

T = TypeVar("T")


@runtime_checkable
class Reduce(Protocol):
    """Combine a tensor with the other ranks' tensors of the same shape; never in place."""

    def __call__(self, values: Tensor, op: Literal["sum", "max"]) -> Tensor:
        """The sum or the largest of all ranks' values, element by element; the same on every rank."""


@runtime_checkable
class Segment(Protocol):
    """Cut per-sample values of this rank into views, one for each optimizer batch. A rank's share may be empty."""

    def __call__(self, values: Tensor) -> tuple[Tensor, ...]:
        """The parts, in the order of the batches."""


def local(values: Tensor, op: Literal["sum", "max"]) -> Tensor:
    """The reduction of a single process: nothing to combine."""
    return values


def whole_batch(values: Tensor) -> tuple[Tensor, ...]:
    """The segmentation of a rollout that is one optimizer batch."""
    return (values,)


@attrs.frozen
class SplitBy:
    """Consecutive optimizer batches of the given sizes (this rank's share of each).

    Sizes are checked when samples are cut, not here: by then every rank is about to agree, so that one rank's
    malformed sizes raise on all of them.

    Attributes:
        sizes: samples of each batch, a sequence or vector of whole numbers.

    Raises (when called):
        ValueError: no sizes, sizes that are not whole numbers of 0 or more, or that do not add up to the samples.
    """

    sizes: object

    def __call__(self, values: Tensor) -> tuple[Tensor, ...]:
        """Views of the values, in order."""
        sizes = self.sizes.tolist() if isinstance(self.sizes, Tensor) else self.sizes
        if sizes is None:
            raise ValueError("the sizes of the optimizer batches are missing; a rollout is never taken to be one batch")
        if not isinstance(sizes, Sequence) or not sizes:
            raise ValueError(f"optimizer batch sizes must be a non-empty sequence, got {sizes!r}")
        if any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in sizes):
            raise ValueError(f"optimizer batch sizes must be whole numbers of samples, got {sizes!r}")
        if sum(sizes) != len(values):
            raise ValueError(f"optimizer batch sizes {sizes!r} add up to {sum(sizes)}, not to {len(values)} samples")
        return values.tensor_split(list(accumulate(sizes))[:-1])


def split_by(sizes: object) -> SplitBy:
    """A segmentation into consecutive optimizer batches of `sizes` samples (a sequence of int)."""
    return SplitBy(sizes)


@attrs.frozen(eq=False)
class Batches:
    """How this rank's samples are spread over optimizer batches.

    Attributes:
        of_sample: the batch that each sample belongs to, counted from 0.
        count: how many batches there are.
    """

    of_sample: Tensor
    count: int

    def spread(self, per_batch: Tensor) -> Tensor:
        """Each sample's batch's value; that of a single batch is left to broadcasting."""
        return per_batch if self.count == 1 else per_batch[self.of_sample]


def cut(samples: int, segment: Segment | None, device: torch.device) -> Batches:
    """Apply a segmentation to sample positions, so that any way of cutting is understood alike.

    Raises:
        ValueError: no segmentation, or one that does not hold every sample exactly once.
    """
    if segment is None:
        raise ValueError("the segmentation into optimizer batches is missing; pass whole_batch or split_by(sizes)")
    parts = segment(torch.arange(samples, device=device))
    held = torch.cat([*parts, torch.empty(0, dtype=torch.long, device=device)])
    if len(parts) == 0 or not torch.equal(held.sort().values, torch.arange(samples, device=device)):
        raise ValueError(f"the segmentation must hold each of {samples} samples once, in at least one optimizer batch")
    if len(parts) == 1:  # spares most of what an index costs, and a whole rollout is the usual case
        return Batches(torch.zeros_like(held), 1)
    sizes = torch.tensor([len(part) for part in parts], device=device)
    batch = torch.arange(len(parts), device=device).repeat_interleave(sizes)
    return Batches(torch.empty_like(batch).index_copy(0, held, batch), len(parts))


_KINDS: Final[tuple[type[Exception], ...]] = (ValueError, TypeError, RuntimeError)
_COUNT_AT: Final = len(_KINDS)
_CHECKSUM_AT: Final = _COUNT_AT + 2
_TEXT_AT: Final = _CHECKSUM_AT + 1
_TEXT: Final = 400
_ANOTHERS: Final = "(another rank failed; every rank stops)"


def _kind(error: Exception) -> int:
    return next((kind for kind, cls in enumerate(_KINDS) if isinstance(error, cls)), len(_KINDS) - 1)


def is_anothers(error: BaseException) -> bool:
    """Whether `agree` raised `error` for the fault of another rank than this one."""
    return str(error).endswith(_ANOTHERS)


def agree(prepare: Callable[[], T], count: Callable[[T], int], reduce: Reduce, device: torch.device) -> T:
    """Run this rank's own part; let every rank go on, or raise the same error on every rank. One collective.

    Until here a fault stays a value: a rank that raised alone would leave its peers waiting in their next collective.
    A single failing rank's message reaches all ranks intact, since everyone else adds zeros to the maximum; messages of
    several failing ranks overlay each other, which their checksum tells.

    Args:
        prepare: the local part; whatever it raises is the fault.
        count: a number of its result that must be the same on all ranks, such as how many optimizer batches there are.

    Raises:
        ValueError, TypeError or RuntimeError: some rank's fault, or counts that differ.
    """
    if reduce is local:
        return prepare()
    error: Exception | None = None
    ballot = torch.zeros(_TEXT_AT + _TEXT, dtype=torch.float64)
    try:
        result = prepare()
        ballot[_COUNT_AT : _COUNT_AT + 2] = torch.tensor([count(result), -count(result)])
    except Exception as fault:
        error, text = fault, str(fault).encode()[:_TEXT]
        ballot[_kind(fault)] = 1
        ballot[_CHECKSUM_AT] = zlib.crc32(text)
        ballot[_TEXT_AT : _TEXT_AT + len(text)] = torch.tensor(list(text))
    ballot = reduce(ballot.to(device), "max").cpu()
    if ballot[:_COUNT_AT].any():
        shared = bytes(int(byte) for byte in ballot[_TEXT_AT:].tolist()).rstrip(b"\0")
        intact = zlib.crc32(shared) == ballot[_CHECKSUM_AT]
        message = shared.decode(errors="replace") if intact else "several ranks failed, each in its own way"
        whose = "(this rank failed; every rank stops)" if error else _ANOTHERS
        raise _KINDS[int(ballot[:_COUNT_AT].argmax())](f"{message} {whose}") from error
    most, least = int(ballot[_COUNT_AT]), -int(ballot[_COUNT_AT + 1])
    if most != least:
        raise ValueError(
            f"ranks disagree on the number of optimizer batches: from {least} to {most}, this rank has {count(result)}"
        )
    return result
