"""Samples, and an engine that says what it is told to."""

from collections.abc import Callable, Mapping, Sequence

from relax.data.samples import Completion, Sample
from relax.data.tokenizer import TextCodec


def sample(group: int, rewards: Mapping[str, object] | None = None, length: int = 2, log_prob: float = -1.0) -> Sample:
    """A response of `length` tokens in a group."""
    completion = Completion((7,) * length, (log_prob,) * length, False)
    return Sample(group, {"prompt": f"prompt {group}"}, (5, 6), completion, "x" * length, rewards)


class ScriptedEngine:
    """Answers the prompt at draw d with `answer(d, i)` for its i-th response; notes how often it was asked for what."""

    def __init__(self, codec: TextCodec, answer: Callable[[int, int], str]) -> None:
        self.codec = codec
        self.answer = answer
        self.asked: list[int] = []

    def update_weights(self, trainer: object) -> None:
        raise AssertionError("nothing here has weights")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        max_new_tokens: int,
        temperature: float,
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        drawn = sum(self.asked)
        self.asked.append(len(prompts))
        return [[self._completion(drawn + at, i) for i in range(n)] for at in range(len(prompts))]

    def _completion(self, draw: int, index: int) -> Completion:
        ids = (*self.codec.encode(self.answer(draw, index)), self.codec.end)
        return Completion(ids, (-1.0,) * len(ids), True)
