"""Hugging Face's Qwen3 weights from Megatron's, and back, in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from relax.errors import RelaxError
from relax.megatron.atomic import atomic_directory
from relax.megatron.model import ModelConfig, PolicyModel


@attrs.frozen
class _Rule:
    """One Megatron tensor and the Hugging Face tensors it is made of, in order along the first axis."""

    megatron: str
    hugging_face: tuple[str, ...]
    split: Callable[[ModelConfig, Tensor], Sequence[Tensor]] = lambda _, whole: (whole,)
    join: Callable[[ModelConfig, Sequence[Tensor]], Tensor] = lambda _, parts: parts[0]


def _split_qkv(config: ModelConfig, whole: Tensor) -> Sequence[Tensor]:
    # Megatron keeps each group's queries next to its key and its value: q q k v | q q k v | ...
    heads = config.num_attention_heads // config.num_query_groups
    grouped = whole.view(config.num_query_groups, heads + 2, config.kv_channels, config.hidden_size)
    parts = torch.split(grouped, [heads, 1, 1], dim=1)
    return [part.reshape(-1, config.hidden_size) for part in parts]


def _join_qkv(config: ModelConfig, parts: Sequence[Tensor]) -> Tensor:
    grouped = [part.reshape(config.num_query_groups, -1, config.hidden_size) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, config.hidden_size)


def _rules(config: ModelConfig) -> Iterator[_Rule]:
    yield _Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    for index in range(config.num_layers):
        ours, theirs = f"decoder.layers.{index}.", f"model.layers.{index}."
        attention = f"{theirs}self_attn."
        yield _Rule(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",))
        yield _Rule(
            f"{ours}self_attention.linear_qkv.weight",
            (f"{attention}q_proj.weight", f"{attention}k_proj.weight", f"{attention}v_proj.weight"),
            _split_qkv,
            _join_qkv,
        )
        yield _Rule(f"{ours}self_attention.q_layernorm.weight", (f"{attention}q_norm.weight",))
        yield _Rule(f"{ours}self_attention.k_layernorm.weight", (f"{attention}k_norm.weight",))
        yield _Rule(f"{ours}self_attention.linear_proj.weight", (f"{attention}o_proj.weight",))
        yield _Rule(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight",))
        yield _Rule(
            f"{ours}mlp.linear_fc1.weight",
            (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight"),
            lambda _, whole: whole.chunk(2),
            lambda _, parts: torch.cat(tuple(parts)),
        )
        yield _Rule(f"{ours}mlp.linear_fc2.weight", (f"{theirs}mlp.down_proj.weight",))
    yield _Rule("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not config.tie_embeddings:
        yield _Rule("output_layer.weight", ("lm_head.weight",))


def export(model: PolicyModel, config: ModelConfig) -> dict[str, Tensor]:
    """The weights of `model` under Hugging Face's names, without a copy of a tied output layer.

    Detached, and partly views into the model: clone what must outlive the next optimizer step.
    """
    weights = dict(model.named_parameters())
    return {
        name: part.detach()
        for rule in _rules(config)
        for name, part in zip(rule.hugging_face, rule.split(config, weights[rule.megatron]), strict=True)
    }


@torch.no_grad()
def load(model: PolicyModel, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Writes Hugging Face weights into `model`, in the model's own precision.

    Raises RelaxError that lists every missing tensor, every unexpected one and every wrong shape; the model is then
    unchanged. A tied output layer may be among them if it equals the embedding.
    """
    shapes = {name: tuple(part.shape) for name, part in export(model, config).items()}
    given = dict(state)
    if config.tie_embeddings and "lm_head.weight" in given:
        head = given.pop("lm_head.weight")
        if not torch.equal(head, given.get("model.embed_tokens.weight", head)):
            raise RelaxError("lm_head.weight differs from model.embed_tokens.weight, but tie_embeddings is set")
    faults = [f"missing {name}" for name in shapes if name not in given]
    faults += [f"unexpected {name}" for name in given if name not in shapes]
    faults += [
        f"{name} has shape {tuple(given[name].shape)}, expected {shape}"
        for name, shape in shapes.items()
        if name in given and tuple(given[name].shape) != shape
    ]
    if faults:
        raise RelaxError("these weights do not fit the model: " + "; ".join(faults))
    weights = dict(model.named_parameters())
    for rule in _rules(config):
        weights[rule.megatron].copy_(rule.join(config, [given[name] for name in rule.hugging_face]))


def hf_config(config: ModelConfig) -> transformers.Qwen3Config:
    """The same model as a configuration of transformers."""
    return transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.rotary_base},
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )


def save_pretrained(model: PolicyModel, config: ModelConfig, directory: Path) -> None:
    """Writes `directory` anew, whole or not at all, for `AutoModelForCausalLM.from_pretrained(directory)`."""
    with atomic_directory(directory) as unfinished:
        hf_config(config).save_pretrained(unfinished)
        state = {name: part.contiguous() for name, part in export(model, config).items()}
        save_file(state, unfinished / "model.safetensors", metadata={"format": "pt"})
