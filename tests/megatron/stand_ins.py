"""CPU modules that keep to what Megatron's Transformer Engine wrappers promise, for what is handed to them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, distributed, nn

from relax.megatron import model, transformer_engine


class ExtraState:
    """As Transformer Engine's modules: an empty tensor in every state, without which none is loaded."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        assert state.numel() == 0


class ColumnLinear(ExtraState, ColumnParallelLinear):  # type: ignore[misc]
    pass


class RowLinear(ExtraState, RowParallelLinear):  # type: ignore[misc]
    pass


class Norm(ExtraState, nn.RMSNorm):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)


class Attention(ExtraState, nn.Module):
    """Causal attention by its formula, sequence by sequence, over rows or packed ones, shared by context ranks or not.

    Arguments, shapes and the context ranks' shares as TEDotProductAttention and DotProductAttention document them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: object = None,
    ) -> None:
        super().__init__()
        self.group: distributed.ProcessGroup = pg_collection.cp  # type: ignore[attr-defined]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert attention_mask is None
        assert attn_mask_type is AttnMaskType.causal
        ranks = self.group.size()
        lengths = [len(query) * ranks]
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q_padded
            assert packed_seq_params.qkv_format == "thd"
            assert query.dim() == 3
            assert bounds.dtype == torch.int32
            lengths = bounds.diff().tolist()
            assert packed_seq_params.max_seqlen_q == max(lengths)
        assert sum(lengths) == len(query) * ranks
        shares = torch.split(query, [length // ranks for length in lengths])
        keys, values = (self._sequences(states, lengths) for states in (key, value))
        return torch.cat([self._one(*parts) for parts in zip(shares, keys, values, strict=True)]).flatten(-2)

    def _sequences(self, states: Tensor, lengths: list[int]) -> list[Tensor]:
        """Each whole sequence, its chunks r and 2n - 1 - r taken from rank r of n."""
        if self.group.size() == 1:
            return list(torch.split(states, lengths))
        ranks = self.group.size()
        gathered = gather_from_sequence_parallel_region(states, group=self.group).chunk(ranks)
        parts = [torch.split(share, [length // ranks for length in lengths]) for share in gathered]
        whole = []
        for mine in zip(*parts, strict=True):
            halves = [part.chunk(2) for part in mine]
            whole.append(torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)]))
        return whole

    def _one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ranks, rank = self.group.size(), self.group.rank()
        place = torch.arange(len(key))
        if ranks > 1:
            chunks = place.chunk(2 * ranks)
            place = torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))
        repeats = query.shape[-2] // key.shape[-2]
        key, value = key.repeat_interleave(repeats, -2), value.repeat_interleave(repeats, -2)
        scores = torch.einsum("q...d,k...d->...qk", query, key) / query.shape[-1] ** 0.5
        hidden = torch.arange(len(key)) > place.unsqueeze(1)
        return torch.einsum("...qk,k...d->q...d", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


@contextmanager
def installed() -> Iterator[None]:
    """Transformer Engine is there, made of these modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_engine, "TENorm", Norm)
        patch.setattr(transformer_engine, "TEColumnParallelLinear", ColumnLinear)
        patch.setattr(transformer_engine, "TERowParallelLinear", RowLinear)
        patch.setattr(transformer_engine, "TEDotProductAttention", Attention)
        patch.setattr(transformer_engine, "faults", lambda config: iter(()))
        yield


@contextmanager
def instead_of_local() -> Iterator[None]:
    """Models are made of these modules, in float32 too: both implementations can be compared closely."""
    with installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "LOCAL", transformer_engine.modules())
        yield
