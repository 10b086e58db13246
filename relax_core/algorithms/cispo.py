"""CISPO: clipped ratios weigh the policy gradient, so that rare but decisive tokens keep theirs. arXiv 2506.13585.

A ratio of 1 has weight 1: eps_clip and eps_clip_high are distances from 1 as everywhere, not bounds.

Use it where several optimizer steps are made of one rollout and rare tokens, such as those that reconsider, get clipped
away.
"""

import attrs
from jaxtyping import Float
from torch import Tensor

from relax_core import losses
from relax_core.algorithm import Algorithm, TokenLoss
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.hyperparameters import ClipRange, GroupScale


@attrs.frozen(kw_only=True)
class Hyperparameters(GroupScale, ClipRange):
    """Group scale and the range of the weights."""


def policy_loss(
    hyperparameters: Hyperparameters,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """See `losses.cispo`."""
    return losses.cispo(
        log_probs,
        old_log_probs,
        advantages,
        tokens,
        eps_clip=hyperparameters.eps_clip,
        eps_clip_high=hyperparameters.eps_clip_high,
    )


CISPO = Algorithm[Hyperparameters](
    name="cispo",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean_std,
    estimate_advantages=stages.broadcast,
    policy_loss=policy_loss,
)
