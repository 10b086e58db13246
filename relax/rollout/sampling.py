"""Prompts in, samples out: the part that training, evaluation and `relax sample` share."""

from collections.abc import Sequence

import attrs

from relax.data.prompts import Record, Worded
from relax.data.samples import Sample, TokenIds
from relax.data.tokenizer import TextCodec
from relax.data.wording import asked
from relax.errors import RelaxError
from relax.rollout.engine import Engine

Group = tuple[Sample, ...]


@attrs.frozen
class Prompts:
    """Records and the token ids of their prompts."""

    records: tuple[Record, ...]
    ids: tuple[TokenIds, ...]

    @classmethod
    def encode(cls, prompts: Sequence[Worded], key: str, codec: TextCodec, longest: int) -> "Prompts":
        """Encode the text under `key` of every prompt.

        Errors: `RelaxError` naming the prompt that has more than `longest` tokens or cannot be encoded.
        """
        found = codec.encode_all([prompt.texts[key] for prompt in prompts])
        for prompt, ids in zip(prompts, found, strict=True):
            if len(ids) > longest:
                raise RelaxError(
                    f"prompt {asked(prompt.record[key])[:60]!r} has {len(ids)} tokens; --max-position-embeddings less "
                    f"--rollout-max-response-len leaves room for {longest}"
                )
        return cls(tuple(prompt.record for prompt in prompts), found)

    def take(self, indices: Sequence[int]) -> "Prompts":
        """The prompts at `indices`, in that order."""
        return Prompts(tuple(self.records[i] for i in indices), tuple(self.ids[i] for i in indices))


@attrs.frozen
class Sampler:
    """An engine, the tokenizer that reads its output, and how it samples (temperature 0: greedily)."""

    engine: Engine
    codec: TextCodec
    max_new_tokens: int

    def respond(
        self, prompts: Prompts, *, n: int, temperature: float, seeds: Sequence[int], first_group: int = 0
    ) -> list[Group]:
        """`n` samples for each prompt, as one group each, not yet rewarded. What they are follows from its seed."""
        completions = self.engine.generate(
            prompts.ids, n=n, max_new_tokens=self.max_new_tokens, temperature=temperature, seeds=seeds
        )
        return [
            tuple(
                Sample(first_group + offset, dict(record), ids, completion, self.codec.decode(completion.token_ids))
                for completion in answers
            )
            for offset, (record, ids, answers) in enumerate(zip(prompts.records, prompts.ids, completions, strict=True))
        ]

    def best(self, prompts: Prompts, first_group: int = 0) -> list[Group]:
        """The greedy sample for each prompt, as a group of its own."""
        return self.respond(prompts, n=1, temperature=0.0, seeds=[0] * len(prompts.ids), first_group=first_group)
