"""ReMax: REINFORCE with the reward of the greedy response to the same prompt as baseline. arXiv 2310.10505.

Reads two components: a response's reward, and the greedy response's.

Use it where a prompt gets one sampled response only and a critic is too costly: the baseline costs one more, greedy,
response to each prompt.

Example:
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])  # reward, greedy
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
    """Reward - greedy reward, in float32.

    Raises:
        ValueError: another number of components than those two; a value that float32 cannot hold.
    """
    reward, greedy = rewards.named_components(reward_matrix, "reward", "greedy_reward")
    return (reward - greedy).float()


REMAX = Algorithm[Hyperparameters](
    name="remax",
    hyperparameters=Hyperparameters,
    normalize_rewards=normalize_rewards,
    estimate_advantages=stages.broadcast,
    policy_loss=stages.reinforce,
    traits=Traits(
        reads_components=True,
        component_names=("reward", "greedy_reward"),
        normalize_rewards="required",
        allows_reward_hooks=False,
        on_policy=True,
    ),
)
