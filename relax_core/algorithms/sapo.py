"""SAPO: a sigmoid gate instead of the hard clip, steeper for negative advantages. arXiv 2511.20347.

Use it where a clip range is hard to choose: tokens beyond it fade out instead of losing their gradient at once.
"""

import attrs
from jaxtyping import Float
from torch import Tensor

from relax_core import losses
from relax_core.algorithm import Algorithm, TokenLoss
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.hyperparameters import GroupScale, between, hyperparameter


@attrs.frozen(kw_only=True)
class Hyperparameters(GroupScale):
    """Group scale and the gates' temperatures."""

    sapo_tau_pos: float = hyperparameter(
        1.0, "Steepness of the gate where the advantage is positive.", check=between(0.0, open_low=True)
    )
    sapo_tau_neg: float = hyperparameter(
        1.05, "Steepness of the gate where the advantage is not positive.", check=between(0.0, open_low=True)
    )


def policy_loss(
    hyperparameters: Hyperparameters,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """See `losses.sapo`."""
    return losses.sapo(
        log_probs,
        old_log_probs,
        advantages,
        tokens,
        tau_pos=hyperparameters.sapo_tau_pos,
        tau_neg=hyperparameters.sapo_tau_neg,
    )


SAPO = Algorithm[Hyperparameters](
    name="sapo",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean_std,
    estimate_advantages=stages.broadcast,
    policy_loss=policy_loss,
)
