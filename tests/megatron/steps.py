"""One optimizer step of every algorithm on one global batch, spread over a job in some way."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Literal

import attrs
import torch
from megatron.core import parallel_state
from torch import Tensor

from relax.adapter import Objective
from relax.batches import Evidence, sequences_of
from relax.config import Config, configure
from relax.data.samples import Completion, Sample
from relax.megatron import groups
from relax.megatron.batching import Batching
from relax.megatron.critic import Critic
from relax.megatron.learner import Learner, Update
from relax.megatron.model import ModelConfig, PolicyModel
from relax.megatron.optimizer import OptimizerConfig
from relax.megatron.trainer import Trainer
from relax_core import ALGORITHMS, Algorithm, Tokens
from tests.megatron import wholes

VOCABULARY = 23  # which two tensor-parallel ranks do not divide
SIZE = ModelConfig(
    vocab_size=VOCABULARY,
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    kv_channels=8,
    max_position_embeddings=32,
)
# With Adam's usual epsilon of 1e-8 the first step is the gradient's sign, which rounding decides where it is near 0.
OPTIMIZER = OptimizerConfig(total_steps=10, lr=1e-2, clip_grad=0.5, adam_eps=1e-4)
PROMPTS = (3, 1, 7, 4)
# Four groups of three. One response is empty, one has no token that counts, one has some.
RESPONSES = (5, 2, 9, 1, 0, 6, 3, 3, 8, 4, 7, 2)
MASKED = {5: (False,) * 6, 10: (True, True, False, False, True, True, True)}


@attrs.frozen
class Spread:
    """Which samples of the batch each data-parallel rank has, and how they pass its model."""

    shares: tuple[tuple[int, ...], ...]
    micro_batch_size: int = 64
    max_tokens_per_gpu: int | None = None
    qkv_format: Literal["bshd", "thd"] = "bshd"

    @property
    def batching(self) -> Batching:
        return Batching(
            micro_batch_size=self.micro_batch_size,
            max_tokens_per_gpu=self.max_tokens_per_gpu,
            qkv_format=self.qkv_format,
        )


@attrs.frozen
class Step:
    """What a rank saw of one algorithm's step."""

    samples: tuple[int, ...]
    advantages: tuple[Tensor, ...]
    updates: tuple[Update, ...]
    policy: wholes.Part
    critic: wholes.Part | None


def rollout() -> list[Sample]:
    """The global batch: rewards of two components that vary within each group."""
    chance = random.Random(5)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(VOCABULARY) for _ in range(count))

    prompts = [ids(count) for count in PROMPTS]
    greedy = [float(chance.randrange(3)) for _ in PROMPTS]
    samples = []
    for index, length in enumerate(RESPONSES):
        group = index // 3
        reward = {"digit": float(chance.randrange(4)) + (index % 3 == 0), "letter": chance.random()}
        heard = Completion(ids(length), tuple(-chance.uniform(2, 4) for _ in range(length)), True)
        samples.append(Sample(group, {}, prompts[group], heard, "", reward, MASKED.get(index), greedy[group]))
    return samples


def settings(algorithm: Algorithm[object]) -> Config:
    """A configuration that the algorithm's traits allow, with as many of the terms around the loss as they do."""
    traits = algorithm.traits
    chosen: dict[str, object] = {"n_samples_per_prompt": 3, "rollout_batch_size": 4, "entropy_coef": 0.01}
    if traits.reads_components and not traits.component_names:
        chosen |= {"gdpo_reward_keys": ("digit", "letter"), "reward_key": "digit"}
    else:
        chosen["reward_key"] = "digit"
    if traits.normalize_advantages == "required":
        chosen["normalize_advantages"] = True
    if traits.global_token_loss:
        chosen["calculate_per_token_loss"] = True
    if traits.reward_kl == "required" or (traits.needs_critic and traits.reward_kl != "forbidden"):
        chosen |= {"kl_coef": 0.1}
    elif traits.kl_loss != "forbidden":
        chosen |= {"use_kl_loss": True, "kl_loss_coef": 0.1}
    if traits.kl_estimator != "any":
        chosen["kl_loss_type"] = traits.kl_estimator
    # Shares and ranges that leave something to choose among a few dozen tokens.
    wide = {"clip_cov_ratio": 0.2, "clip_cov_low": 0.0, "kl_cov_ratio": 0.2, "m2po_budget": 0.3}
    wide["gdpo_reward_weights"] = (1.0, 0.5)
    own = {field.name for field in attrs.fields(algorithm.hyperparameters)}
    chosen |= {name: value for name, value in wide.items() if name in own}
    return configure(advantage_estimator=algorithm.name, use_tis=True, **chosen)


