"""OPO: exact on-policy REINFORCE with the baseline of least variance, a length-weighted mean. arXiv 2505.23585.

Reads two components: a response's reward, and its length in tokens.

Use it for responses of widely differing lengths, with one optimizer step for each rollout.

Example:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 2.0], [0.0, 1.0], [1.0, 2.0], [1.0, 1.0], [0.0, 2.0]])  # reward, length
"""

import attrs
from jaxtyping import Float, Int
from torch import Tensor

from relax_core import rewards
from relax_core.algorithm import Algorithm, Traits
from relax_core.algorithms import stages
from relax_core.checks import checked


@attrs.frozen(kw_only=True)
class Hyperparameters:
    """None."""


@checked
def normalize_rewards(
    hyperparameters: Hyperparameters,
    reward_matrix: Float[Tensor, "samples components"],
    groups: Int[Tensor, " samples"],
) -> Float[Tensor, " samples"]:
    """See `rewards.length_weighted_baseline`; in float32.

    Raises:
        ValueError: another number of components than those two; a value that float32 cannot hold; a group of one.
    """
    reward, length = rewards.named_components(reward_matrix, "reward", "length")
    return rewards.length_weighted_baseline(reward, length, groups).float()


OPO = Algorithm[Hyperparameters](
    name="opo",
    hyperparameters=Hyperparameters,
    normalize_rewards=normalize_rewards,
    estimate_advantages=stages.broadcast,
    policy_loss=stages.reinforce,
    traits=Traits(
        reads_components=True,
        component_names=("reward", "length"),
        min_group_size=2,
        normalize_rewards="required",
        normalize_advantages="forbidden",
        allows_reward_hooks=False,
        on_policy=True,
    ),
)
