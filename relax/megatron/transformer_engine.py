"""Layers of NVIDIA's Transformer Engine, for GPUs where it is installed.

Written against Megatron-core's wrappers and Transformer Engine's documentation. What is handed over is tested on a CPU
with stand-ins for its modules; the modules themselves have not run here yet (the tests marked `gpu` are for that).
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEActivationOp,
    TEColumnParallelLinear,
    TEDotProductAttention,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from relax.megatron import context
from relax.megatron.kernels import SwiGLU
from relax.megatron.layers import CoreAttention, DrawnByItself, Modules, Segments

if TYPE_CHECKING:
    from relax.megatron.model import ModelConfig

NAME: Final = "transformer_engine"


def faults(config: "ModelConfig") -> Iterator[str]:
    """A line for each reason why this process cannot compute the layers that `config` asks for."""
    if config.transformer_impl != NAME:
        return
    flag = f"--transformer-impl {NAME}"
    if not torch.cuda.is_available():
        yield f"{flag}: needs a GPU, and this process has none; leave it out"
    if not HAVE_TE:
        yield f"{flag}: it cannot be imported here; pip install 'transformer-engine[pytorch]', or leave it out"


def modules() -> Modules:
    """Transformer Engine's counterparts of the local modules.

    Norms stay modules of their own, where Megatron's spec makes them part of the projection behind: in bfloat16 that
    saves nothing, and this way weights have the same names under both implementations, so that checkpoints and Hugging
    Face files fit either.
    """

    class ColumnLinear(DrawnByItself, TEColumnParallelLinear):  # type: ignore[misc]
        """Here, since there is nothing to derive from where Transformer Engine is missing."""

    return Modules(
        norm=TENorm,
        column_linear=ColumnLinear,
        row_linear=TERowParallelLinear,
        activation=TEActivationOp or SwiGLU,
        core_attention=FusedAttention,
    )


class FusedAttention(CoreAttention):
    """`CoreAttention`, of which Transformer Engine computes what its kernels can express.

    That is: causal rows, samples behind one another, and sequences that context ranks share, whose keys and values it
    passes round in a ring. Prompts with several responses and decoding stay with torch's kernel.

    It expects the zig-zag of `context`: of the 2n chunks of every sequence, rank r of n has numbers r and 2n - 1 - r
    (`megatron.core.utils.get_batch_on_this_cp_rank`; for packed sequences `tex.thd_get_partitioned_indices`).
    """

    def __init__(self, *, config: TransformerConfig, **arguments: object) -> None:
        super().__init__(config=config, **arguments)  # type: ignore[arg-type]  # Megatron's, passed on as they are
        self.fused = TEDotProductAttention(config=config, **arguments)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # With context ranks its module takes every row for a share; rows that come here are whole.
        if mask is not None or context.size() > 1:
            return super()._attend(query, key, value, mask)
        return self._fused(query, key, value, None)

    def _segments(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        if len(segments.lengths) == 1:  # each row is one sequence, or a share of one
            return self._fused(query, key, value, None)
        packed = packed_params(segments, query.device)
        return self._fused(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed).unsqueeze(1)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams | None) -> Tensor:
        result: Tensor = self.fused(query, key, value, None, AttnMaskType.causal, packed_seq_params=packed)
        return result


def packed_params(segments: Segments, device: torch.device) -> PackedSeqParams:
    """Where each sequence starts and ends, int32 [sequences + 1], and how long the longest is.

    With context ranks, in tokens of whole sequences: Transformer Engine divides by the ranks itself. It then reads the
    `padded` bounds, of which the others are a copy, since a causal sequence never looks at the padding at its end.
    """
    bounds = torch.tensor([*accumulate(segments.lengths, initial=0)], dtype=torch.int32, device=device)
    longest = max(segments.lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
