"""GRPO: a response is as good as it is better than the other responses to its prompt. arXiv 2402.03300.

Use it as the first choice where one reward, mostly verifiable, is given for several responses to each prompt. There is
no critic to train.
"""

import attrs

from relax_core.algorithm import Algorithm
from relax_core.algorithms import stages
from relax_core.hyperparameters import Clip, GroupScale


@attrs.frozen(kw_only=True)
class Hyperparameters(GroupScale, Clip):
    """Group scale and clip range."""


GRPO = Algorithm[Hyperparameters](
    name="grpo",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean_std,
    estimate_advantages=stages.broadcast,
    policy_loss=stages.ppo_clip,
)
