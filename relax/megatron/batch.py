"""Sequences as the padded tensors that a model eats."""

from collections.abc import Iterator
from itertools import chain

import attrs
import torch
from torch import Tensor

from relax.data.samples import Sequences
from relax.megatron.model import ModelConfig


@attrs.frozen
class PaddedBatch:
    """Samples `start` to `stop`, padded on the right with token 0.

    A causal model never looks at padding from a real position, so no mask enters the attention. `loss_mask` marks the
    positions from which a response token is predicted; `targets` are those tokens, sample by sample.
    """

    start: int
    stop: int
    input_ids: Tensor  # [samples, time], int64
    position_ids: Tensor  # [1, time], int64
    loss_mask: Tensor  # [samples, time], bool
    targets: Tensor  # [tokens], int64


def check_fit(sequences: Sequences, config: ModelConfig) -> None:
    """Raises ValueError that names the first sample with too many tokens, or with an id outside the vocabulary."""
    for index, (prompt, response) in enumerate(zip(sequences.prompts, sequences.responses, strict=True)):
        tokens = prompt + response
        if len(tokens) > config.max_position_embeddings:
            raise ValueError(
                f"sample {index} has {len(tokens)} tokens, but the model has {config.max_position_embeddings} positions"
                ": shorten it or raise max_position_embeddings"
            )
        if max(tokens) >= config.vocab_size or min(tokens) < 0:
            raise ValueError(f"sample {index} has a token id outside the vocabulary of {config.vocab_size}")


def pad(sequences: Sequences, start: int, stop: int, device: torch.device) -> PaddedBatch:
    """Samples `start` to `stop` of `sequences` on `device`. The last token of a sample is predicted, never fed."""
    chosen = sequences.select(start, stop)
    # Where a rank has no sample it still runs the model, on one row of padding, so that all ranks do the same.
    prompts = torch.tensor([len(prompt) for prompt in chosen.prompts] or [0], dtype=torch.int64)
    lengths = prompts + torch.tensor([len(response) for response in chosen.responses] or [0], dtype=torch.int64)
    width = max(2, int(lengths.max()))
    flat = list(chain.from_iterable(chain.from_iterable(zip(chosen.prompts, chosen.responses, strict=True))))

    place = torch.arange(width)
    tokens = torch.zeros(len(lengths), width, dtype=torch.int64)
    tokens[place < lengths.unsqueeze(1)] = torch.tensor(flat, dtype=torch.int64)
    loss_mask = ((place >= prompts.unsqueeze(1)) & (place < lengths.unsqueeze(1)))[:, 1:]
    return PaddedBatch(
        start=start,
        stop=stop,
        input_ids=tokens[:, :-1].to(device),
        position_ids=place[:-1].unsqueeze(0).to(device),
        loss_mask=loss_mask.to(device),
        targets=tokens[:, 1:][loss_mask].to(device),
    )


def micro_batches(sequences: Sequences, size: int, device: torch.device) -> Iterator[PaddedBatch]:
    """Consecutive batches of `size` samples, the last one smaller; one empty batch where there is no sample."""
    for start in range(0, max(1, len(sequences)), size):
        yield pad(sequences, start, min(start + size, len(sequences)), device)
