"""PPO: a critic tells how good each token's prefix was, and GAE what the token added. arXiv 1707.06347, 1506.02438.

Use it where tokens of one response should get unlike credit, as over long horizons or several turns, and a second model
is affordable.
"""

import attrs
from jaxtyping import Float
from torch import Tensor

from relax_core import advantages, losses
from relax_core.algorithm import Advantages, Algorithm, TokenLoss, Traits
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.collectives import Reduce, Segment, local, whole_batch
from relax_core.hyperparameters import Clip, Discount, KlInReward, between, hyperparameter


@attrs.frozen(kw_only=True)
class Hyperparameters(KlInReward, Discount, Clip):
    """KL penalty, discounts, and the clip ranges of policy and critic."""

    lambd: float = hyperparameter(
        1.0, "GAE's discount of later advantages: 0 trusts the critic alone, 1 the returns.", check=between(0.0, 1.0)
    )
    value_clip: float = hyperparameter(
        0.2, "The critic's values count within this of what they were before the step.", check=between(0.0)
    )


@checked
def estimate_advantages(
    hyperparameters: Hyperparameters,
    scores: Float[Tensor, " samples"],
    tokens: Tokens,
    *,
    kl: Float[Tensor, " tokens"] | None = None,
    values: Float[Tensor, " tokens"] | None = None,
    segment: Segment = whole_batch,
    reduce: Reduce = local,
) -> Advantages:
    """`advantages.gae` of `advantages.token_rewards`.

    Raises:
        ValueError: no values.
    """
    if values is None:
        raise ValueError("ppo needs the critic's values of each token, but none were passed")
    rewards = advantages.token_rewards(scores, tokens, kl=kl, kl_coef=hyperparameters.kl_coef)
    return advantages.gae(rewards, values, tokens, gamma=hyperparameters.gamma, lambd=hyperparameters.lambd)


def value_loss(
    hyperparameters: Hyperparameters,
    values: Float[Tensor, " tokens"],
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """See `losses.value_loss`."""
    return losses.value_loss(values, old_values, returns, tokens, value_clip=hyperparameters.value_clip)


PPO = Algorithm[Hyperparameters](
    name="ppo",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.scalar,
    estimate_advantages=estimate_advantages,
    policy_loss=stages.ppo_clip,
    value_loss=value_loss,
    traits=Traits(needs_critic=True),
)
