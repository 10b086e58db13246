"""M2PO: the clip range follows from how far harmful tokens may drift in the second moment. After arXiv 2510.01161.

For stale samples: a fixed range clips too many of them, this one only outliers.

Use it for asynchronous training, where samples are many updates old. Rewards enter as they are: centre them yourself,
or normalize advantages.
"""

import attrs
from jaxtyping import Float
from torch import Tensor

from relax_core import losses
from relax_core.algorithm import Algorithm, TokenLoss, Traits
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.hyperparameters import between, hyperparameter


@attrs.frozen(kw_only=True)
class Hyperparameters:
    """The budget."""

    m2po_budget: float = hyperparameter(
        0.01, "The most that the mean square of harmful log-ratios may be.", check=between(0.0, open_low=True)
    )


def policy_loss(
    hyperparameters: Hyperparameters,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """See `losses.m2po`."""
    return losses.m2po(
        log_probs,
        old_log_probs,
        advantages,
        tokens,
        budget=hyperparameters.m2po_budget,
    )


M2PO = Algorithm[Hyperparameters](
    name="m2po",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.scalar,
    estimate_advantages=stages.broadcast,
    policy_loss=policy_loss,
    traits=Traits(
        whole_batch_loss=True, supports_context_parallel=False, loss_metrics=("ppo_kl", "clipfrac", "m2", "m2_cap")
    ),
)