class Learners:
    """A policy, its reference and a critic, put back to the same weights before every step."""

    def __init__(self, spread: Spread) -> None:
        self.trainer = Trainer(SIZE, OPTIMIZER, seed=3, batching=spread.batching, reference=True)
        self.critic = Critic(SIZE, OPTIMIZER, seed=4, batching=spread.batching)
        self.trainer.keep_reference()
        for learner in (self.trainer, self.critic):
            _sharpen(learner)
        self._weights = [
            {name: weight.clone() for name, weight in learner.model.named_parameters()}
            for learner in (self.trainer, self.critic)
        ]

    @torch.no_grad()
    def restart(self) -> None:
        for learner, weights in zip((self.trainer, self.critic), self._weights, strict=True):
            learner.reset_optimizer(OPTIMIZER)
            for name, parameter in learner.model.named_parameters():
                parameter.copy_(weights[name])

    def evidence(self) -> Evidence:
        """What these models say of the whole batch, the old policy being not quite the current one."""
        sequences = sequences_of(rollout())
        old = self.trainer.log_probs(sequences).log_probs
        noise = torch.randn(len(old), generator=torch.Generator().manual_seed(2))
        reference = self.trainer.reference_log_probs(sequences).log_probs
        return Evidence(old + 0.8 * noise, reference, self.critic.values(sequences))


def every_algorithm(spreads: Sequence[Spread], evidence: Evidence | None = None) -> list[dict[str, Step]]:
    """For each spread, the step of each algorithm on `evidence` of the whole batch (None: as the models have it)."""
    steps = []
    for spread in spreads:
        learners = Learners(spread)
        known = learners.evidence() if evidence is None else evidence
        steps.append({name: step(settings(record), spread, learners, known) for name, record in ALGORITHMS.items()})
    return steps


def step(config: Config, spread: Spread, learners: Learners, evidence: Evidence) -> Step:
    """A rank's part of one step of policy and, where there is one, critic."""
    learners.restart()
    trainer, critic = learners.trainer, learners.critic if "critic" in config.roles else None
    everything = rollout()
    mine = spread.shares[parallel_state.get_data_parallel_rank()]
    samples, tokens = [everything[index] for index in mine], sequences_of(everything).tokens
    objective = Objective.of(config, groups.data_parallel_reduce(), groups.gathered)
    parts = (evidence.old_log_probs, evidence.ref_log_probs, evidence.values if critic else None)
    known = Evidence(*(None if part is None else _of(mine, tokens, part) for part in parts))
    scores = objective.scores(everything)[list(mine)]
    (batch,) = objective.batches(samples, [len(samples)], known, scores)
    updates = []
    if critic is not None:
        updates.append(critic.update(batch.sequences, partial(objective.value_loss, batch)))
    if objective.chooses_among_all:
        batch = objective.chosen(batch, trainer.log_probs(batch.sequences).log_probs)
    updates.append(trainer.update(batch.sequences, partial(objective.loss, batch)))
    return Step(
        mine,
        batch.advantages.split([len(sample.completion.token_ids) for sample in samples]),
        tuple(updates),
        wholes.part_of(trainer.model),
        None if critic is None else wholes.part_of(critic.model),
    )


def _sharpen(learner: Learner[PolicyModel]) -> None:
    """A fresh model is nearly uniform and a fresh critic says 0, which hides faults."""
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.mul_(1.1)
            if not parameter.any():
                parameter.fill_(0.1)


def _of(mine: Sequence[int], tokens: Tokens, values: Tensor) -> Tensor:
    """The values of some samples' tokens."""
    return torch.cat([values[:0], *(values[tokens.token_slice(index, index + 1)] for index in mine)])
