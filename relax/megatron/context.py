"""Context parallelism: which tokens of a sequence each rank computes, and how what it found comes together again.

A sequence is cut into 2n chunks for n ranks, of which rank r has numbers r and 2n - 1 - r (zig-zag): with causal
attention, early places see few keys and late ones many, so that every rank has the same work.
"""

from collections.abc import Sequence

import attrs
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn import functional


@attrs.frozen
class Gather:
    """Where the context ranks' values of response tokens belong: `order`, [tokens], into their rows of `longest`."""

    order: Tensor
    longest: int


def size() -> int:
    """How many ranks share a sequence."""
    return int(parallel_state.get_context_parallel_world_size())


def rank() -> int:
    """Which of them this one is."""
    return int(parallel_state.get_context_parallel_rank())


def zigzag(lengths: Sequence[int], ranks: int) -> Tensor:
    """The places of each rank in sequences that lie behind one another: [ranks, places / ranks], ascending by sequence.

    Lengths are multiples of 2 * ranks.
    """
    parts, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).view(2 * ranks, -1)
        parts.append(torch.cat((chunks[:ranks], chunks[ranks:].flip(0)), dim=1))
        start += length
    return torch.cat(parts, dim=1)


def whole_sequences(values: Tensor, order: Tensor) -> Tensor:
    """All places of sequences, [places, ...], from the ranks' shares, [places / ranks, ...].

    `order`, [places], tells where they are in the shares behind one another: what sorts `zigzag`. Every rank goes on
    with the whole in its own way: gradients of all come back to the rank whose share it is, and add up.
    """
    gathered = gather_from_sequence_parallel_region(values, group=parallel_state.get_context_parallel_group())
    whole: Tensor = gathered.index_select(0, order)
    return whole


def shares_of_tokens(times: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor, Gather]:
    """What is this rank's of tokens predicted at the places `times` [tokens] of the time axis.

    Returns the tokens it computes (bool, [tokens]), the local place of every token, and how the shares come together.
    """
    mine = zigzag(lengths, size())
    owner, local = torch.empty(2, mine.numel(), dtype=torch.int64)
    owner[mine] = torch.arange(size()).unsqueeze(1).expand_as(mine)
    local[mine] = torch.arange(mine.shape[1]).expand_as(mine)
    owners = owner[times]
    counts = torch.bincount(owners, minlength=size())
    longest = max(1, int(counts.max()))
    by_owner = owners.argsort(stable=True)
    order = torch.empty_like(owners)
    order[by_owner] = torch.cat([start * longest + torch.arange(int(count)) for start, count in enumerate(counts)])
    return owners == rank(), local[times], Gather(order, longest)


def whole_responses(values: Tensor, gather: Gather) -> Tensor:
    """The values of all response tokens, [..., tokens], on every context rank, from this rank's own.

    Every rank goes on alike with the whole: the gradient of a value goes to the rank that computed it, once.
    """
    padded = functional.pad(values, (0, gather.longest - values.shape[-1])).movedim(-1, 0)
    gathered = gather_from_sequence_parallel_region(
        padded, tensor_parallel_output_grad=False, group=parallel_state.get_context_parallel_group()
    )
    whole: Tensor = gathered.index_select(0, gather.order).movedim(0, -1)
    return whole
