"""The critic role: tells the value of what has been said, and learns from what came of it."""

from collections.abc import Mapping, Sequence
from functools import partial

import attrs
from torch import Tensor

from relax.adapter import Objective
from relax.batches import OptimizerBatch, sequences_of
from relax.data.samples import Sample
from relax.inputs import Input
from relax.megatron.critic import Critic
from relax.runtime.clock import Clock


@attrs.frozen
class CriticRole:
    """Owns the value model."""

    critic: Critic
    objective: Objective

    @property
    def supplies(self) -> frozenset[Input]:
        """Values alone."""
        return frozenset({Input.VALUES})

    def values(self, samples: Sequence[Sample], clock: Clock) -> Tensor:
        """Values of all response tokens, [tokens]."""
        with clock.phase("values"):
            return self.critic.values(sequences_of(samples))

    def improve(self, batch: OptimizerBatch, clock: Clock) -> Mapping[str, float]:
        """One optimizer step towards the batch's returns."""
        with clock.phase("critic"):
            update = self.critic.update(batch.sequences, partial(self.objective.value_loss, batch))
        return {**update.metrics, "value_grad_norm": update.grad_norm}
