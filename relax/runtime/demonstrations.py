"""Demonstrations for SFT, batch by batch."""

from pathlib import Path

import attrs

from relax.data.prompts import DrawOrder, read_records
from relax.data.samples import Sequences
from relax.data.tokenizer import TextCodec
from relax.data.wording import Wording, as_it_stands
from relax.errors import RelaxError


@attrs.frozen
class Demonstrations:
    """Prompts with the responses to imitate, each ended by the end-of-sequence token."""

    sequences: Sequences
    batch_size: int
    order: DrawOrder

    @classmethod
    def read(
        cls,
        path: Path,
        input_key: str,
        wording: Wording,
        codec: TextCodec,
        batch_size: int,
        longest: int,
        seed: int,
    ) -> "Demonstrations":
        """Read JSON lines with a prompt under `input_key`, worded by `wording`, and a `response`.

        Errors: `RelaxError` naming file, line and key, or the demonstration with more than `longest` tokens.
        """
        records = read_records(path, {input_key: wording, "response": as_it_stands})
        prompts = codec.encode_all([record.texts[input_key] for record in records])
        answers = codec.encode_all([record.texts["response"] for record in records])
        responses = tuple((*answer, codec.end) for answer in answers)
        for record, prompt, response in zip(records, prompts, responses, strict=True):
            if len(prompt) + len(response) > longest:
                raise RelaxError(
                    f"{path}: the demonstration {record.texts['response'][:60]!r} has {len(prompt) + len(response)} "
                    f"tokens with its prompt; --max-position-embeddings allows {longest}"
                )
        return cls(Sequences(prompts, responses), batch_size, DrawOrder(len(records), seed, "demonstrations"))

    def batch(self, step: int) -> Sequences:
        """The demonstrations of the SFT step `step`, counted from 0."""
        drawn = self.order.take(step * self.batch_size, self.batch_size)
        return Sequences(
            tuple(self.sequences.prompts[i] for i in drawn), tuple(self.sequences.responses[i] for i in drawn)
        )
