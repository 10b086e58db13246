"""What an algorithm is: a record of three pure functions and the facts that a runtime asks about."""

import inspect
from collections.abc import Callable, Mapping
from typing import Generic, Literal, Protocol, TypeVar, get_args, get_origin, runtime_checkable

import attrs
from jaxtyping import Float, Float64, Int
from torch import Tensor

from relax_core import reducers
from relax_core.batch import Tokens
from relax_core.checks import checked_record
from relax_core.collectives import Reduce, Segment, local, whole_batch

H = TypeVar("H")
H_contra = TypeVar("H_contra", contravariant=True)


@checked_record
@attrs.frozen(eq=False)
class Advantages:
    """What stage 2 returns: one number for each token, twice.

    Attributes:
        advantages: what the policy is trained towards.
        returns: what a critic is trained towards.
    """

    advantages: Float[Tensor, " tokens"]
    returns: Float[Tensor, " tokens"]


@checked_record
@attrs.frozen(eq=False)
class TokenLoss:
    """What stage 3 returns. Masked tokens hold 0 in loss and metrics, whatever came in.

    Attributes:
        loss: of each token, before a reducer weighs it.
        metrics: detached, [tokens] or scalar each.
    """

    loss: Float[Tensor, " tokens"]
    metrics: Mapping[str, Float[Tensor, "..."]]


@runtime_checkable
class NormalizeRewards(Protocol[H_contra]):
    """Stage 1: rewards [samples, components] and group ids [samples] -> scores [samples]."""

    def __call__(
        self,
        hyperparameters: H_contra,
        rewards: Float[Tensor, "samples components"],
        groups: Int[Tensor, " samples"],
        /,
    ) -> Float[Tensor, " samples"]:
        """The scores, in the samples' order."""


@runtime_checkable
class EstimateAdvantages(Protocol[H_contra]):
    """Stage 2: scores [samples] -> advantages and returns [tokens].

    `kl` (of each token against the reference policy) and `values` (of the critic) are [tokens], for the algorithms
    whose traits ask for them. `segment` and `reduce`: see `relax_core.collectives`.
    """

    def __call__(
        self,
        hyperparameters: H_contra,
        scores: Float[Tensor, " samples"],
        tokens: Tokens,
        /,
        *,
        kl: Float[Tensor, " tokens"] | None = None,
        values: Float[Tensor, " tokens"] | None = None,
        segment: Segment = whole_batch,
        reduce: Reduce = local,
    ) -> Advantages:
        """What policy and critic are trained towards, in the tokens' order."""


@runtime_checkable
class PolicyLoss(Protocol[H_contra]):
    """Stage 3: log-probs and advantages [tokens] -> a loss for each token. Gradient flows through `log_probs` only."""

    def __call__(
        self,
        hyperparameters: H_contra,
        log_probs: Float[Tensor, " tokens"],
        old_log_probs: Float[Tensor, " tokens"],
        advantages: Float[Tensor, " tokens"],
        tokens: Tokens,
        /,
    ) -> TokenLoss:
        """The losses and the metrics that trait `loss_metrics` names."""


@runtime_checkable
class ValueLoss(Protocol[H_contra]):
    """The critic's loss: values, old values and returns [tokens] -> a loss for each token."""

    def __call__(
        self,
        hyperparameters: H_contra,
        values: Float[Tensor, " tokens"],
        old_values: Float[Tensor, " tokens"],
        returns: Float[Tensor, " tokens"],
        tokens: Tokens,
        /,
    ) -> TokenLoss:
        """The losses, with metrics of their own."""


@runtime_checkable
class Reducer(Protocol[H_contra]):
    """The weight of each token in the loss, from the geometry of a whole optimizer batch. See `relax_core.reducers`."""

    def __call__(
        self, hyperparameters: H_contra, tokens: Tokens, /, *, reduce: Reduce = local
    ) -> Float64[Tensor, " tokens"]:
        """The weights; 0 where a token does not count."""


def sample_mean(hyperparameters: object, tokens: Tokens, *, reduce: Reduce = local) -> Float64[Tensor, " tokens"]:
    """Mean over samples of the mean over tokens: what an algorithm reduces by unless it says otherwise."""
    return reducers.sample_mean(tokens, reduce=reduce)


RatioLevel = Literal["token", "sequence"]
"""Whose probabilities a ratio is of: a token's, or the whole response's."""
AdvantageNormalization = Literal["whiten", "token_global"]
"""By name: `relax_core.advantages.whiten` or `token_global`."""
Need = Literal["optional", "required", "forbidden"]
"""What an algorithm makes of something that can be switched on."""
KlEstimator = Literal["any", "k1", "k2", "k3", "low_var_kl"]
"""An estimator of `relax_core.kl`, or whichever a run chooses."""
ComponentName = Literal["reward", "length", "greedy_reward"]
"""The reward itself, the response's length in tokens, the reward of the greedy response to the same prompt."""
RewardNeed = Literal["optional", "required"]
"""What an algorithm makes of its own first stage, which can be switched off."""


