"""The effective configuration of a run: one frozen record, and the YAML it is written as."""

# ruff: noqa: RUF009 - `setting` makes attrs fields

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import attrs

from relax.config.options import Option, options_of
from relax.topology import Debug, Mode, Placement, Role, roles
from relax_core import Algorithm, get_algorithm

T = TypeVar("T")
Validator = Callable[[object, "attrs.Attribute[Any]", Any], None]  # of numbers, whose type the field states


def bounded(holds: Callable[[float], bool], wanted: str) -> Validator:
    """A validator: `holds` for the value, or it must be as `wanted` says."""

    def check(_: object, attribute: "attrs.Attribute[Any]", value: float) -> None:
        if not holds(value):
            raise ValueError(f"must be {wanted}, got {value}")

    return check


def at_least(bound: float) -> Validator:
    """A validator: `bound` or more."""
    return bounded(lambda value: value >= bound, f"at least {bound}")


def above(bound: float) -> Validator:
    """A validator: more than `bound`."""
    return bounded(lambda value: value > bound, f"above {bound}")


def below(bound: float) -> Validator:
    """A validator: less than `bound`."""
    return bounded(lambda value: value < bound, f"below {bound}")


def setting(section: str, default: T, help: str, *validators: Validator) -> T:
    """A field that the command line and YAML offer under `section`."""
    metadata = {"section": section, "help": help}
    return attrs.field(default=default, validator=list(validators) or None, metadata=metadata)


REWARD_HOOKS: Final = ("custom_reward_post_process_path", "agentic_custom_advantage_path")
"""What may stand in for an algorithm's reward stage, in the order in which they apply: the first that is set."""

RUN, DATA, MODEL, ROLLOUT = "run", "data", "model", "rollout"
REWARDS, ALGORITHM, LOSS, OPTIMIZER = "rewards", "algorithm", "loss", "optimizer"
WARM_START, KEEPING, PLACEMENT = "warm start", "evaluation and checkpoints", "placement"


