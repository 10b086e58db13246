"""What an algorithm's traits ask of a configuration.

A rule yields one line for each thing that is wrong; its docstring is what the documentation says about the trait.
"""

from collections.abc import Iterator

from relax.config.record import REWARD_HOOKS, Config
from relax_core import Traits


def normalized_advantages(config: Config, traits: Traits) -> Iterator[str]:
    """required: --normalize-advantages is needed; forbidden: it is refused."""
    name = config.advantage_estimator
    if traits.normalize_advantages == "required" and not config.normalize_advantages:
        yield f"--normalize-advantages is missing: {name} needs normalized advantages (trait normalize_advantages)"
    if traits.normalize_advantages == "forbidden" and config.normalize_advantages:
        yield f"--normalize-advantages: {name} allows no normalization beyond its own (trait normalize_advantages)"


def normalized_rewards(config: Config, traits: Traits) -> Iterator[str]:
    """required: --disable-rewards-normalization is refused."""
    if traits.normalize_rewards == "required" and config.disable_rewards_normalization:
        name = config.advantage_estimator
        yield f"--disable-rewards-normalization: {name} is defined on normalized rewards (trait normalize_rewards)"


def group_size(config: Config, traits: Traits) -> Iterator[str]:
    """--n-samples-per-prompt is at least this."""
    if config.n_samples_per_prompt < traits.min_group_size:
        yield (
            f"--n-samples-per-prompt {config.n_samples_per_prompt}: {config.advantage_estimator} compares the samples "
            f"of a prompt and needs at least {traits.min_group_size} (trait min_group_size)"
        )


def reward_components(config: Config, traits: Traits) -> Iterator[str]:
    """yes: --gdpo-reward-keys names two or more; no: it is refused."""
    keys, name = config.gdpo_reward_keys, config.advantage_estimator
    shown = f"--gdpo-reward-keys {' '.join(keys) or '(none)'}"
    if not traits.reads_components:
        if keys:
            yield f"{shown}: {name} reads one number, named by --reward-key (trait reads_components)"
        return
    if traits.component_names:
        return
    if len(keys) < 2:
        yield f"{shown}: {name} combines several rewards and needs at least 2 keys (trait reads_components)"
    if len(set(keys)) < len(keys):
        yield f"{shown}: a key occurs twice"
    weights = config.hyperparameter_values().get("gdpo_reward_weights")
    if isinstance(weights, tuple) and weights and len(weights) != len(keys):
        numbers = " ".join(map(str, weights))
        yield f"--gdpo-reward-weights {numbers}: {len(weights)} weights for {len(keys)} keys ({shown})"


def component_names(config: Config, traits: Traits) -> Iterator[str]:
    """Where there are any, --reward-key names the first, the run brings the others, --gdpo-reward-keys is refused."""
    keys, names = config.gdpo_reward_keys, traits.component_names
    if keys and names:
        name = config.advantage_estimator
        yield (
            f"--gdpo-reward-keys {' '.join(keys)}: {name} reads {', '.join(names)}; "
            "--reward-key names the first (trait component_names)"
        )


def reward_hooks(config: Config, traits: Traits) -> Iterator[str]:
    """no: --custom-reward-post-process-path and --agentic-custom-advantage-path are refused."""
    for hook in REWARD_HOOKS:
        path = getattr(config, hook)
        if path is not None and not traits.allows_reward_hooks:
            flag, name = "--" + hook.replace("_", "-"), config.advantage_estimator
            yield f"{flag} {path}: the reward stage of {name} cannot be replaced (trait allows_reward_hooks)"


def reward_kl(config: Config, traits: Traits) -> Iterator[str]:
    """required: --kl-coef is above 0; forbidden: it stays 0."""
    name = config.advantage_estimator
    if traits.reward_kl == "required" and config.kl_coef == 0:
        yield f"--kl-coef is missing: {name} keeps the policy near the reference by it (trait reward_kl)"
    if traits.reward_kl == "forbidden" and config.kl_coef > 0:
        yield f"--kl-coef {config.kl_coef}: {name} has no place for a KL penalty in the reward (trait reward_kl)"


def kl_loss(config: Config, traits: Traits) -> Iterator[str]:
    """required: --use-kl-loss with a --kl-loss-coef above 0; forbidden: --use-kl-loss is refused."""
    name = config.advantage_estimator
    if traits.kl_loss == "required" and not (config.use_kl_loss and config.kl_loss_coef > 0):
        lacking = "--kl-loss-coef" if config.use_kl_loss else "--use-kl-loss"
        yield f"{lacking} is missing: {name} keeps the policy near the reference by it (trait kl_loss)"
    if traits.kl_loss == "forbidden" and config.use_kl_loss:
        yield f"--use-kl-loss: {name} has no place for a KL term in the loss (trait kl_loss)"


def kl_estimator(config: Config, traits: Traits) -> Iterator[str]:
    """Where there is a KL term, --kl-loss-type is this."""
    kind = traits.kl_estimator
    if (config.use_kl_loss or config.kl_coef > 0) and kind not in ("any", config.kl_loss_type):
        name = config.advantage_estimator
        yield f"--kl-loss-type {config.kl_loss_type}: {name} is defined with {kind} (trait kl_estimator)"


def token_loss(config: Config, traits: Traits) -> Iterator[str]:
    """yes: --calculate-per-token-loss is needed."""
    if traits.global_token_loss and not config.calculate_per_token_loss:
        name = config.advantage_estimator
        yield f"--calculate-per-token-loss is missing: {name} averages over all tokens (trait global_token_loss)"


def on_policy(config: Config, traits: Traits) -> Iterator[str]:
    """yes: --num-steps-per-rollout 1, --max-staleness 0, --num-iters-per-train-update 1."""
    needed = {"num_steps_per_rollout": 1, "max_staleness": 0, "num_iters_per_train_update": 1}
    for field, value in needed.items():
        given = getattr(config, field)
        if traits.on_policy and given != value:
            flag = "--" + field.replace("_", "-")
            yield f"{flag} {given}: {config.advantage_estimator} is on-policy only and needs {value} (trait on_policy)"


def complete_batch(config: Config, traits: Traits) -> Iterator[str]:
    """yes: --num-iters-per-train-update 1, so that an optimizer batch arrives in one piece."""
    pieces = config.num_iters_per_train_update
    if traits.complete_batch and pieces > 1:
        name = config.advantage_estimator
        yield f"--num-iters-per-train-update {pieces}: {name} needs the whole optimizer batch (trait complete_batch)"


def critic(config: Config, traits: Traits) -> Iterator[str]:
    """yes: --hybrid and --fully-async are refused."""
    if traits.needs_critic and config.mode != "colocate":
        name = config.advantage_estimator
        yield f"--{config.mode.replace('_', '-')}: {name} needs a critic, which only colocate has (trait needs_critic)"
