"""GPG: the plain policy gradient on group-centred rewards, scaled up for the samples that have none. arXiv 2504.02546.

Groups that are all right or all wrong give no gradient, but count in the mean; alpha = samples / samples that give one
makes up for them. To normalize advantages would undo it.

Use it as the simplest thing that may work, with one optimizer step for each rollout, where many groups are all right or
all wrong.
"""

import attrs
from jaxtyping import Float
from torch import Tensor

from relax_core import advantages
from relax_core.algorithm import Advantages, Algorithm, Traits
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.collectives import Reduce, Segment, local, whole_batch


@attrs.frozen(kw_only=True)
class Hyperparameters:
    """None."""


# Not `checked`: one rank's malformed scores must raise on every rank, so they are looked at where ranks agree.
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
    """Scores times alpha of their optimizer batch, spread over the tokens. See `advantages.scale_by_signal`."""
    scaled = advantages.scale_by_signal(scores, tokens, segment=segment, reduce=reduce)
    spread = advantages.broadcast(scaled, tokens)
    return Advantages(spread, spread)


GPG = Algorithm[Hyperparameters](
    name="gpg",
    hyperparameters=Hyperparameters,
    normalize_rewards=stages.group_mean,
    estimate_advantages=estimate_advantages,
    policy_loss=stages.reinforce,
    traits=Traits(normalize_advantages="forbidden", on_policy=True, complete_batch=True),
)
