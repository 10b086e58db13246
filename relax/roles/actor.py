"""The actor role: owns the policy and improves it, by imitation or on the samples of a rollout."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from relax.adapter import Objective, imitation_loss
from relax.agreement import stage
from relax.batches import Evidence, sequences_of
from relax.data.samples import Sample, Sequences
from relax.data.shares import shares
from relax.inputs import Input
from relax.megatron import groups
from relax.megatron.learner import Update
from relax.megatron.trainer import Trainer
from relax.roles.critic import CriticRole
from relax.roles.rollout import Rollout
from relax.runtime.clock import Clock
from relax_core import reducers

Metrics = Mapping[str, float]


class ActorRole:
    """Trains through one trainer on one objective, in `steps` optimizer steps a rollout, beside a critic if any.

    Where there are several data-parallel replicas, every rank is given all samples and trains on its replica's share;
    what it reports is of all of them.
    """

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
        (own,) = self._own(demonstrations, [len(demonstrations)])
        sequences = demonstrations.pick(own)
        tokens = sequences.tokens
        weights = reducers.token_mean(tokens, reduce=self.objective.pipeline.reduce).float()
        update = self._timed(clock, self.trainer.update(sequences, partial(imitation_loss, tokens, weights)))
        return {**_of(update), "samples/trained": float(len(demonstrations))}

    def train(self, rollout: Rollout, clock: Clock) -> Iterator[tuple[Sequences, Metrics]]:
        """The optimizer steps of a rollout, one after another: what each trained on and how it went.

        There is none if no group was kept.
        """
        everything, sizes = rollout.samples, rollout.sizes(self.steps)
        if not sizes:
            return
        sequences = sequences_of(everything)
        own = self._own(sequences, sizes)
        places = [place for part in own for place in part]
        samples = [everything[place] for place in places]
        evidence = self._evidence(samples, len(sizes), clock)
        with clock.phase("advantages"), stage("advantages of a rollout"):
            # Groups are compared before they are spread over replicas.
            scores = self.objective.scores(everything)[places]
            batches = self.objective.batches(samples, [len(part) for part in own], evidence, scores)
        for batch, whole in zip(batches, sequences.split(sizes), strict=True):
            valued = {} if self.critic is None else self.critic.improve(batch, clock)
            if self.objective.chooses_among_all:
                with clock.phase("log_probs"):
                    batch = self.objective.chosen(batch, self.trainer.log_probs(batch.sequences).log_probs)
            update = self._timed(
                clock,
                self.trainer.update(batch.sequences, partial(self.objective.loss, batch)),
            )
            advantages = _advantages(self.objective.gather(batch.advantages[batch.tokens.mask])[0].double())
            yield whole, {**_of(update), **valued, **advantages, "samples/trained": float(batch.num_samples)}

    def _own(self, sequences: Sequences, sizes: Sequence[int]) -> list[list[int]]:
        """Of each optimizer batch, the places among all samples of those that this rank's replica trains on."""
        replica, replicas = groups.replica()
        balanced = self.objective.config.balance_data
        found, start, lengths = [], 0, sequences.lengths
        for size in sizes:
            part = shares(lengths[start : start + size], replicas, balanced=balanced)[replica]
            found.append([start + place for place in part])
            start += size
        return found

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


def _advantages(valid: Tensor) -> dict[str, float]:
    """Statistics of the advantages that were trained on, of the response tokens that count."""
    if not len(valid):
        return {}
    spread = torch.std(valid, correction=0)
    return {
        "advantage/mean": float(valid.mean()),
        "advantage/std": float(spread),
        "advantage/min": float(valid.min()),
        "advantage/max": float(valid.max()),
    }
