"""Scores -> advantages: one number for each sample becomes one for each response token."""

import functools
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from relax_core.algorithm import AdvantageNormalization, Advantages
from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.collectives import Batches, Reduce, Segment, agree, cut, local
from relax_core.numerics import FLOAT32_MAX, GDPO_EPS, exact_sums, from_digits, quotient, sum_by, to_digits

WHITEN_EPS: Final = 1e-8
"""Added to the variance when advantages are whitened (as THUDM/slime and verl do)."""
VARIANCE_FLOOR: Final = 1e-8
"""The least variance that `token_global` divides by (OpenRLHF's REINFORCE++)."""


# --- spreading a sample's score over its tokens ----------------------------------------------------------------------


@checked
def broadcast(scores: Float[Tensor, " samples"], tokens: Tokens) -> Float[Tensor, " tokens"]:
    """Every response token carries its sample's score. Scores are data: no gradient passes."""
    tokens.expect_samples(scores)
    return tokens.per_token(scores.detach())


@checked
def broadcast_valid(scores: Float[Tensor, " samples"], tokens: Tokens) -> Float[Tensor, " tokens"]:
    """Every valid token carries its sample's score, every other 0."""
    return tokens.counted(broadcast(scores, tokens))


@checked
def token_rewards(
    scores: Float[Tensor, " samples"],
    tokens: Tokens,
    *,
    kl: Float[Tensor, " tokens"] | None = None,
    kl_coef: float = 0.0,
) -> Float[Tensor, " tokens"]:
    """-kl_coef * kl on valid tokens, plus the sample's score on its last valid one; 0 elsewhere.

    Raises:
        ValueError: a kl_coef without kl.
    """
    if kl_coef and kl is None:
        raise ValueError(f"kl_coef is {kl_coef}, but no kl was passed")
    spread = broadcast(scores, tokens)
    rewards = torch.where(tokens.mask & (tokens.valid_after == 0), spread, 0.0)
    if kl_coef and kl is not None:
        rewards = rewards - kl_coef * tokens.counted(kl.detach().to(rewards.dtype))
    return rewards


@checked
def discounted_returns(rewards: Float[Tensor, " tokens"], tokens: Tokens, *, gamma: float) -> Float[Tensor, " tokens"]:
    """G_t = r_t + gamma G_{t+1} along each response; 0 on masked tokens, which the recursion walks through.

    REINFORCE++, arXiv 2501.03262. A scan, see `_scan`.
    """
    tokens.expect_tokens(rewards)
    selected = tokens.counted(rewards.detach())
    return tokens.counted(_scan(selected, tokens.lengths.to(rewards.device), gamma))


@checked
def gae(
    rewards: Float[Tensor, " tokens"],
    values: Float[Tensor, " tokens"],
    tokens: Tokens,
    *,
    gamma: float,
    lambd: float,
) -> Advantages:
    """delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambd A_{t+1}; returns = A + V. arXiv 1506.02438.

    t counts valid tokens only: masked ones are skipped, not walked through, and carry 0. A scan, see `_scan`.
    """
    tokens.expect_tokens(rewards)
    r, v = (tokens.only_valid(each.detach().to(rewards.dtype)) for each in (rewards, values))
    advantages = _scan(r - v + gamma * _next(v, tokens.valid), tokens.valid, gamma * lambd)
    return Advantages(tokens.with_zeros(advantages), tokens.with_zeros(advantages + v))


_BLOCK: Final = 32
"""Tokens that `_scan` sums before it looks at what follows them."""