def _global_batch_size(config: "Config") -> int:
    return max(1, config.samples_per_rollout // config.num_steps_per_rollout)


@attrs.frozen(kw_only=True)
class Config:
    """Every setting of a run, and `hyperparameters`, an instance of the chosen algorithm's own class.

    Built by `relax.config.configure`, which reports every contradiction; the class itself checks ranges only.
    """

    recipe: str | None = setting(RUN, None, "ready configuration to start from; 'none' with data of your own")
    output: Path | None = setting(RUN, None, "directory of the run; new or empty (default: runs/ and a name)")
    seed: int = setting(RUN, 1234, "decides data order, initial weights and sampling", at_least(0), below(2**63))
    debug_rollout_only: bool = setting(RUN, False, "sample and score, but do not train")
    debug_train_only: bool = setting(RUN, False, "train, but do not sample")

    prompt_data: Path | None = setting(DATA, None, "prompts to train on, JSON lines")
    eval_prompt_data: Path | None = setting(DATA, None, "held-out prompts, JSON lines")
    sft_data: Path | None = setting(DATA, None, "demonstrations (prompt and response) for SFT, JSON lines")
    input_key: str = setting(DATA, "prompt", "key of the prompt, a text or a list of messages, in a line of data")
    apply_chat_template: bool = setting(
        DATA, False, "render prompts with the tokenizer's chat template; a text is one user message"
    )
    tokenizer: Path | None = setting(
        DATA, None, "directory of a Hugging Face tokenizer (default: the checkpoint's, else characters)"
    )

    hf_checkpoint: Path | None = setting(
        MODEL, None, "model to start from: a directory with Hugging Face's config.json and safetensors"
    )
    num_layers: int = setting(MODEL, 4, "transformer layers", at_least(1))
    hidden_size: int = setting(MODEL, 128, "width of the residual stream", at_least(1))
    num_attention_heads: int = setting(MODEL, 4, "query heads", at_least(1))
    num_query_groups: int = setting(MODEL, 2, "key-value heads", at_least(1))
    ffn_hidden_size: int = setting(MODEL, 384, "width inside the feed-forward layers", at_least(1))
    kv_channels: int = setting(MODEL, 32, "width of a head", at_least(1))
    max_position_embeddings: int = setting(MODEL, 256, "longest prompt and response together, in tokens", at_least(2))
    rotary_base: float = setting(MODEL, 10000.0, "base of the rotary embedding", above(0))
    bf16: bool = setting(MODEL, False, "compute in bfloat16; gradients and the optimizer's weights are float32")
    recompute_activations: bool = setting(MODEL, False, "compute layers again for the gradient instead of keeping them")
    transformer_impl: Literal["local", "transformer_engine"] = setting(
        MODEL, "local", "modules of a layer: ours, or Transformer Engine's (on GPUs, with --bf16)"
    )

    rollout_engine: Literal["megatron", "transformers"] = setting(ROLLOUT, "megatron", "what samples the responses")
    rollout_batch_size: int = setting(ROLLOUT, 32, "prompts in a rollout", at_least(1))
    n_samples_per_prompt: int = setting(ROLLOUT, 1, "responses to each prompt: the size of a group", at_least(1))
    num_rollout: int = setting(ROLLOUT, 100, "rollouts in the run", at_least(1))
    rollout_max_response_len: int = setting(ROLLOUT, 64, "longest response, in tokens", at_least(1))
    rollout_temperature: float = setting(ROLLOUT, 1.0, "sampling temperature", above(0))
    dynamic_sampling_filter_path: str | None = setting(
        ROLLOUT, None, "keep a group or replace it: 'signal' asks the algorithm, else your module.function"
    )
    max_resampling: int = setting(ROLLOUT, 3, "rounds of new prompts in place of filtered groups", at_least(0))

    custom_rm_path: str | None = setting(REWARDS, None, "your reward function, as module.function")
    reward_key: str | None = setting(REWARDS, None, "the one number of the reward mapping: what is trained on or shown")
    gdpo_reward_keys: tuple[str, ...] = setting(
        REWARDS, (), "the reward components, for algorithms that read several (trait reads_components)"
    )
    disable_rewards_normalization: bool = setting(REWARDS, False, "train on rewards as they are")
    custom_reward_post_process_path: str | None = setting(REWARDS, None, "your reward stage, as module.function")
    agentic_custom_advantage_path: str | None = setting(REWARDS, None, "your advantages, as module.function")

    advantage_estimator: str = setting(ALGORITHM, "grpo", "the algorithm; see 'relax algorithms'")
    loss_type: Literal["policy_loss", "sft"] = setting(ALGORITHM, "policy_loss", "reinforcement, or plain SFT")
    normalize_advantages: bool = setting(ALGORITHM, False, "normalize advantages over the batch")

    calculate_per_token_loss: bool = setting(LOSS, False, "mean over all tokens, not response by response")
    entropy_coef: float = setting(LOSS, 0.0, "weight of the entropy bonus", at_least(0))
    use_kl_loss: bool = setting(LOSS, False, "add a KL penalty against the reference to the loss")
    kl_loss_coef: float = setting(LOSS, 0.0, "weight of the KL loss", at_least(0))
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = setting(LOSS, "k1", "KL estimator")
    kl_coef: float = setting(LOSS, 0.0, "weight of a KL penalty in the reward", at_least(0))
    use_tis: bool = setting(LOSS, False, "truncated importance sampling: correct for the engine's log-probs")
    tis_clip: float = setting(LOSS, 2.0, "largest importance weight", above(0))
    tis_clip_low: float = setting(LOSS, 0.0, "smallest importance weight", at_least(0))
    use_opsm: bool = setting(LOSS, False, "off-policy sequence masking: drop drifted responses with A < 0")
    opsm_delta: float = setting(LOSS, 1e-4, "mean log-ratio from which a response has drifted", above(0))

    num_steps_per_rollout: int = setting(OPTIMIZER, 1, "optimizer steps on each rollout", at_least(1))
    global_batch_size: int = setting(
        OPTIMIZER,
        attrs.Factory(_global_batch_size, takes_self=True),
        "samples in an optimizer step; follows from the rollout, a contradiction is refused",
        at_least(1),
    )
    micro_batch_size: int = setting(OPTIMIZER, 64, "samples in a forward and backward pass", at_least(1))
    use_dynamic_batch_size: bool = setting(OPTIMIZER, False, "as many samples in a pass as --max-tokens-per-gpu allows")
    max_tokens_per_gpu: int | None = setting(
        OPTIMIZER, None, "tokens in a pass, padding included; needs --use-dynamic-batch-size"
    )
    lr: float = setting(OPTIMIZER, 1e-6, "learning rate", at_least(0))
    critic_lr: float | None = setting(
        OPTIMIZER, None, "learning rate of the critic, for algorithms that have one (default: lr)"
    )
    lr_warmup_fraction: float = setting(
        OPTIMIZER, 0.0, "share of the optimizer steps after which the learning rate is reached", at_least(0), below(1)
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = setting(
        OPTIMIZER, "constant", "decay of the learning rate"
    )
    weight_decay: float = setting(OPTIMIZER, 0.0, "decoupled weight decay", at_least(0))
    adam_beta1: float = setting(OPTIMIZER, 0.9, "decay of Adam's mean", at_least(0), below(1))
    adam_beta2: float = setting(OPTIMIZER, 0.95, "decay of Adam's variance", at_least(0), below(1))
    use_distributed_optimizer: bool = setting(OPTIMIZER, False, "spread its state over the data-parallel ranks")
    clip_grad: float = setting(OPTIMIZER, 1.0, "largest gradient norm; 0: no clipping", at_least(0))

    warm_start_steps: int = setting(WARM_START, 0, "SFT steps before reinforcement", at_least(0))
    warm_start_batch_size: int = setting(WARM_START, 64, "demonstrations in an SFT step", at_least(1))
    warm_start_lr: float = setting(WARM_START, 1e-3, "learning rate of SFT", at_least(0))

    eval_interval: int = setting(KEEPING, 10, "rollouts between evaluations; 0: before and after only", at_least(0))
    eval_samples: int = setting(KEEPING, 256, "held-out problems in an evaluation", at_least(1))
    save_interval: int = setting(KEEPING, 50, "rollouts between checkpoints; 0: at the end only", at_least(0))
    keep_checkpoints: int = setting(KEEPING, 2, "checkpoints to keep", at_least(1))
    async_save: bool = setting(KEEPING, False, "write checkpoints while the training goes on")

    colocate: bool = setting(PLACEMENT, False, "rollout and training take turns on the same workers (the default)")
    hybrid: bool = setting(PLACEMENT, False, "rollout has workers of its own, the rest share the training workers")
    fully_async: bool = setting(PLACEMENT, False, "every role has workers of its own and none waits")
    max_staleness: int = setting(PLACEMENT, 0, "rollouts by which samples may lag behind the weights", at_least(0))
    num_iters_per_train_update: int = setting(PLACEMENT, 1, "pieces in which a batch reaches the trainer", at_least(1))
    tensor_model_parallel_size: int = setting(PLACEMENT, 1, "processes that share each matrix", at_least(1))
    pipeline_model_parallel_size: int = setting(PLACEMENT, 1, "processes that share the layers", at_least(1))
    context_parallel_size: int = setting(PLACEMENT, 1, "processes that share each sequence", at_least(1))
    distributed_timeout_minutes: float = setting(
        PLACEMENT, 10.0, "longest wait of processes for each other, in a collective or at the end of a stage", above(0)
    )
    balance_data: bool = setting(PLACEMENT, False, "even out tokens between data-parallel ranks")
    qkv_format: Literal["bshd", "thd"] = setting(PLACEMENT, "bshd", "padded or packed sequences")

    hyperparameters: attrs.AttrsInstance = attrs.field(
        default=attrs.Factory(
            lambda config: get_algorithm(config.advantage_estimator).hyperparameters(), takes_self=True
        )
    )

    @property
    def name(self) -> str:
        """What a run of this is called where nobody named it: recipe or data, algorithm, seed."""
        source = self.prompt_data or self.sft_data
        data = self.recipe or (source.stem if source else "run")
        return f"{data}-{'sft' if self.loss_type == 'sft' else self.advantage_estimator}-{self.seed}"

    @property
    def algorithm(self) -> Algorithm[Any]:
        """The chosen algorithm; only it knows the type of its hyperparameters."""
        return get_algorithm(self.advantage_estimator)

    @property
    def mode(self) -> Mode:
        """How rollout and training share the workers."""
        return "fully_async" if self.fully_async else "hybrid" if self.hybrid else "colocate"

    @property
    def truly_on_policy(self) -> bool:
        """Whether every sample is trained on by the very weights that sampled it."""
        return self.num_steps_per_rollout == 1 and self.max_staleness == 0 and self.num_iters_per_train_update == 1

    @property
    def roles(self) -> tuple[Role, ...]:
        """What the run is made of, in the order in which it starts."""
        debug: Debug | None = "rollout" if self.debug_rollout_only else "train" if self.debug_train_only else None
        return roles(self.algorithm.traits, Placement(self.mode, self.loss_type, debug, self.truly_on_policy))

    @property
    def needs_reference(self) -> bool:
        """Whether a KL from the policy that reinforcement began with is wanted."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def samples_per_rollout(self) -> int:
        """Prompts times responses."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def reward_keys(self) -> tuple[str, ...]:
        """What the algorithm trains on: the components, or the one scalar."""
        return self.gdpo_reward_keys or ((self.reward_key,) if self.reward_key is not None else ())

    def values(self) -> dict[str, object]:
        """Every setting by name, the algorithm's hyperparameters included."""
        own = {option.name: getattr(self, option.name) for option in config_options()}
        return {**own, **self.hyperparameter_values()}

    def hyperparameter_values(self) -> Mapping[str, object]:
        """The algorithm's hyperparameters by name."""
        return {
            field.name: getattr(self.hyperparameters, field.name) for field in attrs.fields(type(self.hyperparameters))
        }

    def to_yaml(self) -> str:
        """The complete configuration, section by section: `--config` runs it again.

        `output` is left out, since where a run is written is not what it does; `global_batch_size` is a comment, since
        it follows from other settings and would contradict them as soon as somebody edits one.
        """
        from relax.config.yaml_text import dump  # PyYAML comes with the extras

        sections: dict[str, dict[str, object]] = {}
        for option in config_options():
            if option.name != "output":
                sections.setdefault(option.section, {})[option.name] = getattr(self, option.name)
        own = attrs.fields_dict(Config)
        sections[ALGORITHM] |= {n: v for n, v in self.hyperparameter_values().items() if n not in own}
        text = "\n".join(f"# {section}\n{dump(values)}" for section, values in sections.items())
        return text.replace("\nglobal_batch_size:", "\n# global_batch_size:")


@cache
def config_options() -> tuple[Option, ...]:
    """The settings that are no algorithm's own."""
    return options_of(Config)
