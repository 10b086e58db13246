"""Rotary frequencies stretched for longer contexts than a model was first trained on."""

import math

import attrs
from attrs import validators
from torch import Tensor

_at_least_one = validators.ge(1.0)
_positive = validators.gt(0.0)


@attrs.frozen
class LinearScaling:
    """Position interpolation (arXiv:2306.15595): every frequency divided by `factor`."""

    factor: float = attrs.field(validator=_at_least_one)

    def apply(self, frequencies: Tensor) -> Tensor:
        """Angles per position [d / 2] -> the same, scaled."""
        return frequencies / self.factor


@attrs.frozen
class Llama3Scaling:
    """Llama 3.1's (arXiv:2407.21783): slow turns divided by `factor`, fast ones kept, a ramp in between.

    A frequency counts as slow where it turns fewer than `low_freq_factor` times within
    `original_max_position_embeddings` positions, as fast from `high_freq_factor` times on.
    """

    factor: float = attrs.field(validator=_at_least_one)
    low_freq_factor: float = attrs.field(validator=_positive)
    high_freq_factor: float = attrs.field(validator=_positive)
    original_max_position_embeddings: int = attrs.field(validator=validators.gt(0))

    def __attrs_post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be greater than "
                f"low_freq_factor ({self.low_freq_factor})"
            )

    def apply(self, frequencies: Tensor) -> Tensor:
        """Angles per position [d / 2] -> the same, scaled."""
        turns = frequencies * self.original_max_position_embeddings / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


RopeScaling = LinearScaling | Llama3Scaling