def _scan(values: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """x_t = values_t + decay * x_{t+1} along each response; responses of these lengths lie back to back.

    Responses are cut into blocks. Doubling makes x within each: once x_t sums the next `reach` terms of its block,
    adding decay**reach * x_{t+reach} doubles them. Then every block gets what follows it, which is the same scan over
    the blocks' first x. So the work is linear in the tokens, however long the longest response is; and since a response
    shares no block and no sum with another, its bits do not depend on what else is in the batch.
    """
    longest = int(lengths.max()) if len(lengths) else 0
    if longest <= 1:
        return values.clone()
    blocks = (lengths + _BLOCK - 1) // _BLOCK
    x, gaps = _cut(values, lengths, blocks)
    added, reach = torch.empty_like(x), 1
    while reach < min(_BLOCK, longest):
        x[:, :-reach] += torch.mul(x[:, reach:], decay**reach, out=added[:, :-reach])
        reach *= 2
    if longest > _BLOCK:
        following = _next(_scan(x[:, 0], blocks, decay**_BLOCK), blocks)
        powers = x.new_tensor([decay**distance for distance in range(_BLOCK, 0, -1)])
        x += torch.mul(following[:, None], powers, out=added)
    slots = gaps.int().repeat_interleave(lengths, output_size=len(values))
    slots += torch.arange(len(values), dtype=torch.int32, device=values.device)
    return x.view(-1).index_select(0, slots)


def _cut(values: Tensor, lengths: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Responses as rows of a block each, zeros after their ends; and how many zeros precede each response there."""
    gaps = (blocks.cumsum(0) - blocks) * _BLOCK - (lengths.cumsum(0) - lengths)
    starts = torch.arange(int(blocks.sum()), device=values.device) * _BLOCK - gaps.repeat_interleave(blocks)
    rows = torch.nn.functional.pad(values, (0, _BLOCK)).unfold(0, _BLOCK, 1).index_select(0, starts)
    # Only the last block of a response reaches beyond its end.
    last, used = (blocks.cumsum(0) - 1)[blocks > 0], (lengths - (blocks - 1) * _BLOCK)[blocks > 0]
    within = torch.arange(_BLOCK, device=values.device) < used[:, None]
    rows[last] = torch.where(within, rows[last], 0.0)
    return rows, gaps


def _next(values: Tensor, lengths: Tensor) -> Tensor:
    """The value after each in its own response, 0 after the last."""
    after = torch.cat([values[1:], values[:1]])
    after[(lengths.cumsum(0) - 1)[lengths > 0]] = 0.0
    return after


# --- over all samples or tokens of an optimizer batch, on all ranks ---------------------------------------------------


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
    found = _statistics(_score_share(scores, tokens, segment), scores, reduce)
    std = (found.squares / (found.count - 1)).sqrt()
    return found.zero_where_equal(found.deviations / found.spread(std + eps)).to(scores.dtype)


def scale_by_signal(
    scores: Float[Tensor, " samples"], tokens: Tokens, *, segment: Segment | None, reduce: Reduce = local
) -> Float[Tensor, " samples"]:
    """Scores times alpha = samples / samples whose score is not 0, over each optimizer batch. GPG, arXiv 2504.02546.

    Two collectives. Raises as `whiten_samples` does.
    """
    own = _agreed(_score_share(scores, tokens, segment), scores, reduce)
    flags = torch.stack([torch.ones_like(own.values), (own.values != 0).double()])
    count, signals = reduce(sum_by(flags, own.batches.of_sample, own.batches.count), "sum")
    return (own.values * own.batches.spread(count / signals.clamp(min=1))).to(scores.dtype)


def normalize(
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
    kind: AdvantageNormalization,
    *,
    reduce: Reduce = local,
) -> Float[Tensor, " tokens"]:
    """`whiten` or `token_global`, by name, as an algorithm's trait `advantage_normalization` gives it."""
    return (whiten if kind == "whiten" else token_global)(advantages, tokens, reduce=reduce)


def normalized(
    estimate: Callable[[], Advantages], tokens: Tokens, kind: AdvantageNormalization, *, reduce: Reduce = local
) -> Advantages:
    """What `estimate` returns, its advantages normalized, its returns as they are.

    It is called where ranks agree, so that whatever it raises on one rank raises on every rank.
    """
    once = functools.cache(estimate)
    formula = _whiten if kind == "whiten" else _token_global
    return Advantages(formula(lambda: once().advantages, tokens, reduce), once().returns)


def whiten(
    advantages: Float[Tensor, " tokens"], tokens: Tokens, *, shift_mean: bool = True, reduce: Reduce = local
) -> Float[Tensor, " tokens"]:
    """(A - mean) * rsqrt(var + 1e-8) over the valid tokens of all ranks, unbiased; 0 on masked tokens.

    Without `shift_mean`, A * rsqrt(var + 1e-8). Exact sums, exact collapse and errors as in `whiten_samples`.
    """
    return _whiten(lambda: advantages, tokens, reduce, shift_mean)


def token_global(
    advantages: Float[Tensor, " tokens"], tokens: Tokens, *, reduce: Reduce = local
) -> Float[Tensor, " tokens"]:
    """(A - mean) / sqrt(max(var, 1e-8)) over the valid tokens of all ranks, population variance; 0 on masked tokens.

    REINFORCE++, arXiv 2501.03262. Exact sums, exact collapse and errors as in `whiten_samples`.
    """
    return _token_global(lambda: advantages, tokens, reduce)


def _whiten(prepare: Callable[[], Tensor], tokens: Tokens, reduce: Reduce, shift_mean: bool = True) -> Tensor:
    found = _token_statistics(prepare, tokens, reduce)
    scale = found.spread((found.squares / (found.count - 1) + WHITEN_EPS).rsqrt())
    values = found.zero_where_equal(found.deviations * scale) if shift_mean else found.values * scale
    return tokens.with_zeros(values.to(prepare().dtype))


def _token_global(prepare: Callable[[], Tensor], tokens: Tokens, reduce: Reduce) -> Tensor:
    found = _token_statistics(prepare, tokens, reduce)
    std = (found.squares / found.count).clamp(min=VARIANCE_FLOOR).sqrt()
    values = found.zero_where_equal(found.deviations / found.spread(std))
    return tokens.with_zeros(values.to(prepare().dtype))


def _token_statistics(prepare: Callable[[], Tensor], tokens: Tokens, reduce: Reduce) -> "_Statistics":
    def share() -> _Share:
        advantages = prepare()
        _expect_advantages(advantages, tokens)
        values = tokens.only_valid(advantages.detach()).double()
        return _Share(values, Batches(values.new_zeros(len(values), dtype=torch.long), 1))

    return _statistics(share, tokens.mask, reduce)


@attrs.frozen(eq=False)
class _Share:
    """A rank's values, float64 [n], and the batch that each belongs to."""

    values: Tensor
    batches: Batches


@attrs.frozen(eq=False)
class _Statistics:
    """Of each batch on all ranks: how many values, and the sum of their squared deviations. The latter are local."""

    values: Float[Tensor, " n"]
    spread: Callable[[Tensor], Tensor]
    deviations: Float[Tensor, " n"]
    count: Float[Tensor, " batches"]
    squares: Float[Tensor, " batches"]
    equal: Sequence[bool]

    def zero_where_equal(self, results: Tensor) -> Tensor:
        """Exact zeros for batches whose values a trainer cannot tell apart."""
        if not any(self.equal):
            return results
        return torch.where(self.spread(torch.tensor(self.equal, device=results.device)), 0.0, results)


def _score_share(scores: Tensor, tokens: Tokens, segment: Segment | None) -> Callable[[], _Share]:
    def share() -> _Share:
        _expect_scores(scores, tokens)
        return _Share(scores.detach().double(), cut(len(scores), segment, scores.device))

    return share


def _agreed(share: Callable[[], _Share], like: Tensor, reduce: Reduce) -> _Share:
    """This rank's share, once every rank has a sound one. One collective."""
    return agree(share, lambda own: own.batches.count, reduce, getattr(like, "device", torch.device("cpu")))


def _statistics(share: Callable[[], _Share], like: Tensor, reduce: Reduce) -> _Statistics:
    """Two-pass statistics of every batch, in three collectives."""
    own = _agreed(share, like, reduce)
    batches, values = own.batches, own.values
    totals, counts = _sums(values, torch.ones_like(values), batches, reduce)
    if 0 in counts and any(counts):
        raise ValueError(f"optimizer batch {counts.index(0)} holds no sample on any rank")
    # Rounded once, the mean of values that float32 cannot tell apart lies among them.
    mean = values.new_tensor([quotient(total, count) for total, count in zip(totals, counts, strict=True)])
    deviations = values - batches.spread(mean)
    differs = values.float() != batches.spread(mean.float())
    energies, differing = _sums(deviations.square(), differs.double(), batches, reduce)
    return _Statistics(
        values=values,
        spread=batches.spread,
        deviations=deviations,
        count=values.new_tensor(counts),
        squares=values.new_tensor([quotient(energy, 1) for energy in energies]),
        equal=[number == 0 for number in differing],
    )


def _sums(values: Tensor, counts: Tensor, batches: Batches, reduce: Reduce) -> tuple[list[int], list[int]]:
    """Sums over each batch on all ranks: of values exactly, see `exact_sums`, and of whole numbers. One collective."""
    digits = to_digits(exact_sums(values, batches.of_sample, batches.count)).to(values.device)
    plain = sum_by(counts, batches.of_sample, batches.count)
    sums = reduce(torch.cat([digits, plain[:, None]], dim=1), "sum")
    return from_digits(sums[:, :-1]), [int(number) for number in sums[:, -1].tolist()]


@checked
def _expect_scores(scores: Float[Tensor, " samples"], tokens: Tokens) -> None:
    tokens.expect_samples(scores)
    broken = ~(scores.abs() <= FLOAT32_MAX)
    if broken.any():
        sample = int(broken.nonzero()[0])
        raise ValueError(f"the score of sample {sample} is {scores[sample].item()}, which is not finite in float32")


@checked
def _expect_advantages(advantages: Float[Tensor, " tokens"], tokens: Tokens) -> None:
    tokens.expect_tokens(advantages)
    broken = tokens.mask & ~(advantages.abs() <= FLOAT32_MAX)
    if broken.any():
        token = int(broken.nonzero()[0])
        where = f"token {int(tokens.position[token])} of sample {int(tokens.sample_of[token])}"
        raise ValueError(f"the advantage of {where} is {advantages[token].item()}, which is not finite in float32")
