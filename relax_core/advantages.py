"""Scores -> advantages: one number for each sample becomes one for each response token."""

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.collectives import Batches, Reduce, Segment, agree, cut, local
from relax_core.numerics import FLOAT32_MAX, GDPO_EPS, accumulate, rounded


@checked
def broadcast(scores: Float[Tensor, " samples"], tokens: Tokens) -> Float[Tensor, " tokens"]:
    """Every response token carries its sample's score. Scores are data: no gradient passes."""
    tokens.expect_samples(scores)
    return scores.detach()[tokens.sample_of]


def whiten_samples(
    scores: Float[Tensor, " samples"],
    tokens: Tokens,
    *,
    segment: Segment | None,
    reduce: Reduce = local,
    eps: float = GDPO_EPS,
) -> Float[Tensor, " samples"]:
    """Step 3 of GDPO: (A - mean) / (std + eps) over each optimizer batch, one number a sample. arXiv 2601.05242, Eq. 6.

    Two-pass in float64 with the unbiased std, cast to the scores' dtype at the end. Batches whose scores are all equal
    as a trainer sees them, in float32, get exact zeros. Three collectives whatever the number of batches; their sums
    are exact, so that the result is to the bit the same for every order of the samples and every spread over ranks.

    Args:
        tokens: the samples' tokens; only their number is read, so that a mismatch is found before ranks meet.
        segment: which samples belong to which optimizer batch; missing is an error, never "one batch".

    Raises:
        ValueError: on every rank alike, when one has a missing or malformed segmentation, a score that is not finite in
            float32, or another number of batches; or when a batch is empty on all ranks together.
        TypeError: on every rank alike, when one has scores that are no floating-point vector.
    """
    device = getattr(scores, "device", torch.device("cpu"))
    share = agree(lambda: _share(scores, tokens, segment), lambda share: share.batches.count, reduce, device)
    batches, values, seen = share.batches, share.values, share.values.float().double()

    totals = _sums([values, seen, torch.ones_like(values)], batches, reduce)
    count = totals[:, 2]
    if (count == 0).any() and count.sum() > 0:
        raise ValueError(f"optimizer batch {int(count.argmin())} holds no sample on any rank")
    mean, equal = (totals[:, column] / count for column in (0, 1))

    deviations = values - mean[batches.of_sample]
    different = (seen != equal[batches.of_sample]).double()
    squares, differing = _sums([deviations.square(), different], batches, reduce).unbind(dim=1)
    std = (squares / (count - 1)).sqrt()
    whitened = torch.where((differing > 0)[batches.of_sample], deviations / (std + eps)[batches.of_sample], 0.0)
    return whitened.to(scores.dtype)


@attrs.frozen(eq=False)
class _Share:
    """A rank's part of what is whitened."""

    values: Tensor
    batches: Batches


def _share(scores: Tensor, tokens: Tokens, segment: Segment | None) -> _Share:
    _expect_scores(scores, tokens)
    return _Share(scores.detach().to(torch.float64), cut(len(scores), segment, scores.device))


@checked
def _expect_scores(scores: Float[Tensor, " samples"], tokens: Tokens) -> None:
    tokens.expect_samples(scores)
    broken = ~(scores.abs() <= FLOAT32_MAX)
    if broken.any():
        sample = int(broken.nonzero()[0])
        raise ValueError(f"the score of sample {sample} is {scores[sample].item()}, which is not finite in float32")


def _sums(columns: list[Tensor], batches: Batches, reduce: Reduce) -> Tensor:
    """Exact sums of each column over each batch on all ranks, [batches, columns]. One collective."""
    index = batches.of_sample[None, :] * len(columns) + torch.arange(len(columns), device=columns[0].device)[:, None]
    sums = accumulate(torch.cat(columns), index.flatten(), batches.count * len(columns))
    return rounded(reduce(sums, "sum")).view(batches.count, len(columns))
