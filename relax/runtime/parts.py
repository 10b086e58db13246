"""Builds a run's roles from its configuration: the one place that knows which class stands for which setting."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs

from relax.adapter import Objective
from relax.config import Config
from relax.data.prompts import read_records
from relax.data.tokenizer import TextCodec
from relax.data.wording import ChatTemplate, Wording, as_it_stands
from relax.errors import ConfigError
from relax.inputs import prove
from relax.megatron import groups, transformer_engine
from relax.megatron.batching import Batching
from relax.megatron.critic import Critic
from relax.megatron.layout import Layout
from relax.megatron.model import ModelConfig
from relax.megatron.optimizer import OptimizerConfig
from relax.megatron.trainer import Trainer
from relax.recipes import RECIPES
from relax.report.progress import Phase
from relax.rewards.loader import RewardFunction
from relax.roles.actor import ActorRole
from relax.roles.critic import CriticRole
from relax.roles.rollout import RolloutRole, SamplingPlan
from relax.rollout.engine import Engine
from relax.rollout.filter import load_filter
from relax.rollout.megatron_engine import MegatronEngine
from relax.rollout.sampling import Prompts, Sampler
from relax.rollout.sharing import among_replicas
from relax.rollout.transformers_engine import TransformersEngine
from relax.runtime.demonstrations import Demonstrations
from relax.runtime.evaluation import Evaluator
from relax.runtime.files import RunFiles
from relax.runtime.policy import Policy

ENGINES: Final[Mapping[str, Callable[[Sequence[int]], Engine]]] = {
    "megatron": MegatronEngine,
    "transformers": TransformersEngine,
}


def with_data(config: Config, files: RunFiles) -> Config:
    """The configuration with its data files named; a recipe's are written into the run, the same for the same seed."""
    if config.recipe is None:
        return config
    made = RECIPES[config.recipe].write_data(config.seed, files.data)
    return attrs.evolve(
        config,
        prompt_data=config.prompt_data or made.prompts,
        eval_prompt_data=config.eval_prompt_data or made.held_out,
        sft_data=config.sft_data or made.demonstrations,
    )


def layout_of(config: Config) -> Layout:
    """How the processes of the job share the model."""
    return Layout(config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size)


def optimizer_config(config: Config, *, imitating: bool) -> OptimizerConfig:
    """The optimizer of the warm start (or of SFT), or of reinforcement."""
    same = ("clip_grad", "weight_decay", "adam_beta1", "adam_beta2")
    shared = {name: getattr(config, name) for name in same} | {"distributed": config.use_distributed_optimizer}
    if imitating and config.loss_type != "sft":
        return OptimizerConfig(
            lr=config.warm_start_lr, lr_decay_style="cosine", total_steps=config.warm_start_steps, **shared
        )
    steps = config.num_rollout * config.num_steps_per_rollout
    return OptimizerConfig(
        lr=config.lr,
        lr_warmup_steps=int(config.lr_warmup_fraction * steps),
        lr_decay_style=config.lr_decay_style,
        total_steps=steps,
        **shared,
    )


def critic_optimizer(config: Config) -> OptimizerConfig:
    """That of reinforcement, with the critic's own learning rate."""
    own = optimizer_config(config, imitating=False)
    return own if config.critic_lr is None else attrs.evolve(own, lr=config.critic_lr)


def imitation_steps(config: Config) -> int:
    """SFT steps of the whole run: the warm start's, or all of them."""
    return config.num_rollout * config.num_steps_per_rollout if config.loss_type == "sft" else config.warm_start_steps


def phases(config: Config) -> tuple[Phase, ...]:
    """The parts of the run, for whoever watches."""
    imitation = imitation_steps(config)
    if config.loss_type == "sft":
        return (Phase("sft", imitation, "SFT"),)
    return (
        Phase("sft", imitation, "warm start"),
        Phase("rl", config.num_rollout * config.num_steps_per_rollout, config.advantage_estimator.upper()),
    )


