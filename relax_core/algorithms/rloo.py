"""RLOO: REINFORCE with the mean of the group's other rewards as baseline. arXiv 2402.14740.

The baseline does not depend on the sample it is taken from, so the gradient is unbiased: on samples of the very policy
that is updated, without a ratio, and over all tokens of the batch alike.

Use it with one optimizer step for each rollout, where an unbiased gradient matters more than reuse of samples.
"""

import attrs

from relax_core.algorithm import Algorithm, Traits
from relax_core.algorithms import stages


@attrs.frozen(kw_only=True)
class Hyperparameters:
    """None."""


RLOO = Algorithm[Hyperparameters](
    name="rloo",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.leave_one_out,
    estimate_advantages=stages.broadcast,
    policy_loss=stages.reinforce,
    reducer=stages.token_mean,
    traits=Traits(
        min_group_size=2,
        normalize_rewards="required",
        normalize_advantages="forbidden",
        reward_kl="forbidden",
        global_token_loss=True,
        on_policy=True,
    ),
)
