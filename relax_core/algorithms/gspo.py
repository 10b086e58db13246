"""GSPO: importance is weighed and clipped response by response, as rewards are given. arXiv 2507.18071.

The ratio is the geometric mean of the tokens' ratios. The paper clips it to 1 - 3e-4 and 1 + 4e-4.

Use it for mixtures of experts and long responses, whose token ratios are too noisy to clip. It needs clip ranges of its
own: the default of 0.2 hardly ever clips.
"""

import attrs
from jaxtyping import Float
from torch import Tensor

from relax_core import losses
from relax_core.algorithm import Algorithm, TokenLoss, Traits
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.hyperparameters import Clip, GroupScale


@attrs.frozen(kw_only=True)
class Hyperparameters(GroupScale, Clip):
    """Group scale and clip range, of the whole response's ratio: far narrower ones than a token's make sense."""


def policy_loss(
    hyperparameters: Hyperparameters,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """See `losses.gspo`."""
    return losses.gspo(
        log_probs,
        old_log_probs,
        advantages,
        tokens,
        eps_clip=hyperparameters.eps_clip,
        eps_clip_high=hyperparameters.eps_clip_high,
        eps_clip_c=hyperparameters.eps_clip_c,
    )


GSPO = Algorithm[Hyperparameters](
    name="gspo",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean_std,
    estimate_advantages=stages.broadcast,
    policy_loss=policy_loss,
    traits=Traits(ratio_level="sequence", needs_full_log_probs=True),
)
