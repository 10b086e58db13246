"""A vocabulary on tensor-parallel ranks that need not divide it: their rows are equally many, the last rank's padded.

Padding is in the parameters alone: zero from the start, without gradient, in no logit, and in no file.
"""

from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn


def rows(vocab_size: int, ranks: int) -> int:
    """Rows of the embedding, and of the output layer, that each of `ranks` tensor-parallel ranks holds."""
    return -(-vocab_size // ranks)


def suffices(vocab_size: int, ranks: int) -> bool:
    """Whether each of `ranks` has a token id of its own, not padding alone."""
    return rows(vocab_size, ranks) * (ranks - 1) < vocab_size


def draw(weight: Tensor, *, vocab_size: int, std: float) -> None:
    """Fills the rows of all ranks: normal numbers, the same whatever the padding, and zeros there."""
    nn.init.normal_(weight[:vocab_size], std=std)
    nn.init.zeros_(weight[vocab_size:])


def filled_up(weight: Tensor, count: int) -> Tensor:
    """`weight` [rows, ...] with rows of zeros behind, `count` in all."""
    missing = count - len(weight)
    return weight if missing == 0 else torch.cat((weight, weight.new_zeros(missing, *weight.shape[1:])))


def without_padding(held: ShardedTensor, vocab_size: int) -> ShardedTensor | ShardedTensorFactory:
    """This rank's rows for a checkpoint, which has `vocab_size` of them from every layout, and is refused otherwise."""
    if held.global_shape[0] <= vocab_size:
        return replace(held, allow_shape_mismatch=False)
    count, start, width = held.local_shape[0], held.global_offset[0], held.local_shape[1:]

    def build(key: str, weight: Tensor, replica_id: ReplicaId, flattened_range: slice | None) -> ShardedTensor:
        own = weight[: vocab_size - start]
        return ShardedTensor(
            key,
            own,
            own.dtype,
            local_shape=tuple(own.shape),
            global_shape=(vocab_size, *width),
            global_offset=(start, *(0 for _ in width)),
            axis_fragmentations=None,  # Megatron's word for ranks that hold unequally many
            replica_id=replica_id,
        )

    return ShardedTensorFactory(held.key, held.data, build, lambda own: filled_up(own, count), held.replica_id)
