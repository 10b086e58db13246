"""Stages that more than one algorithm uses, in the form the record takes.

What only hands on to a function of `losses` is not `checked` a second time: it runs once for every micro-batch.
"""

from jaxtyping import Float, Float64, Int
from torch import Tensor

from relax_core import advantages, losses, reducers, rewards
from relax_core.algorithm import Advantages, TokenLoss
from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.collectives import Reduce, Segment, local, whole_batch
from relax_core.hyperparameters import Clip, GroupScale


@checked
def group_mean_std(
    hyperparameters: GroupScale, reward_matrix: Float[Tensor, "samples components"], groups: Int[Tensor, " samples"]
) -> Float[Tensor, " samples"]:
    """A scalar reward's group mean/std, in float32. See `rewards.group_mean_std`."""
    scalar = rewards.single_reward(reward_matrix).float()
    return rewards.group_mean_std(scalar, groups, scale=not hyperparameters.disable_grpo_std_normalization)


@checked
def group_mean(
    hyperparameters: object, reward_matrix: Float[Tensor, "samples components"], groups: Int[Tensor, " samples"]
) -> Float[Tensor, " samples"]:
    """A scalar reward less its group's mean, in float32. See `rewards.group_mean_std`."""
    return rewards.group_mean_std(rewards.single_reward(reward_matrix).float(), groups, scale=False)


@checked
def scalar(
    hyperparameters: object, reward_matrix: Float[Tensor, "samples components"], groups: Int[Tensor, " samples"]
) -> Float[Tensor, " samples"]:
    """A scalar reward as it is, in float32."""
    return rewards.single_reward(reward_matrix).float()


@checked
def leave_one_out(
    hyperparameters: object, reward_matrix: Float[Tensor, "samples components"], groups: Int[Tensor, " samples"]
) -> Float[Tensor, " samples"]:
    """A scalar reward less the mean of its group's others, in float32. See `rewards.leave_one_out`."""
    return rewards.leave_one_out(rewards.single_reward(reward_matrix).float(), groups)


@checked
def broadcast(
    hyperparameters: object,
    scores: Float[Tensor, " samples"],
    tokens: Tokens,
    *,
    kl: Float[Tensor, " tokens"] | None = None,
    values: Float[Tensor, " tokens"] | None = None,
    segment: Segment = whole_batch,
    reduce: Reduce = local,
) -> Advantages:
    """Every response token carries its sample's score, as advantage and as return."""
    spread = advantages.broadcast(scores, tokens)
    return Advantages(spread, spread)


@checked
def broadcast_valid(
    hyperparameters: object,
    scores: Float[Tensor, " samples"],
    tokens: Tokens,
    *,
    kl: Float[Tensor, " tokens"] | None = None,
    values: Float[Tensor, " tokens"] | None = None,
    segment: Segment = whole_batch,
    reduce: Reduce = local,
) -> Advantages:
    """Every valid token carries its sample's score, as advantage and as return; 0 elsewhere."""
    spread = advantages.broadcast_valid(scores, tokens)
    return Advantages(spread, spread)


def ppo_clip(
    hyperparameters: Clip,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """The clipped surrogate on token ratios. See `losses.ppo_clip`."""
    return losses.ppo_clip(
        log_probs,
        old_log_probs,
        advantages,
        tokens,
        eps_clip=hyperparameters.eps_clip,
        eps_clip_high=hyperparameters.eps_clip_high,
        eps_clip_c=hyperparameters.eps_clip_c,
    )


def reinforce(
    hyperparameters: object,
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    tokens: Tokens,
) -> TokenLoss:
    """The plain policy gradient. See `losses.reinforce`."""
    return losses.reinforce(log_probs, old_log_probs, advantages, tokens)


def token_mean(hyperparameters: object, tokens: Tokens, *, reduce: Reduce = local) -> Float64[Tensor, " tokens"]:
    """Mean over all tokens. See `reducers.token_mean`."""
    return reducers.token_mean(tokens, reduce=reduce)
