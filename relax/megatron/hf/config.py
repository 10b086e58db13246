"""A model's architecture and sizes from and to transformers' config.json. What we cannot compute is refused by name."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from relax.errors import RelaxError
from relax.megatron.model import Architecture, ModelConfig
from relax.megatron.rope import LinearScaling, Llama3Scaling, RopeScaling

SPECIAL_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
PRECISIONS: Final = (torch.float32, torch.bfloat16, torch.float16)
TYPES: Final[Mapping[Architecture, type[transformers.PreTrainedConfig]]] = {
    "qwen3": transformers.Qwen3Config,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
}
CLASSES: Final[Mapping[Architecture, str]] = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}
SCALINGS: Final[Mapping[str, type[RopeScaling]]] = {"linear": LinearScaling, "llama3": Llama3Scaling}

# ModelConfig's name -> transformers'. RoPE's base and scaling, and the architecture, have forms of their own.
FIELDS: Final[Mapping[str, str]] = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}

# Fields of transformers that change what a model computes, and the values under which they do not.
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}


@attrs.frozen
class ConfigFile:
    """What a config.json says: the model, the ids of its special tokens, the precision of its weights (float32 where
    it names none that we write)."""

    model: ModelConfig
    special_tokens: Mapping[str, object]
    dtype: torch.dtype


def hf_config(
    config: ModelConfig, *, dtype: torch.dtype = torch.float32, special_tokens: Mapping[str, object] | None = None
) -> transformers.PreTrainedConfig:
    """The same model as a configuration of transformers; ids of `special_tokens` that are not given are None."""
    scaling = config.rope_scaling
    kind = {"rope_type": "default"} if scaling is None else {"rope_type": _name_of(scaling), **attrs.asdict(scaling)}
    return TYPES[config.architecture](
        architectures=[CLASSES[config.architecture]],
        rope_parameters={"rope_theta": config.rotary_base, **kind},
        dtype=str(dtype).removeprefix("torch."),
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        **{**dict.fromkeys(SPECIAL_TOKENS), **(special_tokens or {})},
    )


def read_config(directory: Path) -> ConfigFile:
    """What `directory`/config.json says.

    Raises RelaxError where there is none, or naming every field under which the model would compute something else
    than ours.
    """
    path = directory / "config.json"
    if not directory.is_dir():
        raise RelaxError(f"{directory}: no such directory")
    if not path.is_file():
        raise RelaxError(f"{directory}: holds no config.json, so it is no checkpoint in Hugging Face's format")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        kind = str(raw["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RelaxError(f"{path}: is no configuration of a model: {error!r}") from error
    architecture = next((name for name in TYPES if name == kind), None)
    if architecture is None:
        raise RelaxError(f"{path}: model_type {kind!r} is not supported; there are {', '.join(TYPES)}")
    try:
        theirs = TYPES[architecture].from_dict(raw)
        faults = list(_refusals(theirs))
    except (ValueError, KeyError, TypeError, ZeroDivisionError, StrictDataclassError) as error:
        raise RelaxError(f"{path}: transformers cannot read it: {error}") from error
    if faults:
        raise RelaxError(f"{path}: not supported: {'; '.join(faults)}")
    try:
        model = _model_config(architecture, theirs)
    except (ValueError, TypeError) as error:
        raise RelaxError(f"{path}: {error}") from error
    dtype = theirs.dtype if theirs.dtype in PRECISIONS else torch.float32
    return ConfigFile(model, {name: getattr(theirs, name, None) for name in SPECIAL_TOKENS}, dtype)


def _model_config(architecture: Architecture, theirs: Any) -> ModelConfig:
    values: dict[str, Any] = {ours: getattr(theirs, name, None) for ours, name in FIELDS.items()}
    if values["kv_channels"] is None:
        values["kv_channels"] = theirs.hidden_size // theirs.num_attention_heads
    return ModelConfig(
        **values,
        architecture=architecture,
        rotary_base=float(theirs.rope_parameters["rope_theta"]),
        rope_scaling=_scaling(theirs.rope_parameters),
    )


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = SCALINGS.get(rope["rope_type"])
    return None if kind is None else kind(**{field.name: rope[field.name] for field in attrs.fields(kind)})


def _refusals(theirs: Any) -> Iterator[str]:
    for name, allowed in NEUTRAL.items():
        value = getattr(theirs, name, allowed[0])
        if value not in allowed:
            yield f"{name} {value!r} (only {allowed[0]!r})"
    kinds = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None)
    if kinds is None and window is not None:
        yield f"sliding_window {window} (only None)"
    for kind in sorted(set(kinds or ()) - {"full_attention"}):
        yield f"layer_types {kind!r} (only 'full_attention'; sliding_window is {window})"
    rope = theirs.rope_parameters
    if rope["rope_type"] not in ("default", *SCALINGS):
        yield f"rope_type {rope['rope_type']!r} (only default, {', '.join(SCALINGS)})"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor {rope['partial_rotary_factor']} (only 1.0)"


def _name_of(scaling: RopeScaling) -> str:
    return next(name for name, kind in SCALINGS.items() if isinstance(scaling, kind))
