"""GDPO: every reward component is normalized in its group by itself, then their sum over the optimizer batch.

Group reward-Decoupled Policy Optimization, arXiv 2601.05242. Where GRPO sums the components first, so that the one with
the largest spread decides, each component here has the influence that its weight gives it.

Use it wherever two or more rewards of unlike scale or spread matter at once, such as correctness, format and length.
With one reward, take GRPO.
"""

import attrs
from jaxtyping import Float, Float64, Int
from torch import Tensor

from relax_core import advantages, rewards
from relax_core.algorithm import Advantages, Algorithm, Traits
from relax_core.algorithms import stages
from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.collectives import Reduce, Segment, local, whole_batch
from relax_core.hyperparameters import Clip, hyperparameter


@attrs.frozen(kw_only=True)
class Hyperparameters(Clip):
    """Component weights and clip range."""

    gdpo_reward_weights: tuple[float, ...] = hyperparameter(
        (), "One weight for each reward key, in their order (default: 1 each).", check=rewards.weights_fault
    )


@checked
def normalize_rewards(
    hyperparameters: Hyperparameters,
    reward_matrix: Float[Tensor, "samples components"],
    groups: Int[Tensor, " samples"],
) -> Float64[Tensor, " samples"]:
    """Steps 1 and 2, see `rewards.decoupled`.

    Raises:
        ValueError: fewer than two components, and what `rewards.decoupled` and `rewards.weight_vector` raise.
    """
    components = reward_matrix.shape[1]
    if components < 2:
        raise ValueError(f"gdpo needs at least 2 reward components, got {components}; for one, use grpo")
    weights = rewards.weight_vector(hyperparameters.gdpo_reward_weights, components)
    return rewards.decoupled(reward_matrix, groups, weights.to(reward_matrix.device))


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
    """Step 3: whitened over each optimizer batch, then spread over the tokens. See `advantages.whiten_samples`."""
    whitened = advantages.whiten_samples(scores, tokens, segment=segment, reduce=reduce)
    spread = advantages.broadcast(whitened, tokens)
    return Advantages(spread, spread)


GDPO = Algorithm[Hyperparameters](
    name="gdpo",
    hyperparameters=Hyperparameters,
    normalize_rewards=normalize_rewards,
    estimate_advantages=estimate_advantages,
    policy_loss=stages.ppo_clip,
    traits=Traits(
        reads_components=True,
        min_group_size=2,
        normalize_rewards="required",
        normalize_advantages="forbidden",
        allows_reward_hooks=False,
        complete_batch=True,
    ),
)
