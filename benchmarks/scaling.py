"""Nanoseconds a token as the batch grows: flat lines are linear cost.

The last column is one product of two tensors: what new memory costs on this machine. Beyond the caches, and where the
kernel hands out pages of 4 KiB, that grows more than anything here; `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` asks for
large ones.
"""

from collections.abc import Callable

from torch import Tensor

from benchmarks.cases import Batch, gradient, own_loss
from benchmarks.measure import cost_of
from relax_core import pipeline
from relax_core.advantages import broadcast, gae, whiten
from relax_core.rewards import group_mean_std

LENGTH = 512
"""The mean length of a response."""


def functions(batch: Batch) -> dict[str, Callable[[], Tensor]]:
    tokens, gdpo = batch.tokens, pipeline("gdpo")
    scalar = batch.components[:, 0].contiguous()
    loss = own_loss("ppo_clip", batch)
    return {
        "whitening over tokens": lambda: whiten(batch.rewards, tokens),
        "gae": lambda: gae(batch.rewards, batch.values, tokens, gamma=0.99, lambd=0.95).advantages,
        "gdpo": lambda: gdpo.advantages(gdpo.scores(batch.components, batch.groups), tokens).advantages,
        "group mean/std": lambda: broadcast(group_mean_std(scalar, batch.groups), tokens),
        "ppo_clip, f + b": lambda: gradient(loss, batch.new),
        "torch: x * y": lambda: batch.rewards * batch.values,
    }


def show(sizes: list[int], rounds: int) -> None:
    """One line for each size, in tokens."""
    print(f"\n{'ns a token':>14}", end="")
    for index, size in enumerate(sizes):
        batch = Batch.draw(8 * max(1, round(size / LENGTH / 8)), 2 * LENGTH - 1)
        work = functions(batch)
        if not index:
            print("".join(f"{name:>24}" for name in work))
        costs = (cost_of([call], rounds, memory=False)[0] for call in work.values())
        print(f"{batch.tokens.num_tokens:14,}", end="")
        print("".join(f"{1e6 * cost.best / batch.tokens.num_tokens:24.2f}" for cost in costs), flush=True)
