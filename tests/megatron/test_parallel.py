"""Log-probs, values and optimizer steps of jobs with several ranks, against those of this one process."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from relax.data.samples import Sequences
from relax.megatron.batching import Batching, Format
from relax.megatron.critic import Critic, ValueBatch
from relax.megatron.layout import Layout
from relax.megatron.trainer import MicroBatch, Trainer
from tests.megatron import jobs, wholes
from tests.megatron.conftest import MODEL
from tests.megatron.steps import OPTIMIZER

WHOLE = (0, 9)


@attrs.frozen
class Case:
    """`shares`: which of the nine samples each data-parallel rank has."""

    shares: Sequence[tuple[int, int]] = (WHOLE,)
    micro_batch_size: int = 4
    tied: bool = True
    qkv_format: Format = "bshd"


@attrs.frozen
class Found:
    """What a rank saw of one case: a step of the policy and of the critic, and what both say afterwards."""

    replica: int
    log_probs: Tensor
    entropy: Tensor
    values: Tensor
    update: Any
    critic_update: Any
    policy: wholes.Part
    critic: wholes.Part


class Weighed:
    """Some weight on each log-prob, entropy and value of the nine samples; a share of them sees its own."""

    def __init__(self, sequences: Sequences, share: tuple[int, int]) -> None:
        self.weights = 0.1 * torch.randn(2, sequences.tokens.num_tokens, generator=torch.Generator().manual_seed(1))
        self.tokens, self.first = sequences.tokens, share[0]

    def _of(self, start: int, stop: int) -> Tensor:
        return self.weights[:, self.tokens.token_slice(self.first + start, self.first + stop)]

    def policy(self, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        weights = self._of(batch.start, batch.stop)
        loss = (weights[0] * batch.log_probs + weights[1] * batch.entropy).sum()
        return loss, {"loss": loss, "tokens": torch.tensor(len(batch.log_probs))}

    def critic(self, batch: ValueBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        weights = self._of(batch.start, batch.stop)
        loss = (weights[1] * (batch.values - 10 * weights[0]).square()).sum()
        return loss, {"loss": loss}


def work(sequences: Sequences, cases: Sequence[Case]) -> list[Found]:
    return [one(sequences, case) for case in cases]


def one(sequences: Sequences, case: Case) -> Found:
    replica = parallel_state.get_data_parallel_rank()
    share = case.shares[replica]
    model = attrs.evolve(MODEL, tie_embeddings=case.tied)
    batching = Batching(micro_batch_size=case.micro_batch_size, qkv_format=case.qkv_format)
    trainer = Trainer(model, OPTIMIZER, seed=3, batching=batching)
    critic = Critic(model, OPTIMIZER, seed=4, batching=batching)
    for learner in (trainer, critic):  # a fresh model is nearly uniform, which hides faults
        with torch.no_grad():
            for parameter in learner.model.parameters():
                parameter.mul_(4.0) if parameter.dim() > 1 else parameter.mul_(1.1)
    critic.start_from(trainer.model)
    if critic.model.post_process:
        torch.nn.init.constant_(critic.model.output_layer.weight, 0.1)
    ours, loss = sequences.select(*share), Weighed(sequences, share)
    update, critic_update = trainer.update(ours, loss.policy), critic.update(ours, loss.critic)
    policy, value = wholes.part_of(trainer.model), wholes.part_of(critic.model)
    after, values = trainer.log_probs(ours), critic.values(ours)
    return Found(replica, after.log_probs, after.entropy, values, update, critic_update, policy, value)


def compare(found: Sequence[Found], expected: Found) -> None:
    """All ranks' findings of one case against the single process."""
    replicas = sorted({rank.replica for rank in found})
    for name in ("log_probs", "entropy", "values"):
        for rank in found:  # every rank of a replica knows what its last stage computed
            theirs = next(other for other in found if other.replica == rank.replica)
            torch.testing.assert_close(getattr(rank, name), getattr(theirs, name), rtol=0, atol=0)
        joined = torch.cat([next(getattr(r, name) for r in found if r.replica == replica) for replica in replicas])
        torch.testing.assert_close(joined, getattr(expected, name), rtol=1e-5, atol=1e-5)
    for rank in found:
        for ours, wanted in ((rank.update, expected.update), (rank.critic_update, expected.critic_update)):
            assert ours.metrics == pytest.approx(wanted.metrics, rel=1e-5)
            assert ours.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    for kind in ("gradients", "weights"):
        wholes.assert_equal(wholes.whole([rank.policy for rank in found], kind), wholes.whole([expected.policy], kind))
        wholes.assert_equal(
            wholes.whole([rank.critic for rank in found], kind, split_output=False),
            wholes.whole([expected.critic], kind),
        )


def check(world: int, layout: Layout, cases: Sequence[Case], sequences: Sequences) -> None:
    """Each case in one job against one process and one micro-batch."""
    found = jobs.run(world, layout, work, sequences, cases)
    for number, case in enumerate(cases):
        expected = one(sequences, attrs.evolve(case, shares=(WHOLE,), micro_batch_size=9, qkv_format="bshd"))
        compare([rank[number] for rank in found], expected)


def test_data_parallel_ranks_add_up_their_shares(sequences: Sequences) -> None:
    """Uneven shares, and a rank without any sample."""
    shares = ((0, 2), (2, 2), (2, 3), (3, 9))
    check(4, Layout(), [Case(shares, 2), Case(shares, 3), Case(shares, 1, tied=False)], sequences)


def test_tensor_parallel_ranks_share_the_matrices(sequences: Sequences) -> None:
    check(2, Layout(tensor=2), [Case(), Case(tied=False, micro_batch_size=1)], sequences)


def test_tensor_and_data_parallel_ranks_together(sequences: Sequences) -> None:
    check(4, Layout(tensor=2), [Case(((0, 4), (4, 9)), 3), Case((WHOLE, (9, 9)), tied=False)], sequences)


def test_pipeline_stages_share_the_layers(sequences: Sequences) -> None:
    """Micro-batches of differing shape, more and fewer than stages; tied embeddings live on both."""
    check(2, Layout(pipeline=2), [Case(micro_batch_size=2), Case(micro_batch_size=9), Case(tied=False)], sequences)


def test_pipelines_side_by_side_of_split_matrices(sequences: Sequences) -> None:
    check(8, Layout(tensor=2, pipeline=2), [Case(((0, 7), (7, 9)), 3), Case((WHOLE, (9, 9)), 2)], sequences)


def test_context_ranks_share_the_sequences(sequences: Sequences) -> None:
    """A sequence of one token to predict is shared, too."""
    check(2, Layout(context=2), [Case(), Case(micro_batch_size=1), Case(tied=False, qkv_format="thd")], sequences)


@pytest.mark.parametrize(
    "layout", [Layout(context=4), Layout(context=2), Layout(2, context=2), Layout(pipeline=2, context=2)], ids=str
)
def test_context_ranks_beside_others(layout: Layout, sequences: Sequences) -> None:
    """Four of them; two replicas of two; two that share matrices, or layers."""
    shares = ((0, 7), (7, 9)) if layout.data(4) == 2 else (WHOLE,)
    check(4, layout, [Case(shares, 3), Case(shares, qkv_format="thd")], sequences)
