"""The actor role: owns the policy and improves it, by imitation or on the samples of a rollout."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from relax.adapter import Evidence, Objective, OptimizerBatch, imitation_loss, sequences_of
from relax.agreement import stage
from relax.data.samples import Sample, Sequences
from relax.inputs import Input
from relax.megatron.learner import Update
from relax.megatron.trainer import Trainer
from relax.roles.critic import CriticRole
from relax.roles.rollout import Rollout
from relax.runtime.clock import Clock
from relax_core import reducers

Metrics = Mapping[str, float]


class ActorRole:
    """Trains through one trainer on one objective, in `steps` optimizer steps a rollout, beside a critic if any."""

    def __init__(self, trainer: Trainer, objective: Objective, steps: int, critic: CriticRole | None = None) -> None:
        self.trainer = trainer
        self.objective = objective
        self.steps = steps
        self.critic = critic

    @property
    def supplies(self) -> frozenset[Input]:
        """It trains on whole optimizer batches of whole responses, and asks the reference where there is one."""
        own = {Input.OPTIMIZER_BATCH, Input.WHOLE_RESPONSES, Input.OLD_LOG_PROBS}
        return frozenset(own if self.trainer.reference is None else {*own, Input.REFERENCE_LOG_PROBS})

    def imitate(self, demonstrations: Sequences, clock: Clock) -> Metrics:
        """One optimizer step of SFT."""
        tokens = demonstrations.tokens
        weights = reducers.token_mean(tokens, reduce=self.objective.pipeline.reduce).float()
        update = self._timed(clock, self.trainer.update(demonstrations, partial(imitation_loss, tokens, weights)))
        return {**_of(update), "samples/trained": float(len(demonstrations))}

    def train(self, rollout: Rollout, clock: Clock) -> Iterator[tuple[Sequences, Metrics]]:
        """The optimizer steps of a rollout, one after another: what each trained on and how it went.

        There is none if no group was kept.
        """
        samples = rollout.samples
        sizes = rollout.sizes(self.steps)
        if not sizes:
            return
        evidence = self._evidence(samples, len(sizes), clock)
        with clock.phase("advantages"), stage("advantages of a rollout"):
            batches = self.objective.batches(samples, sizes, evidence)
        for batch in batches:
            valued = {} if self.critic is None else self.critic.improve(batch, clock)
            if self.objective.chooses_among_all:
                with clock.phase("log_probs"):
                    batch = self.objective.chosen(batch, self.trainer.log_probs(batch.sequences).log_probs)
            update = self._timed(
                clock,
                self.trainer.update(batch.sequences, partial(self.objective.loss, batch)),
            )
            trained = float(len(batch.sequences))
            yield batch.sequences, {**_of(update), **valued, **_advantages(batch), "samples/trained": trained}

    def _evidence(self, samples: Sequence[Sample], steps: int, clock: Clock) -> Evidence:
        """What the models say of the rollout before any of its steps, as far as it is needed."""
        config, sequences = self.objective.config, sequences_of(samples)
        old = reference = None
        # With one step, the policy that is improved is the one being trained: its log-probs come with the step.
        if steps > 1 or config.kl_coef:
            with clock.phase("log_probs"):
                old = self.trainer.log_probs(sequences).log_probs
        if config.needs_reference:
            with clock.phase("reference"):
                reference = self.trainer.reference_log_probs(sequences).log_probs
        return Evidence(old, reference, None if self.critic is None else self.critic.values(samples, clock))

    def _timed(self, clock: Clock, update: Update) -> Update:
        for name, seconds in self.trainer.seconds.items():
            clock.add(name, seconds)
        return update


def _of(update: Update) -> dict[str, float]:
    return {**update.metrics, "grad_norm": update.grad_norm, "lr": update.lr}


def _advantages(batch: OptimizerBatch) -> dict[str, float]:
    """Statistics of the advantages that were trained on, over the response tokens that count."""
    valid = batch.advantages[batch.tokens.mask].double()
    if not len(valid):
        return {}
    spread = torch.std(valid, correction=0)
    return {
        "advantage/mean": float(valid.mean()),
        "advantage/std": float(spread),
        "advantage/min": float(valid.min()),
        "advantage/max": float(valid.max()),
    }
