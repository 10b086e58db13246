"""REINFORCE++: discounted returns with the KL in the reward, normalized over all tokens of the batch. arXiv 2501.03262.

Wants kl_coef > 0 with the k1 estimator: nothing else keeps the policy near the reference.

Use it where a prompt gets a single response, so that no group gives a baseline, and a critic is too costly.
"""

import attrs
from jaxtyping import Float
from torch import Tensor

from relax_core import advantages
from relax_core.algorithm import Advantages, Algorithm, Traits
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.collectives import Reduce, Segment, local, whole_batch
from relax_core.hyperparameters import Clip, Discount, KlInReward


@attrs.frozen(kw_only=True)
class Hyperparameters(KlInReward, Discount, Clip):
    """KL penalty, discount and clip range."""


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
    """`advantages.discounted_returns` of `advantages.token_rewards`, as advantages and as returns."""
    rewards = advantages.token_rewards(scores, tokens, kl=kl, kl_coef=hyperparameters.kl_coef)
    returns = advantages.discounted_returns(rewards, tokens, gamma=hyperparameters.gamma)
    return Advantages(returns, returns)


REINFORCE_PLUS_PLUS = Algorithm[Hyperparameters](
    name="reinforce_plus_plus",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.scalar,
    estimate_advantages=estimate_advantages,
    policy_loss=stages.ppo_clip,
    traits=Traits(
        advantage_normalization="token_global",
        normalize_advantages="required",
        reward_kl="required",
        kl_loss="forbidden",
        kl_estimator="k1",
    ),
)