@attrs.frozen(kw_only=True)
class Traits:
    """Facts about an algorithm. What is not declared asserts its default, which is what GRPO has.

    Raises:
        ValueError: a value outside its field's set, or two fields that contradict each other.
    """

    ratio_level: RatioLevel = "token"
    """Is the probability ratio that of a token, or of the whole response?"""
    needs_critic: bool = False
    """Does stage 2 read `values`?"""
    needs_full_log_probs: bool = False
    """Does the loss of a token read log-probs of the rest of its response?"""
    advantage_normalization: AdvantageNormalization = "whiten"
    """Which normalization of advantages over the batch is the algorithm's?"""
    normalize_advantages: Need = "optional"
    """Is that normalization a choice, a must, or wrong?"""
    normalize_rewards: RewardNeed = "optional"
    """May stage 1 be switched off?"""
    min_group_size: int = 1
    """How many samples must a prompt have at least?"""
    reads_components: bool = False
    """Does stage 1 read several reward components, or one scalar?"""
    component_names: tuple[ComponentName, ...] = ()
    """Which components are they, in order, where that is not the user's choice?"""
    allows_reward_hooks: bool = True
    """May a user's hook replace stage 1?"""
    reward_kl: Need = "optional"
    """Does a KL penalty in the reward have a place?"""
    kl_loss: Need = "optional"
    """Does a KL term in the loss?"""
    kl_estimator: KlEstimator = "any"
    """Which estimator of that KL is the algorithm's?"""
    global_token_loss: bool = False
    """Must the loss be divided by the number of tokens of the whole optimizer batch?"""
    on_policy: bool = False
    """Is the loss right only for samples of the very policy that is updated?"""
    complete_batch: bool = False
    """Does stage 2 need every sample of an optimizer batch?"""
    whole_batch_loss: bool = False
    """Does the loss of a token read log-probs of the whole optimizer batch, to choose among its tokens?"""
    supports_context_parallel: bool = True
    """Is the loss right where a response is spread over several ranks?"""
    loss_metrics: tuple[str, ...] = ("ppo_kl", "clipfrac")
    """Names of the metrics that the loss returns."""

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(type(self)):
            value, choices = (
                getattr(self, field.name),
                get_args(field.type) if get_origin(field.type) is Literal else (),
            )
            if value not in choices if choices else type(value) is not (get_origin(field.type) or field.type):
                raise ValueError(f"trait {field.name} cannot be {value!r}; it is one of {choices or field.type}")
        if self.min_group_size < 1:
            raise ValueError(f"trait min_group_size cannot be {self.min_group_size!r}; a group has at least 1 sample")
        known = get_args(ComponentName)
        if unknown := set(self.component_names) - set(known):
            raise ValueError(f"trait component_names cannot have {sorted(unknown)}; known are {known}")
        if self.component_names and not (self.reads_components and self.component_names[0] == "reward"):
            raise ValueError(
                f"trait component_names begins with 'reward', and reads_components is True; got {self.component_names} "
                f"and {self.reads_components}"
            )
        if self.normalize_advantages == "forbidden" and self.advantage_normalization != "whiten":
            raise ValueError(
                f"trait advantage_normalization is {self.advantage_normalization!r}, "
                "but normalize_advantages is 'forbidden'"
            )
        if self.reward_kl == self.kl_loss == "required":
            raise ValueError("traits reward_kl and kl_loss are both 'required', but a run has one KL term")
        if self.kl_estimator != "any" and self.reward_kl == self.kl_loss == "forbidden":
            raise ValueError(f"trait kl_estimator is {self.kl_estimator!r}, but every KL term is 'forbidden'")
        if self.ratio_level == "sequence" and not self.needs_full_log_probs:
            raise ValueError("trait ratio_level is 'sequence', but needs_full_log_probs is False")


@attrs.frozen
class Algorithm(Generic[H]):
    """A record of three pure functions, their hyperparameters and their traits.

    Stage functions are module-level functions that take their hyperparameters, so that a record pickles by reference
    and compares equal in another process.

    Attributes:
        name: by which `get_algorithm` and the command line know it.
        hyperparameters: an attrs class; each field is a flag, with its default, help text and check.
        normalize_rewards: stage 1, rewards -> scores.
        estimate_advantages: stage 2, scores -> advantages and returns.
        policy_loss: stage 3, log-probs and advantages -> a loss for each token.
        reducer: the weight of each token's loss.
        value_loss: the critic's loss, of an algorithm that has a critic.
        traits: the facts that a runtime asks about.

    Raises:
        ValueError: hyperparameters that are no attrs class, or a stage that cannot be imported by its name.
    """

    name: str
    hyperparameters: type[H]
    normalize_rewards: NormalizeRewards[H]
    estimate_advantages: EstimateAdvantages[H]
    policy_loss: PolicyLoss[H]
    reducer: Reducer[H] = sample_mean
    value_loss: ValueLoss[H] | None = None
    traits: Traits = Traits()

    def __attrs_post_init__(self) -> None:
        if not attrs.has(self.hyperparameters):
            raise ValueError(f"{self.name}: hyperparameters must be an attrs class, got {self.hyperparameters!r}")
        if self.traits.needs_critic != (self.value_loss is not None):
            given, needs = "given" if self.value_loss else "missing", self.traits.needs_critic
            raise ValueError(f"{self.name}: value_loss is {given}, but trait needs_critic is {needs}")
        stages = ("normalize_rewards", "estimate_advantages", "policy_loss", "reducer")
        for stage in (*stages, *(["value_loss"] if self.value_loss else [])):
            if not _importable(getattr(self, stage)):
                raise ValueError(f"{self.name}: {stage} must be a module-level function, got {getattr(self, stage)!r}")


def _importable(function: Callable[..., object]) -> bool:
    return inspect.isfunction(function) and function.__qualname__.isidentifier()
