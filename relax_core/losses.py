"""Advantages -> token losses. Masked tokens are selected away before any arithmetic: a NaN there reaches nothing."""

import torch
from jaxtyping import Float
from torch import Tensor

from relax_core.algorithm import TokenLoss
from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.kl import EXPONENT_BOUND


def select(mask: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """The values where the mask is True, else 0, in float32 at least. What is left out has a gradient of exactly 0."""
    wide = torch.promote_types(values[0].dtype, torch.float32)
    return tuple(torch.where(mask, value.to(wide), 0.0) for value in values)


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

    With `eps_clip_c` where A < 0 also min(., -eps_clip_c A): dual clip, arXiv 1912.09729, Eq. 5.

    Metrics: `ppo_kl` = old_log_probs - log_probs; `clipfrac` = 1 where the clipped branch is the larger.
    """
    tokens.expect_tokens(log_probs)
    lp, old, adv = select(tokens.mask, log_probs, old_log_probs.detach(), advantages.detach())
    return clipped_surrogate(
        lp - old, adv, log_probs.dtype, eps_clip=eps_clip, eps_clip_high=eps_clip_high, eps_clip_c=eps_clip_c
    )


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    dtype: torch.dtype,
    *,
    eps_clip: float,
    eps_clip_high: float | None,
    eps_clip_c: float | None,
) -> TokenLoss:
    """The clipped loss of log-ratios, whatever level they are of; selected values in, results of `dtype` out."""
    ratio = log_ratio.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high)) * advantages
    loss = torch.maximum(plain, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    metrics = {"ppo_kl": -log_ratio.detach(), "clipfrac": (clipped > plain).to(log_ratio.dtype)}
    return TokenLoss(loss.to(dtype), {name: metric.to(dtype) for name, metric in metrics.items()})
