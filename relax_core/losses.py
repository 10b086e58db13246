"""Advantages -> token losses. Masked tokens are selected away before any arithmetic: a NaN there reaches nothing.

Every loss is one function of log-probs, old log-probs, advantages and tokens. Ratios are of the current to the old
policy; log-ratios are clamped to [-20, 20] before `exp`. All return the metrics `ppo_kl`, old_log_probs - log_probs,
and `clipfrac`, 1 where clipping changes the loss.

The dtype of the log-probs is that of the loss; half precision is raised to float32 inside. Of the same inputs, float32
gives what float64 does within 3e-6 times |loss| + |A|, bfloat16 within 2**-8 times that.
"""

import math
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from relax_core.algorithm import TokenLoss
from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.kl import EXPONENT_BOUND

M2PO_CLIP_LOW: Final = 0.3
"""The least distance below 1 at which m2po clips: a ratio of 0.7 or more never is."""
M2PO_CLIP_HIGH: Final = 0.5
"""The least distance above 1 at which m2po clips: a ratio of 1.5 or less never is."""


def select(tokens: Tokens, *values: Tensor) -> tuple[Tensor, ...]:
    """The values of tokens that count, else 0, in float32 at least. What is left out has a gradient of exactly 0."""
    tokens.expect_tokens(values[0])
    wide = torch.promote_types(values[0].dtype, torch.float32)
    return tuple(tokens.counted(value.to(wide)) for value in values)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), clamped first so that it is finite and so is its gradient."""
    return log_ratio.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def nothing(like: Tensor) -> Tensor:
    """The `clipfrac` of a loss that does not clip: one zero for all tokens."""
    return like.new_zeros(())


def token_loss(loss: Tensor, like: Tensor, **metrics: Tensor) -> TokenLoss:
    """Loss and metrics in the dtype that came in, metrics detached."""
    return TokenLoss(loss.to(like.dtype), {name: metric.detach().to(like.dtype) for name, metric in metrics.items()})


@checked
def ppo_clip(
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> TokenLoss:
    """max(-ratio A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) A). PPO, arXiv 1707.06347, Eq. 7.

    With `eps_clip_c` where A < 0 also min(., -eps_clip_c A): dual clip, arXiv 1912.09729.
    """
    lp, old, adv = select(tokens, log_probs, old_log_probs.detach(), advantages.detach())
    loss, clipped = clipped_surrogate(lp - old, adv, eps_clip, eps_clip_high, eps_clip_c)
    return token_loss(loss, log_probs, ppo_kl=old - lp, clipfrac=clipped)


def clip_by_sign(
    values: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor, far: float | None = None
) -> tuple[Tensor, Tensor]:
    """Values within [low, far] where A < 0 and up to `high` where A > 0; 1 where `low` or `high` changes the loss.

    Of the two bounds of a clip range, only the one that the sign of A looks towards can change a pessimistic loss: one
    clamp gives what the maximum of two branches does, with half the temporaries, forwards and backwards. The other is
    moved out of reach; in arithmetic, since to compare and to select take five to ten times as long.
    """
    sign = advantages.sign()
    reach = torch.finfo(values.dtype).max / 4
    unless_negative, unless_positive = reach * (1 + sign), reach * (1 - sign)
    least, most = low - unless_negative, high + unless_positive
    inside = values.clamp(least, most)
    clipped = (inside - values).detach().sign().abs()
    return inside if far is None else values.clamp(least, torch.minimum(most, far + unless_negative)), clipped


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor | None, dual: float | None
) -> tuple[Tensor, Tensor]:
    """The clipped loss of log-ratios, whatever level they are of, and 1 where the clipped branch is the larger."""
    above = 1 + (low if high is None else high)
    inside, clipped = clip_by_sign(ratio_of(log_ratio), advantages, 1 - low, above, dual)
    return -inside * advantages, clipped


@checked
def gspo(
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    token_gradient: bool = False,
) -> TokenLoss:
    """`ppo_clip` on the ratio of a response, exp(mean over its valid tokens of the log-ratio). arXiv 2507.18071, Eq. 7.

    That is the length-normalized ratio, not the product. With `token_gradient` the value is the same, but each token's
    gradient is its own: the ratio is stop(response's) * pi / stop(pi). GSPO-token, Eq. 14.
    """
    lp, old, adv = select(tokens, log_probs, old_log_probs.detach(), advantages.detach())
    log_ratio = tokens.per_token(tokens.sample_mean(lp - old))
    if token_gradient:
        log_ratio = log_ratio.detach() + lp - lp.detach()
    loss, clipped = clipped_surrogate(log_ratio, adv, eps_clip, eps_clip_high, eps_clip_c)
    # Where the advantage is 0 under the mask, so are loss and clipfrac: nothing is left to select.
    return token_loss(loss, log_probs, ppo_kl=old - lp, clipfrac=clipped)


@checked
def sapo(
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
    *,
    tau_pos: float,
    tau_neg: float,
) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A, tau by the sign of A: a soft gate for the clip. SAPO, arXiv 2511.20347."""
    lp, old, adv = select(tokens, log_probs, old_log_probs.detach(), advantages.detach())
    positive = adv.sign().clamp(min=0)
    tau = tau_pos * positive + tau_neg * (1 - positive)
    loss = (-4 * adv / tau) * torch.sigmoid(tau * (ratio_of(lp - old) - 1))
    return token_loss(loss, log_probs, ppo_kl=old - lp, clipfrac=nothing(lp))


@checked
def cispo(
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> TokenLoss:
    """-stop(c) A log_probs: the clipped ratio only weighs, so no token loses its gradient. arXiv 2506.13585, Eq. 4.

    c = min(ratio, 1 + eps_clip_high) where A > 0, else max(ratio, 1 - eps_clip).
    """
    lp, old, adv = select(tokens, log_probs, old_log_probs.detach(), advantages.detach())
    log_ratio = (lp - old).detach()
    high = 1 + (eps_clip if eps_clip_high is None else eps_clip_high)
    weight, clipped = clip_by_sign(ratio_of(log_ratio), adv, 1 - eps_clip, high)
    return token_loss(-weight * adv * lp, log_probs, ppo_kl=-log_ratio, clipfrac=clipped)


@checked
def reinforce(
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """-A log_probs (Williams, 1992). Right on samples of the current policy only: no ratio corrects for another."""
    lp, old, adv = select(tokens, log_probs, old_log_probs.detach(), advantages.detach())
    return token_loss(-adv * lp, log_probs, ppo_kl=old - lp, clipfrac=nothing(lp))


@checked
def m2po(
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
    *,
    budget: float,
) -> TokenLoss:
    """`ppo_clip` whose range is as wide as a budget for the second moment of harmful log-ratios lets it be.

    A token is harmful where A and the log-ratio have the same sign: its ratio has already gone where A sends it. The
    largest of their log-ratios are capped at tau so that the mean square is at most `budget`, and the clip range is
    [1 - max(1 - e^-tau, 0.3), 1 + max(e^tau - 1, 0.5)]; no clipping where the budget is kept. After arXiv 2510.01161.

    Metrics besides: `m2` (that mean square before the cap) and `m2_cap` (tau, or the largest where none is capped).
    Both are scalars of the tokens passed, among which tau is sought: pass those of a whole optimizer batch.
    """
    lp, old, adv = select(tokens, log_probs, old_log_probs.detach(), advantages.detach())
    log_ratio = lp - old
    size = torch.where(log_ratio.sign() == adv.sign(), log_ratio, 0.0).detach().abs().double()
    harmful = (size > 0).sum()
    moment = size.square().sum() / harmful.clamp(min=1)
    cap = torch.where(moment > budget, _cap(size, budget * harmful), math.inf)
    low = torch.clamp(1 - torch.exp(-cap), min=M2PO_CLIP_LOW).to(lp.dtype)
    high = torch.clamp(torch.exp(cap) - 1, min=M2PO_CLIP_HIGH).to(lp.dtype)
    loss, clipped = clipped_surrogate(log_ratio, adv, low, high, None)
    largest = size.amax() if len(size) else harmful.double()
    return token_loss(
        loss, log_probs, ppo_kl=-log_ratio, clipfrac=clipped, m2=moment, m2_cap=torch.minimum(cap, largest)
    )


def _cap(size: Tensor, total: Tensor) -> Tensor:
    """tau such that sum(min(size, tau)^2) = total, given that sum(size^2) is more.

    With the k largest capped, k tau^2 + (the others' squares) = total; the right k is the first whose tau is no less
    than the largest size left uncapped.
    """
    square = torch.cat([size.sort(descending=True).values.square(), size.new_zeros(1)])
    others = square.flip(0).cumsum(0).flip(0)[1:]
    count = torch.arange(1, len(square), dtype=torch.float64, device=size.device)
    tau_squared = (total - others) / count
    fits = tau_squared >= square[1:]
    first = fits.int().argmax() if len(size) else 0
    return tau_squared[first].clamp(min=0).sqrt() if len(size) else total.sqrt()


def covariance(log_probs: Tensor, advantages: Tensor, tokens: Tokens) -> Tensor:
    """(lp - mean lp) (A - mean A) of each token, means over those that count; a constant. arXiv 2505.22617."""
    count = tokens.mask.sum().clamp(min=1)
    lp, adv = log_probs.detach(), advantages.detach()
    return (lp - lp.sum() / count) * (adv - adv.sum() / count)


def largest(scores: Tensor, candidates: Tensor, share: float, tokens: Tokens) -> Tensor:
    """True for the candidates of the largest scores: that share of the tokens that count, at least one candidate.

    Among equal scores the first are taken.
    """
    if not len(scores):
        return candidates
    quota = max(1, math.floor(tokens.mask.sum() * share))
    scores = torch.where(candidates, scores, -math.inf)
    last = scores.topk(quota, sorted=False).values.amin()
    above, at = scores > last, scores == last
    return candidates & (above | (at & (at.cumsum(0) <= quota - above.sum())))


@checked
def value_loss(
    values: Float[Tensor, " tokens"],
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    tokens: Tokens,
    *,
    value_clip: float,
) -> TokenLoss:
    """max((clip(V, V_old +- value_clip) - R)^2, (V - R)^2), for the critic; gradient through `values` only.

    Metric: `value_clipfrac`, 1 where the clipped branch is the larger.
    """
    v, old, target = select(tokens, values, old_values.detach(), returns.detach())
    plain = (v - target).square()
    clipped = (old + (v - old).clamp(-value_clip, value_clip) - target).square()
    return token_loss(torch.maximum(plain, clipped), values, value_clipfrac=(clipped > plain).to(v.dtype))
