"""What wraps a token loss: factors for samples of another policy, and added terms. Each is a function of its own.

Factors commute with each other and so do terms, but a term that is added before a factor is multiplied by it: first the
factors, then the terms. Every factor is a constant: no gradient passes through it.
"""

from collections.abc import Mapping

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from relax_core.algorithm import TokenLoss
from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.losses import ratio_of, select


def _wrapped(loss: TokenLoss, per_token: Tensor, **metrics: Tensor) -> TokenLoss:
    dtype = loss.loss.dtype
    added: Mapping[str, Tensor] = {name: metric.detach().to(dtype) for name, metric in metrics.items()}
    return attrs.evolve(loss, loss=per_token.to(dtype), metrics={**loss.metrics, **added})


@checked
def truncated_importance(
    loss: TokenLoss,
    old_log_probs: Float[Tensor, " tokens"],
    rollout_log_probs: Float[Tensor, " tokens"],
    tokens: Tokens,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> TokenLoss:
    """The loss times clamp(exp(old_log_probs - rollout_log_probs), low, high).

    For engines that sample from slightly another policy than the one that is trained: "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training" (Yao et al., 2025). Metrics: `tis` (the ratio), `tis_clipfrac`.
    """
    old, rollout = select(tokens, old_log_probs.detach(), rollout_log_probs.detach())
    ratio = ratio_of(old - rollout)
    weight = ratio.clamp(low, high)
    clipped = tokens.mask & (weight != ratio)
    return _wrapped(loss, loss.loss * weight, tis=tokens.counted(ratio), tis_clipfrac=clipped)


@checked
def masked_importance(
    loss: TokenLoss,
    old_log_probs: Float[Tensor, " tokens"],
    rollout_log_probs: Float[Tensor, " tokens"],
    tokens: Tokens,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> TokenLoss:
    """`truncated_importance` that drops tokens outside [low, high] instead: their loss is 0, their gradient too.

    The reducer's weights are made before, so the denominator still counts them.
    """
    old, rollout = select(tokens, old_log_probs.detach(), rollout_log_probs.detach())
    ratio = ratio_of(old - rollout)
    inside = (ratio >= low) & (ratio <= high)
    dropped = tokens.mask & ~inside
    per_token = torch.where(inside, loss.loss * ratio, 0.0)
    return _wrapped(loss, per_token, tis=tokens.counted(ratio), tis_clipfrac=dropped)


@checked
def off_policy_masking(
    loss: TokenLoss,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
    *,
    delta: float = 1e-4,
) -> TokenLoss:
    """Drop tokens with A < 0 of responses whose mean of old_log_probs - log_probs is more than delta.

    DeepSeek-V3.2 (arXiv 2512.02556), off-policy sequence masking. Metric: `opsm_clipfrac`. As in `masked_importance`,
    the denominator still counts what is dropped.
    """
    lp, old, adv = select(tokens, log_probs.detach(), old_log_probs.detach(), advantages.detach())
    drifted = tokens.per_token(tokens.sample_mean(old - lp) > delta)
    dropped = drifted & (adv < 0)
    return _wrapped(loss, torch.where(dropped, 0.0, loss.loss), opsm_clipfrac=dropped)


@checked
def with_entropy(loss: TokenLoss, entropy: Float[Tensor, " tokens"], tokens: Tokens, *, coef: float) -> TokenLoss:
    """The loss - coef * entropy; with a coefficient of 0 only the metric, `entropy`, is added."""
    (selected,) = select(tokens, entropy)
    return _wrapped(loss, loss.loss - coef * selected if coef else loss.loss, entropy=selected)


@checked
def with_kl(loss: TokenLoss, kl: Float[Tensor, " tokens"], tokens: Tokens, *, coef: float) -> TokenLoss:
    """The loss + coef * kl; take `kl` from `relax_core.kl.loss`, whose gradient is the KL's. Metric: `kl_loss`."""
    (selected,) = select(tokens, kl)
    return _wrapped(loss, loss.loss + coef * selected, kl_loss=selected)
