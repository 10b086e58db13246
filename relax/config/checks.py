"""What settings must not contradict: each rule once, asked of every configuration however it was given."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

import attrs

from relax.config import trait_checks
from relax.config.record import REWARD_HOOKS, Config, config_options
from relax_core import Traits

# Settings whose feature the runtime does not have yet: any value but the default is refused with this text. Whoever
# builds the feature deletes its line.
UNAVAILABLE: Final[Mapping[str, str]] = {
    "hybrid": "not available yet; leave it out: rollout and training take turns",
    "fully_async": "not available yet; leave it out: rollout and training take turns",
    "max_staleness": "not available yet; leave it at 0: samples are trained on by the weights that sampled them",
    "num_iters_per_train_update": "not available yet; leave it at 1: a batch reaches the trainer whole",
    "debug_rollout_only": "not available yet; 'relax sample' and 'relax eval' sample without training",
    "debug_train_only": "not available yet; '--loss-type sft' trains without sampling",
}

# Settings that do nothing unless a switch is on.
DEPENDENT: Final[Mapping[str, str]] = {
    "kl_loss_coef": "use_kl_loss",
    "tis_clip": "use_tis",
    "tis_clip_low": "use_tis",
    "opsm_delta": "use_opsm",
    "max_tokens_per_gpu": "use_dynamic_batch_size",
}


@attrs.frozen
class Check:
    """A rule that reads `fields` and, where it belongs to one, a trait; `faults` yields a line for each thing wrong."""

    rule: str
    fields: tuple[str, ...]
    faults: Callable[[Config, Traits], Iterator[str]]
    trait: str | None = None


def faults_of(config: Config, *, without: Collection[str] = ()) -> list[str]:
    """Everything the rules find, but for rules that read a field named in `without` (it has no valid value)."""
    traits = config.algorithm.traits
    return [
        fault
        for check in CHECKS
        if not {*check.fields, *(("advantage_estimator",) if check.trait else ())} & set(without)
        for fault in check.faults(config, traits)
    ]


def available(config: Config, traits: Traits) -> Iterator[str]:
    """Only what the runtime can do is asked of it."""
    for option in config_options():
        value = getattr(config, option.name)
        if option.name in UNAVAILABLE and value != option.default:
            shown = "" if value is True else f" {value}"
            yield f"{option.flag}{shown}: {UNAVAILABLE[option.name]}"


def effective(config: Config, traits: Traits) -> Iterator[str]:
    """Nothing is set that has no effect."""
    for option in config_options():
        switch = DEPENDENT.get(option.name)
        value = getattr(config, option.name)
        if switch and value != option.default and not getattr(config, switch):
            yield f"{option.flag} {value}: has no effect without --{switch.replace('_', '-')}"


def engine_precision(config: Config, traits: Traits) -> Iterator[str]:
    """Transformer Engine's attention has no float32."""
    if config.transformer_impl == "transformer_engine" and not config.bf16:
        yield "--transformer-impl transformer_engine: its attention computes in bfloat16; add --bf16"


def one_mode(config: Config, traits: Traits) -> Iterator[str]:
    """At most one of colocate, hybrid and fully async."""
    chosen = [f"--{mode.replace('_', '-')}" for mode in ("colocate", "hybrid", "fully_async") if getattr(config, mode)]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other"


def one_debug_switch(config: Config, traits: Traits) -> Iterator[str]:
    """Not both debug switches."""
    if config.debug_rollout_only and config.debug_train_only:
        yield "--debug-rollout-only and --debug-train-only exclude each other"


def async_normalization(config: Config, traits: Traits) -> Iterator[str]:
    """No normalization over a batch that is complete nowhere."""
    if config.fully_async and config.normalize_advantages:
        yield "--fully-async and --normalize-advantages exclude each other: no role sees the whole batch"


def one_kl_term(config: Config, traits: Traits) -> Iterator[str]:
    """KL in the reward or in the loss, not both."""
    if config.kl_coef > 0 and config.kl_loss_coef > 0:
        yield f"--kl-coef {config.kl_coef} and --kl-loss-coef {config.kl_loss_coef} exclude each other"


def read_kl(config: Config, traits: Traits) -> Iterator[str]:
    """A KL penalty in the reward is given to algorithms that read it: those with this hyperparameter."""
    reads = "kl_coef" in config.hyperparameter_values()
    if config.kl_coef > 0 and not reads and traits.reward_kl != "forbidden":
        name = config.advantage_estimator
        yield f"--kl-coef {config.kl_coef}: has no effect, since {name} rewards whole responses; see --use-kl-loss"


