"""Sequences as the padded tensors that a model eats."""

from collections.abc import Iterator, Sequence
from itertools import chain, groupby

import attrs
import torch
from torch import Tensor

from relax.data.samples import Sequences, TokenIds
from relax.megatron.layers import SharedPrompt
from relax.megatron.model import ModelConfig


@attrs.frozen
class PaddedBatch:
    """Samples `start` to `stop` as rows of equal length, padded with token 0.

    A row is a sample, or a prompt with all responses to it (`shared_prompt`). `places` says where in the flattened
    [time, rows] each response token is predicted; `targets` are those tokens, sample by sample. Padding lies where
    causal attention never looks from any of these places.
    """

    start: int
    stop: int
    input_ids: Tensor  # [rows, time], int64
    position_ids: Tensor  # [rows or 1, time], int64
    places: Tensor  # [tokens], int64
    targets: Tensor  # [tokens], int64
    shared_prompt: SharedPrompt | None = None


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


def micro_batches(
    sequences: Sequences, spans: Sequence[tuple[int, int]], device: torch.device
) -> Iterator[PaddedBatch]:
    """The samples of each span, first and behind the last, as a batch on `device`.

    Neighbours with the same prompt share a row where that leaves fewer places to compute.
    """
    for start, stop in spans:
        chosen = sequences.select(start, stop)
        # A rank without samples runs the model too, on one token of padding, so that all ranks do the same.
        samples = _rows_of_samples(chosen if len(chosen) else Sequences(((0,),), ((),)))
        shared = _rows_of_prompts(chosen) if len(set(chosen.prompts)) < len(chosen) else samples
        smaller = shared if shared.input_ids.numel() < samples.input_ids.numel() else samples
        yield _move(attrs.evolve(smaller, start=start, stop=stop), device)


def _rows_of_samples(chosen: Sequences) -> PaddedBatch:
    """One sample a row. Its last token is predicted, never fed."""
    tokens, real = _matrix(
        [prompt + response for prompt, response in zip(chosen.prompts, chosen.responses, strict=True)]
    )
    rows, width = tokens.shape
    prompts = _lengths(chosen.prompts).unsqueeze(1)
    predicted = real[:, 1:] & (torch.arange(1, width) >= prompts)
    places = torch.arange(width - 1) * rows + torch.arange(rows).unsqueeze(1)
    fed = max(1, width - 1)
    return PaddedBatch(
        0, 0, tokens[:, :fed], torch.arange(fed).unsqueeze(0), places[predicted], tokens[:, 1:][predicted]
    )


def _rows_of_prompts(chosen: Sequences) -> PaddedBatch:
    """One run of equal prompts a row, the responses to it next to each other, place by place (see `SharedPrompt`)."""
    runs = [(prompt, len(list(run))) for prompt, run in groupby(chosen.prompts)]
    rows, copies = len(runs), max(count for _, count in runs)
    row = torch.tensor([index for index, (_, count) in enumerate(runs) for _ in range(count)])
    copy = torch.tensor([index for _, count in runs for index in range(count)])

    prompts, real = _matrix([prompt for prompt, _ in runs])
    lengths, width = real.sum(1), prompts.shape[1]
    responses, predicted = _matrix(chosen.responses)
    fed = max(0, responses.shape[1] - 1)
    laid_out = torch.zeros(rows, fed, copies, dtype=torch.int64)
    laid_out[row, :, copy] = responses[:, :fed]

    # The first token is predicted at the prompt's end, token t > 0 where token t - 1 of the same copy stands.
    behind = width + torch.arange(fed) * copies + copy.unsqueeze(1)
    places = torch.cat((lengths[row].unsqueeze(1) - 1, behind), dim=1)[:, : responses.shape[1]] * rows + row.unsqueeze(
        1
    )
    positions = lengths.view(-1, 1, 1) + torch.arange(fed).view(1, -1, 1).expand(1, fed, copies)
    return PaddedBatch(
        0,
        0,
        torch.cat((prompts, laid_out.flatten(1)), dim=1),
        torch.cat((torch.arange(width).expand(rows, width), positions.flatten(1)), dim=1),
        places[predicted],
        responses[predicted],
        SharedPrompt(width, copies, _mask(real, fed, copies)),
    )


def _mask(real: Tensor, fed: int, copies: int) -> Tensor:
    """What a response token adds to its scores: 0 for its prompt and its own past, -inf for padding and future."""
    past = torch.ones(fed, fed, dtype=torch.bool).tril().expand(len(real), fed, fed)
    seen = torch.cat((real.unsqueeze(1).expand(-1, fed, -1), past), dim=2)
    if bool(real.all()):
        seen, copies = seen[:1], 1
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf).unsqueeze(1).repeat(copies, 1, 1, 1)


def _matrix(rows: Sequence[TokenIds]) -> tuple[Tensor, Tensor]:
    """Tokens padded to the longest row, and which of them are real: 2 x [rows, longest]."""
    lengths = _lengths(rows)
    real = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    tokens = torch.zeros(real.shape, dtype=torch.int64)
    tokens[real] = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    return tokens, real


def _lengths(rows: Sequence[TokenIds]) -> Tensor:
    return torch.tensor([len(row) for row in rows], dtype=torch.int64)


def _move(batch: PaddedBatch, device: torch.device) -> PaddedBatch:
    shared = batch.shared_prompt
    return attrs.evolve(
        batch,
        input_ids=batch.input_ids.to(device),
        position_ids=batch.position_ids.to(device),
        places=batch.places.to(device),
        targets=batch.targets.to(device),
        shared_prompt=shared and attrs.evolve(shared, mask=shared.mask.to(device)),
    )
