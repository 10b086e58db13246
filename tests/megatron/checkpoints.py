"""Checkpoints with random weights, made by transformers alone."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from relax.megatron import hf
from relax.megatron.trainer import Trainer

VOCABULARY = 301
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}
# What each is called in a test's name: the class of transformers, and what differs from `SIZES`.
CHECKPOINTS: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, object]]] = {
    "qwen3": (transformers.Qwen3Config, {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3-untied": (transformers.Qwen3Config, {"head_dim": 8, "rms_norm_eps": 1e-3, "rope_parameters": LINEAR}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-untied": (transformers.Qwen2Config, {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "llama": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-tied": (
        transformers.LlamaConfig,
        {"head_dim": 12, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_parameters": LINEAR},
    ),
}


def make(
    directory: Path, name: str, *, max_shard_size: str = "5GB", dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    """Writes the checkpoint `name` into `directory`; the model it was made of."""
    kind, changes = CHECKPOINTS[name]
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SIZES, **changes}), dtype=dtype)
    with torch.no_grad():  # transformers starts biases at 0 and norms at 1, which hides faults
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.3) + (parameter == 1))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model.eval()


def edit_config(directory: Path, **changes: object) -> None:
    """Changes fields of config.json; None removes one."""
    path = directory / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def tokenizer(**settings: object) -> transformers.PreTrainedTokenizerFast:
    """A small byte-level BPE, as these models have, with a chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(["the theory of the thing is this", "then there were three"], trainer)
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    words = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": template}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **{**words, **settings})


def trainer_of(pretrained: hf.Pretrained, make_trainer: Callable[..., Trainer]) -> Trainer:
    """A trainer that starts from a checkpoint."""
    trainer = make_trainer(pretrained.config, reference=True)
    trainer.start_from(pretrained.weights)
    return trainer