def kl_to_estimate(config: Config, traits: Traits) -> Iterator[str]:
    """An estimator is chosen where there is a KL."""
    if config.kl_loss_type != "k1" and not config.use_kl_loss and config.kl_coef == 0:
        yield f"--kl-loss-type {config.kl_loss_type}: has no effect without --use-kl-loss or --kl-coef"


def batches(config: Config, traits: Traits) -> Iterator[str]:
    """A rollout divides into its optimizer batches, and an explicit batch size agrees."""
    samples, steps = config.samples_per_rollout, config.num_steps_per_rollout
    product = f"--rollout-batch-size {config.rollout_batch_size} x --n-samples-per-prompt {config.n_samples_per_prompt}"
    if samples % steps:
        yield f"--num-steps-per-rollout {steps}: does not divide the {samples} samples of a rollout ({product})"
    elif config.global_batch_size != samples // steps:
        yield (
            f"--global-batch-size {config.global_batch_size}: {product} / --num-steps-per-rollout {steps} gives "
            f"{samples // steps}; leave it out"
        )


def whole_groups(config: Config, traits: Traits) -> Iterator[str]:
    """A group is never split between optimizer steps, so a rollout has no more steps than prompts."""
    steps, prompts = config.num_steps_per_rollout, config.rollout_batch_size
    if steps > prompts and config.loss_type != "sft":
        yield f"--num-steps-per-rollout {steps}: more than the {prompts} groups of a rollout (--rollout-batch-size)"


def heads(config: Config, traits: Traits) -> Iterator[str]:
    """Query heads divide into groups, and a head's width into pairs."""
    if config.num_attention_heads % config.num_query_groups:
        yield f"--num-query-groups {config.num_query_groups}: does not divide {config.num_attention_heads} heads"
    if config.kv_channels % 2:
        yield f"--kv-channels {config.kv_channels}: must be even, since rotary embeddings turn pairs"


def room(config: Config, traits: Traits) -> Iterator[str]:
    """A response leaves room for its prompt."""
    if config.rollout_max_response_len >= config.max_position_embeddings:
        yield (
            f"--rollout-max-response-len {config.rollout_max_response_len}: leaves no room for a prompt within "
            f"--max-position-embeddings {config.max_position_embeddings}"
        )


def token_budget(config: Config, traits: Traits) -> Iterator[str]:
    """A budget of tokens holds the longest sequence."""
    budget, longest = config.max_tokens_per_gpu, config.max_position_embeddings
    if budget is None:
        if config.use_dynamic_batch_size:
            yield "--max-tokens-per-gpu is missing: --use-dynamic-batch-size fills a pass up to that many tokens"
    elif budget < longest:
        yield f"--max-tokens-per-gpu {budget}: less than the longest sequence (--max-position-embeddings {longest})"


def function_paths(config: Config, traits: Traits) -> Iterator[str]:
    """A function of the user's own is named as module.function."""
    for field in FUNCTIONS:
        path = getattr(config, field)
        if path is None or (field == "dynamic_sampling_filter_path" and path == "signal"):
            continue
        names = path.split(".")
        if len(names) < 2 or not all(name.isidentifier() for name in names):
            yield f"--{field.replace('_', '-')} {path}: expected module.function, for instance my_rewards.score"


def data(config: Config, traits: Traits) -> Iterator[str]:
    """What is trained on comes from a recipe or from the user, and has a reward."""
    sft = config.loss_type == "sft"
    needed = ["sft_data"] if sft else ["prompt_data", "custom_rm_path"]
    if config.warm_start_steps and not sft:
        needed.append("sft_data")
    if config.recipe is None:
        for field in needed:
            if getattr(config, field) is None:
                yield f"--{field.replace('_', '-')} is missing: a run without a recipe brings its own"
    if config.reward_key is None and not sft:
        use = "is shown beside the components" if traits.reads_components else "is trained on"
        yield f"--reward-key is missing: it names the number of the reward mapping that {use}"


