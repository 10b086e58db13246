"""The actor role on data-parallel replicas: each trains on its share, and the run is that of one process."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import attrs
import pytest

from relax.adapter import Objective
from relax.batches import sequences_of
from relax.config import configure
from relax.data.samples import Sequences
from relax.data.shares import shares
from relax.megatron import groups
from relax.megatron.batching import Batching
from relax.megatron.layout import Layout
from relax.megatron.trainer import Trainer
from relax.roles.actor import ActorRole
from relax.roles.rollout import Rollout
from relax.runtime.clock import Clock
from tests.megatron import jobs, wholes
from tests.megatron.steps import OPTIMIZER, SIZE, rollout

Told = tuple[wholes.Part, Sequence[tuple[Sequences, Mapping[str, float]]]]


@pytest.mark.parametrize("balanced", [False, True])
def test_every_sample_belongs_to_one_rank(balanced: bool) -> None:
    for count, ranks in ((12, 4), (5, 3), (2, 4), (0, 2)):
        found = shares([7 * place % 5 for place in range(count)], ranks, balanced=balanced)
        assert len(found) == ranks
        assert sorted(place for part in found for place in part) == list(range(count))
        assert all(part == sorted(part) for part in found)


def test_neighbours_stay_together_unless_tokens_are_balanced() -> None:
    lengths = [9, 1, 1, 1, 8, 2, 3, 7]
    assert shares(lengths, 3, balanced=False) == [[0, 1], [2, 3, 4], [5, 6, 7]]
    # 9 | 8 | 7, then 3 to the 7, 2 to the 8, and three times 1 to the first of those that have the fewest.
    assert shares(lengths, 3, balanced=True) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def trained(balanced: bool) -> Told:
    """One imitation and a rollout in two steps, of an algorithm that whitens and of the same ranks."""
    config = configure(
        advantage_estimator="gdpo",
        gdpo_reward_keys=("digit", "letter"),
        gdpo_reward_weights=(1.0, 0.5),
        reward_key="digit",
        n_samples_per_prompt=3,
        rollout_batch_size=4,
        num_steps_per_rollout=2,
    )
    objective = Objective.of(
        attrs.evolve(config, balance_data=balanced), groups.data_parallel_reduce(), groups.gathered
    )
    trainer = Trainer(SIZE, OPTIMIZER, seed=3, batching=Batching(micro_batch_size=2))
    actor = ActorRole(trainer, objective, 2)
    samples = rollout()
    kept = tuple(tuple(group) for _, group in groupby(samples, key=lambda sample: sample.group))
    told = [(sequences_of(samples), actor.imitate(sequences_of(samples), Clock()))]
    told += actor.train(Rollout(kept, (), 0, 4), Clock())
    return wholes.part_of(trainer.model), told


def test_replicas_train_on_their_shares_as_one_process_does_on_all() -> None:
    part, expected = trained(balanced=False)
    assert len(expected) == 3
    for balanced in (False, True):
        ranks: list[Told] = jobs.run(4, Layout(), trained, balanced)
        wholes.assert_equal(wholes.whole([rank[0] for rank in ranks], "weights"), wholes.whole([part], "weights"))
        for _, told in ranks:
            for (batch, metrics), (whole, wanted) in zip(told, expected, strict=True):
                assert batch == whole
                assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)
