"""Whole checkpoints in Hugging Face's format: sizes, weights, tokenizer with chat template, generation settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import attrs
import torch
from safetensors import SafetensorError
from torch import distributed

from relax.data.tokenizer import TextCodec, load_codec
from relax.errors import RelaxError
from relax.megatron.atomic import atomic_directory
from relax.megatron.hf.config import SPECIAL_TOKENS, ConfigFile, hf_config, read_config
from relax.megatron.hf.files import SafetensorsFiles, write
from relax.megatron.hf.shards import shapes
from relax.megatron.hf.weights import check_tied, misfits, stream
from relax.megatron.model import ModelConfig, PolicyModel

GENERATION: Final = "generation_config.json"
TOKENIZER: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a tokenizer has at least one of them
KEPT: Final = (
    *TOKENIZER,
    GENERATION,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)


@attrs.frozen
class Companions:
    """What an export has beside weights and sizes: `files` by name, ids in config.json, the weights' precision."""

    files: Mapping[str, bytes] = attrs.field(factory=dict, repr=False)
    special_tokens: Mapping[str, object] = attrs.field(factory=dict)
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, codec: TextCodec) -> "Companions":
        """Those of a model that is trained with this tokenizer, and came with none of its own."""
        ids = _special_tokens(codec)
        with TemporaryDirectory() as directory:
            codec.save(Path(directory))
            files = _read(Path(directory))
        return cls({**files, GENERATION: _generation(ids)}, ids)

    @classmethod
    def read(cls, directory: Path, config: ConfigFile, codec: TextCodec | None) -> "Companions":
        """Those of the checkpoint in `directory` with this config.json, whose precision they have, and tokenizer.

        Where it has no generation settings, they say what ends a response.
        """
        files = _read(directory)
        if codec is not None:
            files.setdefault(GENERATION, _generation(_special_tokens(codec)))
        return cls(files, config.special_tokens, config.dtype)


@attrs.frozen
class Pretrained:
    """A checkpoint that has been checked. `weights` are read when asked for; without a tokenizer `codec` is None."""

    config: ModelConfig
    weights: SafetensorsFiles
    codec: TextCodec | None
    companions: Companions


def read_pretrained(directory: Path) -> Pretrained:
    """The checkpoint in `directory`: Qwen3, Qwen2.5 or Llama, safetensors, one file or many.

    Raises RelaxError: one for a configuration we cannot compute, one that lists every tensor that is missing,
    unexpected or of the wrong shape, with its file, one for a tokenizer that does not belong to the model.
    """
    config = read_config(directory)
    weights = read_weights(directory, config.model)
    codec = load_codec(directory) if any((directory / name).is_file() for name in TOKENIZER) else None
    if codec is not None:
        check_vocabulary(config.model, codec)
    companions = attrs.evolve(Companions.read(directory, config, codec), dtype=weights.dtype)
    return Pretrained(config.model, weights, codec, companions)


def read_weights(directory: Path, config: ModelConfig) -> SafetensorsFiles:
    """The weights in `directory`, none of them read yet. Raises RelaxError that lists all in which they do not fit."""
    weights = SafetensorsFiles.of(directory)
    faults = [*weights.faults, *misfits(config, weights.shapes, weights.place)]
    if faults:
        raise RelaxError("\n".join((f"{directory}: these weights do not fit config.json:", *faults)))
    check_tied(config, weights)
    return weights


def check_vocabulary(config: ModelConfig, codec: TextCodec) -> None:
    """Raises RelaxError for a tokenizer with more tokens than the model; the model may well have more."""
    if codec.vocab_size > config.vocab_size:
        raise RelaxError(
            f"{codec.origin}: the tokenizer has {codec.vocab_size} tokens, but the model only {config.vocab_size} "
            "(vocab_size of config.json)"
        )


def save_pretrained(
    model: PolicyModel,
    config: ModelConfig,
    directory: Path,
    companions: Companions | None = None,
    *,
    max_shard_size: int = 5 * 10**9,
) -> None:
    """Writes `directory` anew, whole or not at all, for transformers' `from_pretrained(directory)`.

    Weights come in files of at most `max_shard_size` bytes. In a job of several ranks all of them must call this; one
    writes. Raises RelaxError on every rank where that fails.
    """
    beside = companions or Companions()
    weights = stream(model, config)
    failure: list[str | None] = [None]
    if distributed.get_rank() == 0:
        try:
            with atomic_directory(directory) as unfinished:
                hf_config(config, dtype=beside.dtype, special_tokens=beside.special_tokens).save_pretrained(unfinished)
                write(weights, shapes(config), unfinished, dtype=beside.dtype, max_shard_size=max_shard_size)
                for name, content in beside.files.items():
                    (unfinished / name).parent.mkdir(exist_ok=True)
                    (unfinished / name).write_bytes(content)
        except (OSError, SafetensorError) as error:
            failure = [f"{directory}: cannot be written: {error}"]
    for _ in weights:
        pass  # other ranks wait for this one until every tensor has passed
    distributed.broadcast_object_list(failure)
    if failure[0] is not None:
        raise RelaxError(failure[0])


def _special_tokens(codec: TextCodec) -> dict[str, object]:
    ids = {name: getattr(codec.tokenizer, name) for name in SPECIAL_TOKENS}
    return {**ids, "eos_token_id": codec.end if len(codec.ends) == 1 else list(codec.ends)}


def _generation(special_tokens: Mapping[str, object]) -> bytes:
    known = {name: value for name, value in special_tokens.items() if value is not None}
    return f"{json.dumps(known, indent=2)}\n".encode()


def _read(directory: Path) -> dict[str, bytes]:
    """The files that an export takes over as they are: kept in memory, since training takes days."""
    found = sorted(path for pattern in KEPT for path in directory.glob(pattern))
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}
