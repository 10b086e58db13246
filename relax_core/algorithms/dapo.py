"""DAPO: GRPO with a clip range wider above than below, and all tokens of the batch weighing the same. arXiv 2503.14476.

Its other two parts lie elsewhere: groups without signal are sampled again (the dynamic sampling filter), and responses
that are too long lose reward softly (`relax_core.rewards.overlong_penalty`, added to the reward).

Use it for long chains of thought, where entropy collapses under GRPO and where a token of a long response should count
as much as any other.
"""

from typing import Final

import attrs
from jaxtyping import Float
from torch import Tensor

from relax_core import losses
from relax_core.algorithm import Algorithm, TokenLoss, Traits
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.hyperparameters import Clip, GroupScale

CLIP_HIGHER: Final = 0.28
"""The paper's eps_high, where none is given."""


@attrs.frozen(kw_only=True)
class Hyperparameters(GroupScale, Clip):
    """Group scale and clip range.

    Raises:
        ValueError: an `eps_clip_high` that is not above `eps_clip`.
    """

    def __attrs_post_init__(self) -> None:
        if self.clip_high <= self.eps_clip:
            raise ValueError(f"dapo wants eps_clip_high ({self.clip_high}) above eps_clip ({self.eps_clip})")

    @property
    def clip_high(self) -> float:
        """`eps_clip_high`, 0.28 where none is given."""
        return CLIP_HIGHER if self.eps_clip_high is None else self.eps_clip_high


def policy_loss(
    hyperparameters: Hyperparameters,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """`losses.ppo_clip`, with eps_clip_high = 0.28 by default."""
    return losses.ppo_clip(
        log_probs,
        old_log_probs,
        advantages,
        tokens,
        eps_clip=hyperparameters.eps_clip,
        eps_clip_high=hyperparameters.clip_high,
        eps_clip_c=hyperparameters.eps_clip_c,
    )


DAPO = Algorithm[Hyperparameters](
    name="dapo",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean_std,
    estimate_advantages=stages.broadcast,
    policy_loss=policy_loss,
    reducer=stages.token_mean,
    traits=Traits(global_token_loss=True),
)
