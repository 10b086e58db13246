"""Hugging Face checkpoints in and out: Qwen3, Qwen2.5 and Llama."""

from relax.megatron.hf.config import hf_config
from relax.megatron.hf.pretrained import Companions, Pretrained, read_pretrained, save_pretrained
from relax.megatron.hf.weights import export, load

__all__ = ["Companions", "Pretrained", "export", "hf_config", "load", "read_pretrained", "save_pretrained"]
