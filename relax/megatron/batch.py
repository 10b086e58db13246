"""Sequences as the tensors that a model eats, padded or packed, whole or a context rank's share."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby

import attrs
import torch
from torch import Tensor

from relax.data.samples import Sequences, TokenIds
from relax.megatron import context
from relax.megatron.context import Gather
from relax.megatron.layers import Attention, Segments, SharedPrompt
from relax.megatron.model import ModelConfig


@attrs.frozen
class PaddedBatch:
    """Samples `start` to `stop` as rows of equal length, padded with token 0.

    A row is a sample, a prompt with all responses to it, or several samples behind one another; `attention` says which.
    `places` says where in the flattened [time, rows] each response token is predicted; `targets` are those tokens,
    sample by sample. Padding lies where attention never looks from any of these places.

    With context parallelism, places and tokens are those of this rank's share of the time axis, and `gather` says how
    what the ranks make of them comes together.
    """

    start: int
    stop: int
    input_ids: Tensor  # [rows, time], int64
    position_ids: Tensor  # [rows or 1, time], int64
    places: Tensor  # [tokens], int64
    targets: Tensor  # [tokens], int64
    attention: Attention | None = None
    gather: Gather | None = None


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
    sequences: Sequences, spans: Sequence[tuple[int, int]], device: torch.device, *, packed: bool = False
) -> Iterator[PaddedBatch]:
    """The samples of each span, first and behind the last, as a batch on `device`.

    `packed` puts them behind one another, without padding; otherwise neighbours with the same prompt share a row where
    that leaves fewer places to compute.
    """
    ranks = context.size()
    for start, stop in spans:
        chosen = sequences.select(start, stop)
        # A rank without samples runs the model too, on one token of padding, so that all ranks do the same.
        filled = chosen if len(chosen) else Sequences(((0,),), ((),))
        if packed:
            batch = _one_row(filled)
        else:
            share = ranks == 1 and _sharing_saves(filled)
            batch = _rows_of_prompts(filled) if share else _rows_of_samples(filled)
        if ranks > 1:
            batch = _share(batch)
        yield _placed(batch, start, stop, device)


def _sharing_saves(chosen: Sequences) -> bool:
    """Whether `_rows_of_prompts` has fewer places than `_rows_of_samples`."""
    runs = [len(list(run)) for _, run in groupby(chosen.prompts)]
    if len(runs) == len(chosen):
        return False
    prompts, responses = list(map(len, chosen.prompts)), list(map(len, chosen.responses))
    apart = len(chosen) * max(1, max(p + r for p, r in zip(prompts, responses, strict=True)) - 1)
    together = len(runs) * (max(prompts) + max(runs) * max(0, max(responses) - 1))
    return together < apart


def _rows_of_samples(chosen: Sequences) -> PaddedBatch:
    """One sample a row. Its last token is predicted, never fed."""
    rows, pairs = len(chosen), list(zip(chosen.prompts, chosen.responses, strict=True))
    fed = max(1, max(len(prompt) + len(response) for prompt, response in pairs) - 1)
    padded = (((prompt + response)[:fed] + (0,) * (fed - len(prompt) - len(response))) for prompt, response in pairs)
    places = (
        range((len(prompt) - 1) * rows + row, (len(prompt) + len(response) - 1) * rows + row, rows)
        for row, (prompt, response) in enumerate(pairs)
    )
    return PaddedBatch(
        0,
        0,
        _flat(padded).view(rows, fed),
        torch.arange(fed).unsqueeze(0),
        _flat(places),
        _flat(chosen.responses),
    )


def _one_row(chosen: Sequences) -> PaddedBatch:
    """Samples behind one another. Those without a response have nothing to predict and are left out."""
    pairs = [pair for pair in zip(chosen.prompts, chosen.responses, strict=True) if pair[1]]
    fed = [prompt + response[:-1] for prompt, response in pairs] or [(0,)]
    lengths = tuple(map(len, fed))
    starts = accumulate(lengths, initial=0)
    places = (
        range(start + len(prompt) - 1, start + len(prompt) + len(response) - 1)
        for start, (prompt, response) in zip(starts, pairs, strict=False)
    )
    return PaddedBatch(
        0,
        0,
        _flat(fed).unsqueeze(0),
        _flat(map(range, lengths)).unsqueeze(0),
        _flat(places),
        _flat([response for _, response in pairs]),
        Segments(lengths),
    )


def _share(batch: PaddedBatch) -> PaddedBatch:
    """What this context rank computes of a batch. Sequences are padded so that all ranks have as much of each."""
    rows, time = batch.input_ids.shape
    lengths = batch.attention.lengths if isinstance(batch.attention, Segments) else (time,)
    unit = 2 * context.size()
    padded = tuple(-(-length // unit) * unit for length in lengths)
    shifts = torch.tensor([0, *accumulate(to - length for to, length in zip(padded, lengths, strict=True))])[:-1]
    moved = torch.arange(time) + shifts.repeat_interleave(torch.tensor(lengths))

    ids = torch.zeros(rows, sum(padded), dtype=torch.int64)
    positions = torch.zeros(1, sum(padded), dtype=torch.int64)
    ids[:, moved], positions[:, moved] = batch.input_ids, batch.position_ids
    row = batch.places % rows
    ours, local, gather = context.shares_of_tokens(moved[batch.places // rows], padded)
    shares = context.zigzag(padded, context.size())
    mine = shares[context.rank()]
    return attrs.evolve(
        batch,
        input_ids=ids[:, mine],
        position_ids=positions[:, mine],
        places=(local * rows + row)[ours],
        targets=batch.targets[ours],
        attention=Segments(padded, shares.flatten().argsort()),
        gather=gather,
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
    tokens[real] = _flat(rows)
    return tokens, real


def _flat(rows: Iterable[Sequence[int]]) -> Tensor:
    """The numbers of all rows, one after another. Lists and ranges: a few tensor operations cost more than all this."""
    return torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)


def _lengths(rows: Sequence[TokenIds]) -> Tensor:
    return torch.tensor([len(row) for row in rows], dtype=torch.int64)


def _placed(batch: PaddedBatch, start: int, stop: int, device: torch.device) -> PaddedBatch:
    """The batch on the device, as that of these samples."""
    attention, gather = batch.attention, batch.gather
    if isinstance(attention, SharedPrompt):
        attention = attrs.evolve(attention, mask=attention.mask.to(device))
    elif isinstance(attention, Segments) and attention.order is not None:
        attention = attrs.evolve(attention, order=attention.order.to(device))
    return attrs.evolve(
        batch,
        start=start,
        stop=stop,
        input_ids=batch.input_ids.to(device),
        position_ids=batch.position_ids.to(device),
        places=batch.places.to(device),
        targets=batch.targets.to(device),
        attention=attention,
        gather=gather and attrs.evolve(gather, order=gather.order.to(device)),
    )
