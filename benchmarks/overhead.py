"""python -m benchmarks.overhead: the share of a training step that micro-batches cost outside the model's arithmetic.

Ours are the cutting and building of micro-batches, moving them, the loss of their log-probs, metrics and the look at
the gradient. Not ours are forward and backward passes (log-probs from hidden states included), the optimizer and
Megatron's schedule. Without a GPU, Megatron's torch calls pass a mode that reads "cuda" as the CPU; what that costs
lies within Megatron's time and is estimated, from the number of calls and the cost of one.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks.training import GROUP, Work
from relax.megatron import learner, shim
from relax.megatron.batching import Batching
from relax.megatron.model import ModelConfig
from relax.megatron.runtime import megatron_process


class Turns:
    """Seconds of each part, of which one has its turn at a time: who calls another waits for its end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._waiting: list[str] = []
        self._since = 0.0

    def _change(self) -> None:
        now = time.perf_counter()
        if self._waiting:
            self.seconds[self._waiting[-1]] = self.seconds.get(self._waiting[-1], 0.0) + now - self._since
        self._since = now

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time counted as `part`'s."""

        def timed(*args: object, **kwargs: object) -> object:
            self._change()
            self._waiting.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._change()
                self._waiting.pop()

        return timed


def watched(work: Work) -> dict[str, float]:
    """Seconds of `relax` and of `megatron` in a step."""
    turns, trainer = Turns(), work.trainer
    original = learner.get_forward_backward_func()

    def schedule(*, forward_step_func: Callable[..., Any], **rest: object) -> object:
        def forward_step(*args: object) -> tuple[object, Callable[..., Any]]:
            output, reduce = forward_step_func(*args)
            return output, turns.of("relax", reduce)

        return turns.of("megatron", original)(forward_step_func=turns.of("relax", forward_step), **rest)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(learner, "get_forward_backward_func", return_value=schedule))
        for owner, name in (
            (trainer._ddp, "forward"),
            (trainer._ddp, "zero_grad_buffer"),
            (trainer._optimizer, "zero_grad"),
            (trainer._optimizer, "step"),
            (trainer._scheduler, "step"),
        ):
            patches.enter_context(mock.patch.object(owner, name, turns.of("megatron", getattr(owner, name))))
        turns.of("relax", work.step)()
    return turns.seconds


def mode_seconds(work: Work) -> float:
    """What the mode costs a step, about: its calls, at the price that it adds to a call that does next to nothing."""
    if torch.cuda.is_available():
        return 0.0
    calls, original = 0, shim._CpuForCuda.__torch_function__

    def counted(*args: Any, **kwargs: Any) -> object:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    with mock.patch.object(shim._CpuForCuda, "__torch_function__", counted):
        work.step()
    tensor, count = torch.zeros(()), 10_000

    def cheap() -> float:
        start = time.perf_counter()
        for _ in range(count):
            tensor.size()
        return time.perf_counter() - start

    plain = min(cheap() for _ in range(5))
    with shim.cpu_for_cuda():
        return calls * (min(cheap() for _ in range(5)) - plain) / count


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help=f"prompts of a step, {GROUP} responses each")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of the longest response")
    parser.add_argument("--micro-batch-sizes", type=int, nargs="+", default=[1, 4, 16], help="samples of a micro-batch")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each, of which the median counts")
    chosen = parser.parse_args(words)

    print(f"{'':16}{'micro-batches':>15}{'step ms':>10}{'relax ms':>10}{'share':>8}{'mode ms':>10}{'share':>8}")
    with megatron_process(0):
        for size in chosen.micro_batch_sizes:
            for name in ("bshd", "thd"):
                batching = Batching(micro_batch_size=size, qkv_format=name)
                work = Work.draw(
                    ModelConfig(vocab_size=512),
                    batching,
                    prompts=chosen.prompts,
                    prompt=chosen.prompt,
                    response=chosen.response,
                )
                work.step()
                rounds = [watched(work) for _ in range(chosen.rounds)]
                whole, ours = median(sum(each.values()) for each in rounds), median(each["relax"] for each in rounds)
                share = median(each["relax"] / sum(each.values()) for each in rounds)
                mode = mode_seconds(work)
                count = -(-len(work.batch.sequences) // size)
                print(
                    f"{name + ' of ' + str(size):16}{count:15}{1e3 * whole:10.1f}{1e3 * ours:10.1f}{share:8.1%}"
                    f"{1e3 * mode:10.1f}{mode / whole:8.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