def inputs_exist(config: Config, traits: Traits) -> Iterator[str]:
    """Data files are files, a tokenizer is a directory."""
    for field in ("prompt_data", "eval_prompt_data", "sft_data"):
        path = getattr(config, field)
        if path is not None and not path.is_file():
            yield f"--{field.replace('_', '-')} {path}: {'is a directory' if path.is_dir() else 'no such file'}"
    if config.tokenizer is not None and not config.tokenizer.is_dir():
        yield f"--tokenizer {config.tokenizer}: no such directory"


def output_is_free(config: Config, traits: Traits) -> Iterator[str]:
    """A run never writes over another."""
    if config.output is not None and config.output.is_dir() and any(config.output.iterdir()):
        yield f"--output {config.output}: not empty; 'relax train --resume {config.output}' continues a run"
    elif config.output is not None and config.output.exists() and not config.output.is_dir():
        yield f"--output {config.output}: is a file"


FUNCTIONS: Final = (
    "custom_rm_path",
    *REWARD_HOOKS,
    "dynamic_sampling_filter_path",
)
_ON_POLICY: Final = ("num_steps_per_rollout", "max_staleness", "num_iters_per_train_update")
_COMPONENTS: Final = ("gdpo_reward_keys", "gdpo_reward_weights")
_BATCH: Final = ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout", "global_batch_size")

CHECKS: Final[tuple[Check, ...]] = (
    Check(
        "normalized advantages", ("normalize_advantages",), trait_checks.normalized_advantages, "normalize_advantages"
    ),
    Check(
        "normalized rewards", ("disable_rewards_normalization",), trait_checks.normalized_rewards, "normalize_rewards"
    ),
    Check("group size", ("n_samples_per_prompt",), trait_checks.group_size, "min_group_size"),
    Check(
        "reward components",
        ("gdpo_reward_keys", "gdpo_reward_weights"),
        trait_checks.reward_components,
        "reads_components",
    ),
    Check("components by name", ("gdpo_reward_keys",), trait_checks.component_names, "component_names"),
    Check("reward hooks", REWARD_HOOKS, trait_checks.reward_hooks, "allows_reward_hooks"),
    Check("KL in the reward", ("kl_coef",), trait_checks.reward_kl, "reward_kl"),
    Check("KL in the loss", ("use_kl_loss", "kl_loss_coef"), trait_checks.kl_loss, "kl_loss"),
    Check("KL estimator", ("use_kl_loss", "kl_coef", "kl_loss_type"), trait_checks.kl_estimator, "kl_estimator"),
    Check("token loss", ("calculate_per_token_loss",), trait_checks.token_loss, "global_token_loss"),
    Check("on-policy", _ON_POLICY, trait_checks.on_policy, "on_policy"),
    Check("complete batch", ("num_iters_per_train_update",), trait_checks.complete_batch, "complete_batch"),
    Check("critic", ("hybrid", "fully_async"), trait_checks.critic, "needs_critic"),
    Check("Transformer Engine", ("transformer_impl", "bf16"), engine_precision),
    Check("one mode", ("colocate", "hybrid", "fully_async"), one_mode),
    Check("one debug switch", ("debug_rollout_only", "debug_train_only"), one_debug_switch),
    Check("complete batches", ("fully_async", "normalize_advantages"), async_normalization),
    Check("one KL term", ("kl_coef", "kl_loss_coef"), one_kl_term),
    Check("KL that is read", ("kl_coef", "advantage_estimator"), read_kl),
    Check("KL to estimate", ("kl_loss_type", "kl_coef", "use_kl_loss"), kl_to_estimate),
    Check("batches", _BATCH, batches),
    Check("whole groups", ("num_steps_per_rollout", "rollout_batch_size", "loss_type"), whole_groups),
    Check("heads", ("num_attention_heads", "num_query_groups", "kv_channels"), heads),
    Check("room for the prompt", ("rollout_max_response_len", "max_position_embeddings"), room),
    Check("token budget", ("use_dynamic_batch_size", "max_tokens_per_gpu", "max_position_embeddings"), token_budget),
    Check("function paths", FUNCTIONS, function_paths),
    Check("data", ("recipe", "prompt_data", "sft_data", "custom_rm_path", "reward_key", "warm_start_steps"), data),
    Check("inputs exist", ("prompt_data", "eval_prompt_data", "sft_data", "tokenizer"), inputs_exist),
    Check("output is free", ("output",), output_is_free),
    Check("effective settings", tuple(DEPENDENT), effective),
    Check("available features", (), available),
)
