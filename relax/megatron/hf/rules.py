"""Which Hugging Face tensors make up which Megatron tensor, and how ranks share it: one table, read both ways."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from relax.megatron import vocabulary
from relax.megatron.model import ModelConfig
from relax.megatron.stages import EMBEDDING, OUTPUT

Shape = tuple[int, ...]


@attrs.frozen
class Rule:
    """One Megatron tensor, the Hugging Face tensors behind it with their shapes, and the axis that ranks cut.

    Several tensors follow each other along the first axis: a query, key and value group by group (`grouped`), as
    q q k v | q q k v | ..., others one whole after the other, where each rank's share is such a row of shares (its part
    of the gate, then its part of the linear half). `axis` None: every tensor-parallel rank holds all. Where they do
    not divide the rows of a vocabulary, the last rank's are filled up with zeros.
    """

    megatron: str
    hugging_face: Mapping[str, Shape]
    axis: int | None = None
    grouped: bool = False

    def join(self, config: ModelConfig, parts: Sequence[Tensor]) -> Tensor:
        """Hugging Face tensors, in the rule's order -> the whole Megatron tensor."""
        if not self.grouped:
            return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
        groups = [part.reshape(config.num_query_groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(groups, dim=1).flatten(0, 1)

    def split(self, config: ModelConfig, whole: Tensor) -> Sequence[Tensor]:
        """The inverse of `join`."""
        if not self.grouped:
            return whole.chunk(len(self.hugging_face))
        groups = whole.view(config.num_query_groups, -1, *whole.shape[1:])
        lengths = [shape[0] // config.num_query_groups for shape in self.hugging_face.values()]
        return [part.flatten(0, 1) for part in torch.split(groups, lengths, dim=1)]

    def cut(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What tensor-parallel rank `rank` of `size` holds of the whole Megatron tensor."""
        if self.axis is None or size == 1:
            return whole
        shares = [share.flatten(0, 1) for share in self._blocks(whole).chunk(size, dim=self.axis + 1)]
        return vocabulary.filled_up(shares[rank], len(shares[0]))

    def assemble(self, shares: Sequence[Tensor]) -> Tensor:
        """The inverse of `cut`: the shares of all ranks, in order -> the whole Megatron tensor."""
        if self.axis is None or len(shares) == 1:
            return shares[0]
        together = torch.cat([self._blocks(share) for share in shares], dim=self.axis + 1).flatten(0, 1)
        return together[: sum(shape[0] for shape in self.hugging_face.values())]

    def _blocks(self, tensor: Tensor) -> Tensor:
        return tensor.view(1 if self.grouped else len(self.hugging_face), -1, *tensor.shape[1:])


def embedding_rule(config: ModelConfig) -> Rule:
    """The input embedding."""
    shape = (config.vocab_size, config.hidden_size)
    return Rule(EMBEDDING, {"model.embed_tokens.weight": shape}, axis=0)


def layer_rules(config: ModelConfig, place: int, layer: int) -> Iterator[Rule]:
    """Layer `layer` of the model, counted from 0, which is the `place`-th of the rank that holds it."""
    hidden, ffn, head = config.hidden_size, config.ffn_hidden_size, config.kv_channels
    queries, keys = config.num_attention_heads * head, config.num_query_groups * head
    ours, theirs = f"decoder.layers.{place}.", f"model.layers.{layer}."
    attention, mlp = f"{theirs}self_attn.", f"{theirs}mlp."

    yield Rule(f"{ours}input_layernorm.weight", {f"{theirs}input_layernorm.weight": (hidden,)})
    yield Rule(
        f"{ours}self_attention.linear_qkv.weight",
        {
            f"{attention}q_proj.weight": (queries, hidden),
            f"{attention}k_proj.weight": (keys, hidden),
            f"{attention}v_proj.weight": (keys, hidden),
        },
        axis=0,
        grouped=True,
    )
    if config.qkv_bias:
        yield Rule(
            f"{ours}self_attention.linear_qkv.bias",
            {
                f"{attention}q_proj.bias": (queries,),
                f"{attention}k_proj.bias": (keys,),
                f"{attention}v_proj.bias": (keys,),
            },
            axis=0,
            grouped=True,
        )
    if config.qk_norm:
        yield Rule(f"{ours}self_attention.q_layernorm.weight", {f"{attention}q_norm.weight": (head,)})
        yield Rule(f"{ours}self_attention.k_layernorm.weight", {f"{attention}k_norm.weight": (head,)})
    yield Rule(f"{ours}self_attention.linear_proj.weight", {f"{attention}o_proj.weight": (hidden, queries)}, axis=1)
    yield Rule(f"{ours}pre_mlp_layernorm.weight", {f"{theirs}post_attention_layernorm.weight": (hidden,)})
    yield Rule(
        f"{ours}mlp.linear_fc1.weight",
        {f"{mlp}gate_proj.weight": (ffn, hidden), f"{mlp}up_proj.weight": (ffn, hidden)},
        axis=0,
    )
    yield Rule(f"{ours}mlp.linear_fc2.weight", {f"{mlp}down_proj.weight": (hidden, ffn)}, axis=1)


def output_rules(config: ModelConfig) -> Iterator[Rule]:
    """The last norm, and the output layer, which is made of the embedding where the two are tied."""
    yield Rule("decoder.final_layernorm.weight", {"model.norm.weight": (config.hidden_size,)})
    source = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    yield Rule(OUTPUT, {source: (config.vocab_size, config.hidden_size)}, axis=0)
