"""REINFORCE++ with the group's mean as baseline, for several samples of a prompt. arXiv 2501.03262.

No KL in the reward; wants a KL loss with the k2 estimator instead.

Use it where a group's own std is too noisy to divide by, as with few samples of a prompt: here the scale is that of the
whole batch.
"""

import attrs

from relax_core.algorithm import Algorithm, Traits
from relax_core.algorithms import stages
from relax_core.hyperparameters import Clip


@attrs.frozen(kw_only=True)
class Hyperparameters(Clip):
    """Clip range."""


REINFORCE_PLUS_PLUS_BASELINE = Algorithm[Hyperparameters](
    name="reinforce_plus_plus_baseline",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean,
    estimate_advantages=stages.broadcast_valid,
    policy_loss=stages.ppo_clip,
    traits=Traits(
        advantage_normalization="token_global",
        normalize_advantages="required",
        normalize_rewards="required",
        min_group_size=2,
        allows_reward_hooks=False,
        reward_kl="forbidden",
        kl_loss="required",
        kl_estimator="k2",
    ),
)
