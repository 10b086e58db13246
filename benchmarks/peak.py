"""python -m benchmarks.peak: memory of a whole update at a large vocabulary, as the batch grows: chunks, or all logits.

"All logits" is the size of one float32 matrix of tokens x vocabulary; a plain loss holds two or three of them.
"""

import argparse
from collections.abc import Sequence

from benchmarks.measure import peak_memory
from benchmarks.training import GROUP, Work
from relax.megatron.batching import Batching
from relax.megatron.model import ModelConfig
from relax.megatron.runtime import megatron_process


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=151_936, help="size of the vocabulary")
    parser.add_argument("--prompts", type=int, nargs="+", default=[4, 8, 16, 32], help=f"of {GROUP} responses each")
    parser.add_argument("--response", type=int, default=64, help="tokens of the longest response")
    chosen = parser.parse_args(words)

    model = ModelConfig(vocab_size=chosen.words, num_layers=1, hidden_size=64, ffn_hidden_size=64, kv_channels=16)
    batching = Batching(micro_batch_size=GROUP * max(chosen.prompts))  # one micro-batch: the worst
    print(f"{'tokens':>8}{'update MiB':>12}{'all logits MiB':>16}")
    with megatron_process(0):
        for prompts in chosen.prompts:
            work = Work.draw(model, batching, prompts=prompts, prompt=8, response=chosen.response)
            work.step()  # the optimizer's state is there now
            tokens = work.batch.tokens.num_tokens
            print(f"{tokens:8}{peak_memory(work.step):12.0f}{4 * tokens * chosen.words / 2**20:16.0f}", flush=True)


if __name__ == "__main__":
    main()
