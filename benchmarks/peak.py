"""python -m benchmarks.peak: memory of a whole update at a large vocabulary, as the batch grows: chunks, or all logits.

Every size is a process of its own. What counts is the peak of its resident memory above that before the update. "All
logits" is the size of one float32 matrix of tokens x vocabulary; a plain loss holds two or three of them.
"""

import argparse
import resource
import subprocess
import sys

from benchmarks.training import GROUP, Work
from relax.megatron.batching import Batching
from relax.megatron.model import ModelConfig
from relax.megatron.runtime import megatron_process

MIB = 2**20


def resident() -> int:
    """Most bytes that this process has held so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def grown(prompts: int, response: int, words: int) -> tuple[int, int]:
    """Response tokens of the batch, and bytes by which one update of it raises the peak of this process."""
    model = ModelConfig(vocab_size=words, num_layers=1, hidden_size=64, ffn_hidden_size=64, kv_channels=16)
    batching = Batching(micro_batch_size=prompts * GROUP)  # one micro-batch: the worst
    with megatron_process(0):
        small = Work.draw(model, batching, prompts=1, prompt=8, response=4)
        small.step()  # gradients and the optimizer's state are there now
        batch = Work.draw(model, batching, prompts=prompts, prompt=8, response=response).batch
        before = resident()
        Work(small.trainer, small.objective, batch).step()
        return batch.tokens.num_tokens, resident() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=151_936, help="size of the vocabulary")
    parser.add_argument("--prompts", type=int, nargs="+", default=[4, 8, 16, 32], help=f"of {GROUP} responses each")
    parser.add_argument("--response", type=int, default=64, help="tokens of the longest response")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        print(*grown(chosen.prompts[0], chosen.response, chosen.words))
        return
    print(f"{'tokens':>8}{'update MiB':>12}{'all logits MiB':>16}")
    for prompts in chosen.prompts:
        words = ("--alone", "--prompts", prompts, "--response", chosen.response, "--words", chosen.words)
        told = subprocess.check_output([sys.executable, "-m", "benchmarks.peak", *map(str, words)], text=True)
        tokens, peak = map(int, told.splitlines()[-1].split())
        print(f"{tokens:8}{peak / MIB:12.0f}{4 * tokens * chosen.words / MIB:16.0f}", flush=True)


if __name__ == "__main__":
    main()
