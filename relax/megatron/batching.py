"""How a batch is cut into micro-batches: memory and speed, never the result."""

from typing import Literal

import attrs

from relax.data.samples import Sequences

Format = Literal["bshd", "thd"]
"""Padded rows, or samples packed behind one another."""
Span = tuple[int, int]


@attrs.frozen(kw_only=True)
class Batching:
    """`micro_batch_size` samples at a time or, with `max_tokens_per_gpu`, as many as stay within that many tokens.

    Tokens are counted as they are laid out, padding included, and shared by the `context_ranks`. Samples stay in order.
    """

    micro_batch_size: int
    max_tokens_per_gpu: int | None = None
    qkv_format: Format = "bshd"

    def __attrs_post_init__(self) -> None:
        for name in ("micro_batch_size", "max_tokens_per_gpu"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def packed(self) -> bool:
        """Whether samples lie behind one another."""
        return self.qkv_format == "thd"

    def check(self, longest: int, context_ranks: int) -> None:
        """Raises ValueError where a sequence of `longest` tokens would not fit a micro-batch."""
        if self.max_tokens_per_gpu is not None and self.max_tokens_per_gpu * context_ranks < longest:
            ranks = f" on {context_ranks} context-parallel ranks" if context_ranks > 1 else ""
            raise ValueError(
                f"--max-tokens-per-gpu {self.max_tokens_per_gpu}{ranks}: a sequence may have {longest} tokens "
                "(--max-position-embeddings), which would not fit"
            )

    def spans(self, sequences: Sequences, context_ranks: int) -> list[Span]:
        """First sample and the one behind the last of each micro-batch; none where there is no sample."""
        if self.max_tokens_per_gpu is None:
            size = self.micro_batch_size
            return [(start, min(start + size, len(sequences))) for start in range(0, len(sequences), size)]
        budget = self.max_tokens_per_gpu * context_ranks
        spans, start, total, longest = [], 0, 0, 0
        for index, length in enumerate(sequences.lengths):
            total, longest = total + length, max(longest, length)
            taken = total if self.packed else longest * (index + 1 - start)
            if taken > budget and index > start:
                spans.append((start, index))
                start, total, longest = index, length, length
        return [*spans, (start, len(sequences))] if len(sequences) else spans
