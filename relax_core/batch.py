"""Which tokens belong to which response, and which of them count: ragged batches without padding."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import attrs
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from relax_core.checks import checked, checked_record


@checked_record
@attrs.frozen(eq=False)
class Tokens:
    """The response tokens of all samples, back to back.

    Attributes:
        lengths: tokens of each response, masked ones included; 0 is a response without tokens.
        mask: True where a token counts; False for tool output, observations and the like.

    Raises:
        ValueError: a negative length, or lengths that do not add up to the mask's.
    """

    lengths: Int[Tensor, " samples"]
    mask: Bool[Tensor, " tokens"]

    def __attrs_post_init__(self) -> None:
        total, least = self.offsets[-1], min(self._lengths, default=0)
        if least < 0:
            raise ValueError(f"sample {self._lengths.index(least)} has {least} tokens; a length is 0 or more")
        if total != self.mask.shape[0]:
            raise ValueError(f"lengths add up to {total} tokens, but the mask has {self.mask.shape[0]}")

    @classmethod
    def full(cls, lengths: Tensor | Sequence[int]) -> "Tokens":
        """Responses of these lengths in which every token counts."""
        lengths = torch.as_tensor(lengths, dtype=torch.long)
        return cls(lengths, torch.ones(int(lengths.sum()), dtype=torch.bool, device=lengths.device))

    @cached_property
    def _lengths(self) -> list[int]:
        return [int(length) for length in self.lengths.tolist()]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each response begins on the token axis, and where the last one ends: samples + 1 numbers."""
        return tuple(accumulate(self._lengths, initial=0))

    @property
    def num_samples(self) -> int:
        """How many responses there are."""
        return self.lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        """How many tokens all responses have together, masked ones included."""
        return self.mask.shape[0]

    @cached_property
    def sample_of(self) -> Int[Tensor, " tokens"]:
        """The sample that each token belongs to."""
        samples = torch.arange(self.num_samples, device=self.mask.device)
        return samples.repeat_interleave(self.lengths.to(self.mask.device), output_size=self.num_tokens)

    @cached_property
    def position(self) -> Int[Tensor, " tokens"]:
        """Each token's place in its own response, from 0."""
        starts = torch.tensor(self.offsets[:-1], dtype=torch.long, device=self.mask.device)
        return torch.arange(self.num_tokens, device=self.mask.device) - starts[self.sample_of]

    @cached_property
    def valid(self) -> Int[Tensor, " samples"]:
        """How many tokens of each response count."""
        return torch.zeros_like(self.lengths, device=self.mask.device, dtype=torch.long).index_add(
            0, self.sample_of, self.mask.long()
        )

    @cached_property
    def valid_after(self) -> Int[Tensor, " tokens"]:
        """How many tokens that count follow each token in its own response."""
        counted = self.mask.long().cumsum(0)
        ends = torch.tensor(self.offsets[1:], dtype=torch.long, device=self.mask.device)
        return counted[ends[self.sample_of] - 1] - counted

    @cached_property
    def all_valid(self) -> bool:
        """Does every token count?"""
        return bool(self.mask.all())

    @property
    def known_all_valid(self) -> bool:
        """Is it known that every token counts? Not while tracing: a trace must not depend on what a mask holds."""
        return not torch.compiler.is_compiling() and self.all_valid

    def counted(self, values: Shaped[Tensor, " tokens"]) -> Shaped[Tensor, " tokens"]:
        """The values of tokens that count, 0 elsewhere. What is left out has a gradient of exactly 0."""
        return values if self.known_all_valid else torch.where(self.mask, values, 0.0)

    def only_valid(self, values: Shaped[Tensor, " tokens"]) -> Shaped[Tensor, " valid"]:
        """The values of tokens that count, back to back; `valid` tells how many each response has."""
        return values if self.all_valid else values.masked_select(self.mask)

    def with_zeros(self, values: Shaped[Tensor, " valid"]) -> Shaped[Tensor, " tokens"]:
        """The inverse of `only_valid`: tokens that do not count get 0."""
        if self.all_valid:
            return values
        return values.new_zeros(self.num_tokens).masked_scatter(self.mask, values)

    def per_token(self, values: Shaped[Tensor, " samples"]) -> Shaped[Tensor, " tokens"]:
        """Each token's sample's value; gradients of a sample's tokens add up."""
        return values.index_select(0, self.sample_of)

    def sample_mean(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " samples"]:
        """The mean of each response's values over its tokens that count, summed in float64; 0 where none does.

        Masked values must be 0 already, so that their gradient is, too.
        """
        sums = values.new_zeros(self.num_samples, dtype=torch.float64).index_add(0, self.sample_of, values.double())
        return (sums / self.valid.clamp(min=1)).to(values.dtype)

    def token_slice(self, start: int, stop: int) -> slice:
        """The part of the token axis that samples start..stop (stop excluded) occupy."""
        if not 0 <= start <= stop <= self.num_samples:
            raise ValueError(f"samples {start}..{stop} are not within the batch's {self.num_samples}")
        return slice(self.offsets[start], self.offsets[stop])

    def select(self, start: int, stop: int) -> "Tokens":
        """The tokens of samples start..stop (stop excluded), as a micro-batch takes them."""
        return Tokens(self.lengths[start:stop], self.mask[self.token_slice(start, stop)])

    @checked
    def to_padded(self, values: Shaped[Tensor, " tokens"], fill: float = 0.0) -> Shaped[Tensor, "samples time"]:
        """Right-padded rows, `fill` beyond each response's end; time is the longest response's length."""
        self.expect_tokens(values)
        padded = values.new_full((self.num_samples, max(self._lengths, default=0)), fill)
        return padded.index_put((self.sample_of, self.position), values)

    @checked
    def from_padded(self, values: Shaped[Tensor, "samples time"]) -> Shaped[Tensor, " tokens"]:
        """The inverse of `to_padded`: what lies beyond a response's end is dropped, whatever it is.

        Raises:
            ValueError: another number of rows than samples, or rows shorter than the longest response.
        """
        rows, time = values.shape
        if rows != self.num_samples or time < max(self._lengths, default=0):
            raise ValueError(
                f"padded values are {rows} x {time}, but the batch has {self.num_samples} samples "
                f"of up to {max(self._lengths, default=0)} tokens"
            )
        return values[self.sample_of, self.position]

    def expect_tokens(self, values: Tensor) -> None:
        """Raise a ValueError unless there is one value for each token."""
        if values.shape[:1] != self.mask.shape:
            raise ValueError(f"{values.shape[0]} values for {self.num_tokens} tokens")

    def expect_samples(self, values: Tensor) -> None:
        """Raise a ValueError unless there is one value for each sample."""
        if values.shape[:1] != self.lengths.shape:
            raise ValueError(f"{values.shape[0]} values for {self.num_samples} samples")
