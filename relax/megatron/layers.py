"""The parts of a Megatron transformer layer that are ours: core attention, rotation before caching, the layer spec."""

from functools import partial
from itertools import groupby
from typing import Final

import attrs
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import init_method_normal
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from relax.megatron import context
from relax.megatron.kernels import RMSNorm, Rotation, SwiGLU, rotate


@attrs.frozen
class SharedPrompt:
    """Says that a row holds one prompt and several responses to it, each of which is to see the prompt and itself.

    Along the time axis come `width` places of the prompt, padded on the right, and then, place by place, the tokens of
    all `copies` responses next to each other. `mask` is added to the scores of response tokens:
    [copies * rows or 1, 1, places, width + places], copy by copy.
    """

    width: int
    copies: int
    mask: Tensor


@attrs.frozen
class Segments:
    """Says that the time axis holds sequences of these `lengths` behind one another, each of which sees only itself.

    With context parallelism the lengths are those of whole sequences, of which a rank has its zig-zag share, and
    `order` is where their places are in the ranks' shares (see `context`).
    """

    lengths: tuple[int, ...]
    order: Tensor | None = None


Attention = SharedPrompt | Segments
"""How rows attend, where it is not causally over their whole length."""


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """softmax(Q K^T / sqrt(d)) V by torch's fused kernel, grouped queries included.

    Causal over whole rows, or as `SharedPrompt` or `Segments` say. A decoding step (one query position on cached keys)
    sees all keys that `attention_mask`, added to the scores and of shape [batch, 1, 1, keys], leaves finite; None hides
    none.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None,
        softmax_scale: float | None,
        pg_collection: object,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Attention | None,
        *,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: object = None,
    ) -> Tensor:
        """Query [time, batch, heads, d], key and value [keys, batch, groups, d] -> [time, batch, heads * d]."""
        if isinstance(attention_mask, SharedPrompt):
            return self._shared(query, key, value, attention_mask)
        if isinstance(attention_mask, Segments):
            return self._segments(query, key, value, attention_mask)
        if attn_mask_type is not AttnMaskType.no_mask:
            return self._attend(query, key, value, None)
        return self._decode(query, key, value, attention_mask)

    def _decode(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """One position. The heads that share a key are that key's queries, so no key is repeated.

        Two batched products: for a single query they are several times as fast as the fused kernel.
        """
        _, batch, groups, width = key.shape
        query = query.view(batch, groups, -1, width) * (self.scale or width**-0.5)
        scores = query @ key.permute(1, 2, 3, 0)
        if mask is not None:
            scores += mask
        return (scores.softmax(-1) @ value.permute(1, 2, 0, 3)).view(1, batch, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        heads = query.shape[2]
        context = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=key.shape[2] != heads,
        )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _shared(self, query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompt) -> Tensor:
        """Every response as a row of its own, on its own keys behind those of the prompt."""
        width, copies = shared.width, shared.copies
        rows = query.shape[1]

        def responses(states: Tensor) -> Tensor:
            return states[width:].reshape(-1, copies * rows, *states.shape[2:])

        def behind_prompt(states: Tensor) -> Tensor:
            return torch.cat((states[:width].repeat(1, copies, 1, 1), responses(states)))

        prompt = self._attend(query[:width], key[:width], value[:width], None)
        context = self._attend(responses(query), behind_prompt(key), behind_prompt(value), shared.mask)
        return torch.cat((prompt, context.view(-1, rows, context.shape[-1])))

    def _segments(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """Runs of equal length at a time, each sequence a row of its own."""
        ranks = 1
        if segments.order is not None:
            ranks = context.size()
            key, value = context.whole_sequences(torch.cat((key, value), dim=-1), segments.order).chunk(2, dim=-1)
        found, start = [], 0
        for length, run in groupby(segments.lengths):
            count = len(list(run))
            stop = start + count * length
            local = _rows(query[start // ranks : stop // ranks], count)
            keys, values = _rows(key[start:stop], count), _rows(value[start:stop], count)
            part = self._attend(local, keys, values, None) if ranks == 1 else self._zigzag(local, keys, values)
            found.append(_behind_one_another(part, count))
            start = stop
        return torch.cat(found)

    def _zigzag(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """This rank's two chunks of queries, each on all keys up to its end."""
        ranks, rank, size = context.size(), context.rank(), len(query) // 2
        found = []
        for chunk, queries in zip((rank, 2 * ranks - 1 - rank), query.chunk(2), strict=True):
            before, stop = chunk * size, (chunk + 1) * size
            seen = torch.ones(size, stop, dtype=torch.bool, device=query.device).tril(before)
            found.append(self._attend(queries, key[:stop], value[:stop], seen))
        return torch.cat(found)


