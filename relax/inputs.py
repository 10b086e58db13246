"""What an objective reads of a rollout, what the roles of a run supply, and the proof that the one covers the other."""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Protocol

from relax.config import Config
from relax.errors import ConfigError


class Input(Enum):
    """Something that advantages or losses are made of, and that some role must bring."""

    REWARD = "one reward for each sample"
    COMPONENTS = "several reward components for each sample"
    LENGTH = "the length of each response"
    GREEDY_REWARD = "the reward of the greedy response to each prompt"
    GROUPS = "the samples of a prompt together"
    OPTIMIZER_BATCH = "the samples of an optimizer batch together"
    WHOLE_RESPONSES = "log-probs of whole responses"
    ROLLOUT_LOG_PROBS = "the log-probs that the engine sampled with"
    OLD_LOG_PROBS = "log-probs of the policy before the rollout's first step"
    REFERENCE_LOG_PROBS = "log-probs of the reference"
    VALUES = "the critic's values"


class Supplier(Protocol):
    """A role, wherever it runs."""

    @property
    def supplies(self) -> frozenset[Input]:
        """What it brings, as it was built."""
        ...


def reads(config: Config) -> Mapping[Input, str]:
    """What the configured objective reads, and which trait or flag asks for it."""
    if config.loss_type == "sft":
        return {}
    traits = config.algorithm.traits
    several = config.num_steps_per_rollout > 1
    names = traits.component_names or (("components",) if traits.reads_components else ("reward",))
    asked = {
        **{Input[name.upper()]: "its first stage" for name in names},
        Input.GROUPS: "trait min_group_size" if traits.min_group_size > 1 else None,
        Input.OPTIMIZER_BATCH: _first(
            {"trait complete_batch": traits.complete_batch, "--normalize-advantages": config.normalize_advantages}
        ),
        Input.WHOLE_RESPONSES: "trait needs_full_log_probs" if traits.needs_full_log_probs else None,
        Input.ROLLOUT_LOG_PROBS: "--use-tis" if config.use_tis else None,
        Input.OLD_LOG_PROBS: _first({"--num-steps-per-rollout": several, "--kl-coef": config.kl_coef > 0}),
        Input.REFERENCE_LOG_PROBS: _first({"--use-kl-loss": config.use_kl_loss, "--kl-coef": config.kl_coef > 0}),
        Input.VALUES: "trait needs_critic" if traits.needs_critic else None,
    }
    return {wanted: reason for wanted, reason in asked.items() if reason is not None}


def prove(config: Config, runtime: str, roles: Iterable[Supplier]) -> None:
    """Raises ConfigError that names each input that the objective reads and none of the `roles` supplies."""
    supplied = frozenset[Input]().union(*(role.supplies for role in roles))
    faults = [
        f"--advantage-estimator {config.advantage_estimator}: reads {wanted.value} ({reason}), "
        f"which no role of the {runtime} runtime supplies"
        for wanted, reason in reads(config).items()
        if wanted not in supplied
    ]
    if faults:
        raise ConfigError(faults)


def _first(reasons: Mapping[str, bool]) -> str | None:
    return next((reason for reason, holds in reasons.items() if holds), None)