@attrs.frozen
class Parts:
    """What a run works with. `rollout` and `evaluator` are None where the run needs none.

    The engine has no weights before its first `update_weights`: who samples hands it the current ones.
    """

    policy: Policy
    wording: Wording
    trainer: Trainer
    engine: Engine
    sampler: Sampler
    actor: ActorRole
    critic: Critic | None
    rollout: RolloutRole | None
    evaluator: Evaluator | None
    demonstrations: Demonstrations | None


def build(config: Config, policy: Policy, *, imitating: bool) -> Parts:
    """All parts, every input read and checked before anything is trained; weights are random. Errors: `RelaxError`."""
    size, codec = policy.size, policy.codec
    wording = ChatTemplate.of(codec) if config.apply_chat_template else as_it_stands
    room = config.max_position_embeddings - config.rollout_max_response_len
    reward = None
    if config.custom_rm_path is not None:
        keys = (*config.reward_keys, *(() if config.reward_key is None else (config.reward_key,)))
        reward = RewardFunction.load(config.custom_rm_path, keys)
    keep = load_filter(config.dynamic_sampling_filter_path)
    objective = Objective.of(config, groups.data_parallel_reduce(), groups.gathered)
    prompts, held_out, demonstrations = (
        _prompts(config.prompt_data, config.input_key, wording, codec, room),
        _prompts(config.eval_prompt_data, config.input_key, wording, codec, room),
        _demonstrations(config, wording, codec),
    )
    if faults := [*Layout.current().model_faults(size), *transformer_engine.faults(size)]:
        raise ConfigError(faults)
    batching = Batching(
        micro_batch_size=config.micro_batch_size,
        max_tokens_per_gpu=config.max_tokens_per_gpu,
        qkv_format=config.qkv_format,
    )
    trainer = Trainer(
        size,
        optimizer_config(config, imitating=imitating),
        seed=config.seed,
        batching=batching,
        temperature=config.rollout_temperature,
        reference=config.needs_reference,
    )
    engine = ENGINES[config.rollout_engine](codec.ends)
    sampler = Sampler(engine, codec, config.rollout_max_response_len)
    rollout = evaluator = None
    if reward is not None and prompts is not None and config.loss_type != "sft":
        plan = SamplingPlan(
            config.rollout_batch_size,
            config.n_samples_per_prompt,
            config.rollout_temperature,
            config.max_resampling,
            config.algorithm.traits.min_group_size,
            config.reward_key if "greedy_reward" in config.algorithm.traits.component_names else None,
        )
        rollout = RolloutRole(sampler, prompts, reward, objective.carry_signal, keep, plan, config.seed, among_replicas)
    if reward is not None and held_out is not None:
        asked = held_out.take(range(min(config.eval_samples, len(held_out.ids))))
        evaluator = Evaluator(sampler, asked, reward, config.input_key, among_replicas)
    critic = _critic(config, size, batching)
    beside = None if critic is None else CriticRole(critic, objective)
    actor = ActorRole(trainer, objective, config.num_steps_per_rollout, beside)
    if rollout is not None:
        prove(config, "local", [role for role in (rollout, actor, beside) if role is not None])
    return Parts(policy, wording, trainer, engine, sampler, actor, critic, rollout, evaluator, demonstrations)


def _critic(config: Config, size: ModelConfig, batching: Batching) -> Critic | None:
    if "critic" not in config.roles:
        return None
    return Critic(size, critic_optimizer(config), seed=config.seed, batching=batching)


def _prompts(path: Path | None, key: str, wording: Wording, codec: TextCodec, longest: int) -> Prompts | None:
    return None if path is None else Prompts.encode(read_records(path, {key: wording}), key, codec, longest)


def _demonstrations(config: Config, wording: Wording, codec: TextCodec) -> Demonstrations | None:
    if config.sft_data is None or not (config.warm_start_steps or config.loss_type == "sft"):
        return None
    size = config.global_batch_size if config.loss_type == "sft" else config.warm_start_batch_size
    return Demonstrations.read(
        config.sft_data, config.input_key, wording, codec, size, config.max_position_embeddings, config.seed
    )
