"""Hugging Face checkpoints in and out: Qwen3, Qwen2.5 and Llama."""

from relax.megatron.hf.config import hf_config, read_config
from relax.megatron.hf.files import SafetensorsFiles
from relax.megatron.hf.pretrained import (
    Companions,
    Pretrained,
    check_vocabulary,
    read_pretrained,
    read_weights,
    save_pretrained,
)
from relax.megatron.hf.weights import export, load

__all__ = [
    "Companions",
    "Pretrained",
    "SafetensorsFiles",
    "check_vocabulary",
    "export",
    "hf_config",
    "load",
    "read_config",
    "read_pretrained",
    "read_weights",
    "save_pretrained",
]
