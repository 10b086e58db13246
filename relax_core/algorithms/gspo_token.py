"""GSPO-token: GSPO's value with a gradient of each token's own, so that advantages may differ by token.

arXiv 2507.18071, Eq. 14. With one advantage for a response the gradient is GSPO's.

Use it only where advantages differ within a response, which takes a second stage of your own: as registered here, its
gradient is GSPO's.
"""

import attrs
from jaxtyping import Float
from torch import Tensor

from relax_core import losses
from relax_core.algorithm import Algorithm, TokenLoss, Traits
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.hyperparameters import Clip, GroupScale


@attrs.frozen(kw_only=True)
class Hyperparameters(GroupScale, Clip):
    """Group scale and clip range, of the whole response's ratio: far narrower ones than a token's make sense."""


def policy_loss(
    hyperparameters: Hyperparameters,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """See `losses.gspo` with `token_gradient`."""
    return losses.gspo(
        log_probs,
        old_log_probs,
        advantages,
        tokens,
        eps_clip=hyperparameters.eps_clip,
        eps_clip_high=hyperparameters.eps_clip_high,
        eps_clip_c=hyperparameters.eps_clip_c,
        token_gradient=True,
    )


GSPO_TOKEN = Algorithm[Hyperparameters](
    name="gspo_token",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean_std,
    estimate_advantages=stages.broadcast,
    policy_loss=policy_loss,
    traits=Traits(ratio_level="sequence", needs_full_log_probs=True),
)
