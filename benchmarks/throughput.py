"""python -m benchmarks.throughput: tokens a second that a training step takes in, and its share of the GPU's peak.

The model is of Qwen3-0.6B's shape with random weights, in bfloat16; --tiny is for a CPU, to see that it runs.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Final

import attrs
import torch

from benchmarks.training import Work
from relax.data.samples import Sequences
from relax.megatron.batching import Batching
from relax.megatron.model import ModelConfig
from relax.megatron.runtime import megatron_process

QWEN3_0_6B: Final = ModelConfig(
    vocab_size=151_936,
    num_layers=28,
    hidden_size=1024,
    num_attention_heads=16,
    num_query_groups=8,
    ffn_hidden_size=3072,
    kv_channels=128,
    max_position_embeddings=4096,
    rotary_base=1e6,
    bf16=True,
)
TINY: Final = ModelConfig(vocab_size=512, num_layers=2, max_position_embeddings=4096, bf16=True)
PEAKS: Final = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0}
"""Dense bfloat16 TFLOP/s of NVIDIA's data sheets (SXM where there are several), by a part of the device's name."""


def flops(model: ModelConfig, sequences: Sequences) -> float:
    """Floating point operations of a step: two for each multiply-add, the backward pass twice the forward one.

    Counted are the matrix products that the loss needs, each sample for itself: nothing for activations computed again
    or for padding, the output layer only at tokens of responses, and half of the scores, since attention is causal.
    """
    queries, keys = (heads * model.kv_channels for heads in (model.num_attention_heads, model.num_query_groups))
    layer = model.hidden_size * (2 * queries + 2 * keys + 3 * model.ffn_hidden_size)
    fed = [length - 1 for length in sequences.lengths]
    products = model.num_layers * (layer * sum(fed) + queries * sum(length**2 for length in fed))
    products += model.hidden_size * model.vocab_size * sum(map(len, sequences.responses))
    return 3.0 * 2.0 * products


def peak() -> float | None:
    """TFLOP/s of this process's GPU, where it is known."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_name()
    return next((value for name, value in PEAKS.items() if name in device), None)


def seconds_of_steps(work: Work, steps: int) -> list[float]:
    """Duration of each of `steps` steps, after one that is not counted."""
    found = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        work.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found[1:]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model of 2 layers instead")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step, 8 responses each")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=1024, help="tokens of the longest response")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=16_384, help="tokens of a micro-batch")
    parser.add_argument("--qkv-format", choices=("bshd", "thd"), default="thd")
    parser.add_argument("--transformer-impl", choices=("local", "transformer_engine"), default="local")
    parser.add_argument("--recompute-activations", action="store_true")
    parser.add_argument("--steps", type=int, default=5, help="steps to measure")
    chosen = parser.parse_args(words)

    model = attrs.evolve(
        TINY if chosen.tiny else QWEN3_0_6B,
        transformer_impl=chosen.transformer_impl,
        recompute_activations=chosen.recompute_activations,
    )
    batching = Batching(micro_batch_size=1, max_tokens_per_gpu=chosen.max_tokens_per_gpu, qkv_format=chosen.qkv_format)
    with megatron_process(0):
        work = Work.draw(model, batching, prompts=chosen.prompts, prompt=chosen.prompt, response=chosen.response)
        seconds = median(seconds_of_steps(work, chosen.steps))
    sequences = work.batch.sequences
    tokens, rate, most = sequences.num_tokens, flops(model, sequences) / seconds / 1e12, peak()
    share = "no known peak to compare with" if most is None else f"{rate / most:.1%} of the peak of {most:.0f}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"{device}, {chosen.transformer_impl}, {chosen.qkv_format}: {len(sequences)} samples, {tokens:,} tokens a step"
    )
    print(f"{seconds:.3f} s a step, {tokens / seconds:,.0f} tokens/s, {rate:.3g} TFLOP/s: {share}")


if __name__ == "__main__":
    main()
