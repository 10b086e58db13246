"""Which part of each tensor a rank of any layout holds, held against Megatron's own cutting and against the arithmetic.

Plain tensors, no processes.
"""

import attrs
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.tensor_parallel.utils import VocabUtility
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from relax.megatron.hf.shards import Shard, shapes, to_hugging_face, to_megatron, whole
from relax.megatron.model import ModelConfig
from relax.megatron.stages import OUTPUT
from tests.megatron.conftest import ARCHITECTURES, MODEL, MODELS

LAYER = "decoder.layers.0."
QKV, PROJ, FC1, FC2 = (
    f"{LAYER}{name}.weight"
    for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
)


def state_of(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes(config).items()}


def held_by(config: ModelConfig, state: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """What each of `size` tensor-parallel ranks holds."""
    shards = [attrs.evolve(whole(config), tensor_rank=rank, tensor_size=size) for rank in range(size)]
    return [dict(to_megatron(config, state, shard)) for shard in shards]


def together(config: ModelConfig, pieces: list[tuple[Shard, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The whole state again."""
    shards = [shard for shard, _ in pieces]
    return dict(to_hugging_face(config, shards, lambda name, members: [pieces[index][1][name] for index in members]))


@ARCHITECTURES
@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("stages", [[range(2)], [range(1), range(1, 2)]], ids=["one stage", "two stages"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_shards_of_every_layout_make_up_the_whole(
    config: ModelConfig, tensor_size: int, stages: list[range], tie_embeddings: bool
) -> None:
    config = attrs.evolve(config, tie_embeddings=tie_embeddings)
    state = state_of(config)
    pieces = []
    for layers in stages:
        for rank in range(tensor_size):
            shard = Shard(
                layers=layers,
                has_embedding=layers is stages[0],
                has_output=layers is stages[-1],
                tensor_rank=rank,
                tensor_size=tensor_size,
            )
            pieces.append((shard, dict(to_megatron(config, state, shard))))
    back = together(config, pieces[::-1])
    assert list(back) == list(state)  # in order, whatever the shards' is
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name
    # A later stage counts its own layers from 0; a last stage of a tied model has a copy of the embedding.
    last = pieces[-1][1]
    assert {name.split(".")[2] for name in last if name.startswith("decoder.layers.")} == set("01"[: len(stages[-1])])
    assert ("output_layer.weight" in last) == (not tie_embeddings or len(stages) == 2)
    for wrong in (pieces[1:], pieces[:-1], [*pieces, pieces[0]]):
        with pytest.raises(ValueError, match="do not make up the whole model exactly once"):
            together(config, wrong)


@pytest.mark.parametrize(("name", "axis"), [(QKV, 0), (PROJ, 1), (FC2, 1), ("output_layer.weight", 0)])
def test_columns_and_rows_are_cut_as_megatron_cuts_them(name: str, axis: int) -> None:
    config = attrs.evolve(MODEL, tie_embeddings=False)
    state = state_of(config)
    full = dict(to_megatron(config, state, whole(config)))[name]
    for rank, held in enumerate(held_by(config, state, 2)):
        expected = torch.empty_like(held[name])
        _initialize_affine_weight_cpu(
            expected, *full.shape, full.shape[axis] // 2, axis, lambda made: made.copy_(full), rank=rank, world_size=2
        )
        assert torch.equal(held[name], expected)


def test_the_vocabulary_is_cut_as_megatron_cuts_it() -> None:
    state = state_of(MODEL)
    for rank, held in enumerate(held_by(MODEL, state, 2)):
        first, last = VocabUtility.vocab_range_from_global_vocab_size(MODEL.vocab_size, rank, 2)
        ours = held["embedding.word_embeddings.weight"]
        assert torch.equal(ours, state["model.embed_tokens.weight"][first:last])


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_a_vocabulary_that_ranks_do_not_divide_ends_with_zeros(tie_embeddings: bool) -> None:
    config = attrs.evolve(MODEL, vocab_size=13, num_query_groups=4, tie_embeddings=tie_embeddings)
    state = state_of(config)
    held = held_by(config, state, 4)
    for name, ours in (("model.embed_tokens.weight", "embedding.word_embeddings.weight"), ("lm_head.weight", OUTPUT)):
        if name in state:
            assert torch.equal(torch.cat([part[ours] for part in held])[:13], state[name])
            assert [len(part[ours]) for part in held] == [4] * 4
            assert not held[3][ours][1:].any()
    pieces = [attrs.evolve(whole(config), tensor_rank=rank, tensor_size=4) for rank in range(4)]
    back = together(config, list(zip(pieces, held, strict=True)))
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_gate_and_linear_half_lie_where_megatron_expects_them() -> None:
    """Megatron says at which place of the whole [gate; linear] each half of a rank's tensor belongs."""
    state = state_of(MODEL)
    expected = torch.cat([state[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    for rank, held in enumerate(held_by(MODEL, state, 2)):
        sharded = ShardedTensor.from_rank_offsets("fc1", held[FC1], (0, rank, 2))
        for half in apply_swiglu_sharded_factory(sharded, ()).build():
            start = half.global_offset[0]
            assert torch.equal(half.data, expected[start : start + half.local_shape[0]])


@pytest.mark.parametrize("config", [MODELS["qwen2"], attrs.evolve(MODEL, num_query_groups=4)], ids=["grouped", "not"])
def test_what_ranks_compute_adds_up_to_what_the_whole_computes(config: ModelConfig) -> None:
    """Attention and MLP of Hugging Face's tensors against the sum over ranks, each with whole groups of its own."""
    state, prefix = state_of(config), "model.layers.0."
    states = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(3))

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = [part.view(7, -1, config.kv_channels).transpose(0, 1) for part in (query, key, value)]
        return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)

    def projected(name: str) -> Tensor:
        bias = state.get(f"{prefix}self_attn.{name}.bias", torch.zeros(()))
        return states @ state[f"{prefix}self_attn.{name}.weight"].t() + bias

    attended = (
        attention(*map(projected, ("q_proj", "k_proj", "v_proj"))) @ state[f"{prefix}self_attn.o_proj.weight"].t()
    )
    gate, up, down = (state[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    activated = (silu(states @ gate.t()) * (states @ up.t())) @ down.t()

    attention_sum, mlp_sum = torch.zeros_like(attended), torch.zeros_like(activated)
    for held in held_by(config, state, 2):
        mixed = states @ held[QKV].t() + held.get(QKV.replace("weight", "bias"), torch.zeros(()))
        heads = config.num_attention_heads // config.num_query_groups
        groups = mixed.view(7, config.num_query_groups // 2, heads + 2, config.kv_channels)
        query, key, value = groups.split([heads, 1, 1], dim=2)  # Megatron's reading of its own layout
        attention_sum += attention(*(part.flatten(1) for part in (query, key, value))) @ held[PROJ].t()
        first, second = (states @ held[FC1].t()).chunk(2, dim=-1)
        mlp_sum += (silu(first) * second) @ held[FC2].t()
    torch.testing.assert_close(attention_sum, attended, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(mlp_sum, activated, atol=1e-3, rtol=1e-5)


def test_widths_that_ranks_cannot_share_are_refused() -> None:
    state = state_of(MODEL)
    with pytest.raises(ValueError, match="num_attention_heads 4 cannot be shared evenly by 3 tensor-parallel ranks"):
        held_by(MODEL, state, 3)
    with pytest.raises(ValueError, match="vocab_size 6 is too small for 4 tensor-parallel ranks"):
        held_by(attrs.evolve(MODEL, vocab_size=6), state, 4)  # 2 + 2 + 2 + 0
    held = held_by(attrs.evolve(MODEL, num_query_groups=1), state_of(attrs.evolve(MODEL, num_query_groups=1)), 2)
    assert held[0][QKV].shape[0] == (4 + 2) * MODEL.kv_channels // 2  # two ranks share a group, as Megatron has it
