"""Training steps to measure: random samples with rewards, and GRPO's loss of them through a trainer."""

import random
from functools import partial

import attrs

from relax.adapter import Objective
from relax.batches import OptimizerBatch
from relax.config import configure
from relax.data.samples import Completion, Sample
from relax.megatron.batching import Batching
from relax.megatron.learner import Update
from relax.megatron.model import ModelConfig
from relax.megatron.optimizer import OptimizerConfig
from relax.megatron.trainer import Trainer

GROUP = 8
"""Responses to a prompt."""


@attrs.frozen
class Work:
    """A trainer and the optimizer batch that each of its steps is taken on. Lives inside `megatron_process`."""

    trainer: Trainer
    objective: Objective
    batch: OptimizerBatch

    @classmethod
    def draw(cls, model: ModelConfig, batching: Batching, *, prompts: int, prompt: int, response: int) -> "Work":
        """`GROUP` responses to each of `prompts` prompts of `prompt` tokens, half to all of `response` tokens long."""
        chance = random.Random(0)

        def ids(count: int) -> tuple[int, ...]:
            return tuple(chance.randrange(model.vocab_size) for _ in range(count))

        samples = []
        for group in range(prompts):
            asked = ids(prompt)
            for _ in range(GROUP):
                answer = ids(chance.randint(response // 2, response))
                heard = Completion(answer, (-1.0,) * len(answer), True)
                samples.append(Sample(group, {}, asked, heard, "", {"score": chance.random()}))
        config = configure(
            advantage_estimator="grpo", reward_key="score", n_samples_per_prompt=GROUP, rollout_batch_size=prompts
        )
        objective = Objective.of(config)
        (batch,) = objective.batches(samples, [len(samples)])
        trainer = Trainer(model, OptimizerConfig(total_steps=10**6), seed=0, batching=batching)
        return cls(trainer, objective, batch)

    def step(self) -> Update:
        """One optimizer step."""
        return self.trainer.update(self.batch.sequences, partial(self.objective.loss, self.batch))
