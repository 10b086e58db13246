"""GMPO: the geometric mean of a response's token ratios, each clipped by itself. arXiv 2507.20673.

A single extreme ratio moves a geometric mean far less than an arithmetic one, so the clip range may be wider: the paper
takes 0.4, in log space.

Use it where GRPO's ratios run into outliers. In log space 0.2 clips about as early as elsewhere: pass 0.4 for the
paper's range.
"""

import attrs
from jaxtyping import Float
from torch import Tensor

from relax_core.algorithm import Algorithm, TokenLoss, Traits
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.hyperparameters import ClipRange, GroupScale
from relax_core.losses import clip_by_sign, ratio_of, select, token_loss


@attrs.frozen(kw_only=True)
class Hyperparameters(GroupScale, ClipRange):
    """Group scale, and the clip range of log-ratios: [-eps_clip, eps_clip_high]."""


@checked
def policy_loss(
    hyperparameters: Hyperparameters,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """-A exp(mean over the response of s min(s d, s clip(d))), with d a token's log-ratio and s the sign of A.

    Every token carries its response's value, so that the mean over tokens is the paper's. `clipfrac`: 1 where the
    clipped log-ratio is the smaller.
    """
    lp, old, adv = select(tokens, log_probs, old_log_probs.detach(), advantages.detach())
    high = hyperparameters.eps_clip if hyperparameters.eps_clip_high is None else hyperparameters.eps_clip_high
    inside, clipped = clip_by_sign(lp - old, adv, -hyperparameters.eps_clip, high)
    mean = tokens.sample_mean(inside * adv.sign().abs())
    loss = -adv * tokens.per_token(ratio_of(mean))
    return token_loss(loss, log_probs, ppo_kl=old - lp, clipfrac=clipped)


GMPO = Algorithm[Hyperparameters](
    name="gmpo",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean_std,
    estimate_advantages=stages.broadcast,
    policy_loss=policy_loss,
    traits=Traits(ratio_level="sequence", needs_full_log_probs=True),
)
