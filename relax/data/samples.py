"""The records that move between rollout, rewards and training."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import attrs
import torch

from relax_core import Tokens

TokenIds = tuple[int, ...]


@attrs.frozen
class Completion:
    """One sampled response, as a rollout engine reports it.

    `token_ids` ends with an end-of-sequence id exactly when `finished`; `log_probs` has one entry per token, under
    the distribution that was sampled from (temperature included).
    """

    token_ids: TokenIds
    log_probs: tuple[float, ...]
    finished: bool


@attrs.frozen
class Sample:
    """One response to one prompt. Samples with the same `group` answer the same draw of the same prompt.

    `mask` says which response tokens are trained (None: all of them). `greedy_reward` is what the greedy response
    earned, where the algorithm reads that.
    """

    group: int
    prompt: Mapping[str, object]
    prompt_ids: TokenIds
    completion: Completion
    response: str
    rewards: Mapping[str, object] | None = None
    mask: tuple[bool, ...] | None = None
    greedy_reward: float | None = None

    @property
    def length(self) -> int:
        """Of the response, in tokens."""
        return len(self.completion.token_ids)


@attrs.frozen
class Sequences:
    """What a trainer consumes: prompts and responses as token ids, sample by sample.

    `masks` says which response tokens are trained (None: all of them).
    """

    prompts: tuple[TokenIds, ...]
    responses: tuple[TokenIds, ...]
    masks: tuple[tuple[bool, ...], ...] | None = None

    def __attrs_post_init__(self) -> None:
        if len(self.prompts) != len(self.responses):
            raise ValueError(f"{len(self.prompts)} prompts but {len(self.responses)} responses")
        for index, prompt in enumerate(self.prompts):
            if not prompt:
                raise ValueError(f"sample {index} has an empty prompt: a response needs at least one token before it")
        if self.masks is not None and [len(m) for m in self.masks] != [len(r) for r in self.responses]:
            raise ValueError("every mask must be as long as its response")

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def tokens(self) -> Tokens:
        """The response tokens of all samples, back to back."""
        lengths = torch.tensor([len(response) for response in self.responses], dtype=torch.int64)
        if self.masks is None:
            return Tokens.full(lengths)
        flat = [trained for mask in self.masks for trained in mask]
        return Tokens(lengths, torch.tensor(flat, dtype=torch.bool))

    @property
    def lengths(self) -> list[int]:
        """Of each sample, prompt and response together."""
        return [len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses, strict=True)]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and responses together."""
        return sum(self.lengths)

    def split(self, sizes: Sequence[int]) -> list["Sequences"]:
        """Consecutive parts of `sizes` samples."""
        return [self.select(stop - size, stop) for stop, size in zip(accumulate(sizes), sizes, strict=True)]

    def pick(self, places: Sequence[int]) -> "Sequences":
        """The samples at `places`, in that order."""
        masks = None if self.masks is None else tuple(self.masks[place] for place in places)
        prompts, responses = (tuple(part[place] for place in places) for part in (self.prompts, self.responses))
        return Sequences(prompts, responses, masks)

    def select(self, start: int, stop: int) -> "Sequences":
        """Samples `start` to `stop`."""
        masks = None if self.masks is None else self.masks[start:stop]
        return Sequences(self.prompts[start:stop], self.responses[start:stop], masks)
