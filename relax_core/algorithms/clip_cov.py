"""Clip-Cov: tokens whose log-prob and advantage covary most get no gradient, which keeps entropy up. arXiv 2505.22617.

The paper draws among the tokens of a covariance range; here those with the largest are taken, so nothing is random.

Use it where entropy falls early and exploration stops. With few tokens in an optimizer batch the share comes down to
one token.

Example:
    old_log_probs = torch.tensor([-0.9, -1.1, -1.0, -0.7, -0.9, -1.1, -0.8, -4.0, -1.0])  # the last but one is rare
    log_probs = (old_log_probs + 0.05).requires_grad_()  # and bad: no ratio is clipped, but it gets no gradient
"""

import attrs
import torch
from jaxtyping import Float
from torch import Tensor

from relax_core.algorithm import Algorithm, TokenLoss, Traits
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.hyperparameters import Clip, GroupScale, between, hyperparameter
from relax_core.losses import clipped_surrogate, covariance, largest, select, token_loss


@attrs.frozen(kw_only=True)
class Hyperparameters(GroupScale, Clip):
    """Group scale, clip range, and which tokens lose their gradient."""

    clip_cov_ratio: float = hyperparameter(
        0.0002, "Share of the tokens that lose their gradient, at least one of those in range.", check=between(0.0, 1.0)
    )
    clip_cov_low: float = hyperparameter(
        1.0, "Least covariance of a token that may lose its gradient.", check=between(0.0)
    )
    clip_cov_high: float = hyperparameter(5.0, "Most covariance of such a token.", check=between(0.0))


@checked
def policy_loss(
    hyperparameters: Hyperparameters,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """`losses.ppo_clip`, 0 for the tokens chosen, whose covariance is taken over the tokens passed.

    `clipfrac`: 1 where the clipped branch is the larger, or the token is chosen.
    """
    lp, old, adv = select(tokens, log_probs, old_log_probs.detach(), advantages.detach())
    h = hyperparameters
    loss, clipped = clipped_surrogate(lp - old, adv, h.eps_clip, h.eps_clip_high, h.eps_clip_c)
    cov = covariance(lp, adv, tokens)
    candidates = tokens.mask & (clipped == 0) & (cov >= h.clip_cov_low) & (cov <= h.clip_cov_high)
    chosen = largest(cov, candidates, h.clip_cov_ratio, tokens)
    return token_loss(
        torch.where(chosen, 0.0, loss), log_probs, ppo_kl=old - lp, clipfrac=torch.where(chosen, 1.0, clipped)
    )


CLIP_COV = Algorithm[Hyperparameters](
    name="clip_cov",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean_std,
    estimate_advantages=stages.broadcast,
    policy_loss=policy_loss,
    traits=Traits(whole_batch_loss=True, supports_context_parallel=False),
)