def _rows(states: Tensor, count: int) -> Tensor:
    """`count` equally long sequences behind one another, as rows: [count * time, ...] -> [time, count * batch, ...]."""
    return states.reshape(count, -1, *states.shape[1:]).transpose(0, 1).flatten(1, 2)


def _behind_one_another(states: Tensor, count: int) -> Tensor:
    """The inverse of `_rows`."""
    return states.reshape(len(states), count, -1, *states.shape[2:]).transpose(0, 1).flatten(0, 1)


class RotatedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's self-attention, except that keys enter the cache already rotated.

    Megatron rotates all cached keys anew for every token it decodes; here a token costs one rotation, and each row of
    a batch may stand at a position of its own.
    """

    def _adjust_key_value_for_inference(
        self,
        inference_context: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary_pos_emb: Rotation,
        *args: object,
        **kwargs: object,
    ) -> object:
        query, key = rotate(query, rotary_pos_emb), rotate(key, rotary_pos_emb)
        return super()._adjust_key_value_for_inference(inference_context, query, key, value, None, *args, **kwargs)


class DrawnByItself:
    """A column-parallel projection with normal weights: `config.init_method` is that of the vocabulary's rows here."""

    def __init__(self, *args: object, config: TransformerConfig, init_method: object, **kwargs: object) -> None:
        drawn = init_method_normal(config.init_method_std)
        super().__init__(*args, config=config, init_method=drawn, **kwargs)  # type: ignore[call-arg]  # the projection's


class ColumnLinear(DrawnByItself, ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's column-parallel projection; where there is neither gradient nor another rank, its product alone."""

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        return _product(self, input_) or super().forward(input_, *args, **kwargs)


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's row-parallel projection, likewise."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        return _product(self, input_) or super().forward(input_)


def _product(linear: ColumnLinear | RowLinear, states: Tensor) -> tuple[Tensor, Tensor | None] | None:
    if torch.is_grad_enabled() or linear.tp_group.size() > 1:
        return None
    # One matrix product whatever the weight's flags say: `matmul` of three dimensions would choose by requires_grad.
    product = torch.mm(states.flatten(0, 1), linear.weight.t()).view(*states.shape[:2], -1)
    if linear.bias is None or linear.skip_bias_add:
        return product, linear.bias
    return product + linear.bias, None


class RecomputedLayer(TransformerLayer):  # type: ignore[misc]
    """A layer of which the backward pass keeps the input only. Megatron's own way takes tensors as arguments only."""

    def forward(self, *args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(partial(super().forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=False)


@attrs.frozen
class Modules:
    """What a layer is made of: classes that Megatron builds."""

    norm: type = RMSNorm
    column_linear: type = ColumnLinear
    row_linear: type = RowLinear
    activation: type = SwiGLU
    core_attention: type = CoreAttention


LOCAL: Final = Modules()
"""Those that compute on a CPU and on a GPU alike."""


def layer_spec(*, qk_norm: bool, recompute: bool = False, modules: Modules = LOCAL) -> ModuleSpec:
    """One layer: Megatron's local structure, with attention rotated by us, and with these modules."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm)
    if recompute:
        spec.module = RecomputedLayer
    layer, attention = spec.submodules, spec.submodules.self_attention
    layer.input_layernorm = layer.pre_mlp_layernorm = modules.norm
    mlp = layer.mlp.submodules
    mlp.linear_fc1, mlp.linear_fc2, mlp.activation_func = modules.column_linear, modules.row_linear, modules.activation
    attention.submodules.linear_qkv, attention.submodules.linear_proj = modules.column_linear, modules.row_linear
    attention.module = RotatedSelfAttention
    attention.submodules.core_attention = modules.core_attention
    if qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = modules.norm
    return spec
