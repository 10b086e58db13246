"""Checkpoints of jobs with several ranks: the same whole tensors in any layout, and there on all ranks or on none."""

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import pytest
import torch
from megatron.core import parallel_state

from relax.data.samples import Sequences
from relax.megatron import checkpoint
from relax.megatron.batching import Batching
from relax.megatron.checkpoint_part import Part
from relax.megatron.critic import Critic, ValueBatch
from relax.megatron.layout import Layout
from relax.megatron.learner import Learner, Update
from relax.megatron.optimizer import OptimizerConfig
from relax.megatron.trainer import MicroBatch, Trainer
from tests.agreement.job import die, run_job
from tests.megatron import jobs, wholes
from tests.megatron.conftest import MODEL, VOCABULARY

ODD = attrs.evolve(MODEL, vocab_size=VOCABULARY + 1)  # padded where two tensor-parallel ranks share it
OPTIMIZER = OptimizerConfig(total_steps=10, lr=1e-2, lr_warmup_steps=2, clip_grad=0.5, adam_eps=1e-4)


@attrs.frozen
class Seen:
    """What a rank holds of the policy and of the critic: weights, Adam's moments; and the step taken from there."""

    policy: wholes.Part
    critic: wholes.Part
    policy_moments: wholes.Part
    critic_moments: wholes.Part
    update: Update
    after: wholes.Part


class Half:
    """The samples of this replica out of nine: a replica has its share, or all of them where it is the only one."""

    def __init__(self, sequences: Sequences) -> None:
        count, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        self.samples = sequences.select(9 * replica // count, 9 * (replica + 1) // count)

    def policy(self, batch: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return -(batch.log_probs * (1 + batch.log_probs.detach())).sum() / 50, {}

    def critic(self, batch: ValueBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return (batch.values - 1).square().sum() / 50, {}


def learners(seed: int) -> tuple[Trainer, Critic]:
    trainer = Trainer(ODD, OPTIMIZER, seed=seed, batching=Batching(micro_batch_size=2))
    return trainer, Critic(ODD, OPTIMIZER, seed=seed + 1, batching=Batching(micro_batch_size=2))


def moments(learner: Learner) -> wholes.Part:
    """Adam's first and second moments, in the place of weights and gradients."""
    state = learner._optimizer.optimizer.state
    named = dict(learner.model.named_parameters())
    first, second = (
        {name: state[parameter][kind].clone() for name, parameter in named.items()}
        for kind in ("exp_avg", "exp_avg_sq")
    )
    return attrs.evolve(wholes.part_of(learner.model), weights=first, gradients=second)


def seen(trainer: Trainer, critic: Critic, half: Half) -> Seen:
    before = (wholes.part_of(trainer.model), wholes.part_of(critic.model), moments(trainer), moments(critic))
    update = trainer.update(half.samples, half.policy)
    return Seen(*before, update, wholes.part_of(trainer.model))


def trained(root: str, sequences: Sequences) -> Seen:
    trainer, critic = learners(seed=3)
    half = Half(sequences)
    for _ in range(3):
        trainer.update(half.samples, half.policy)
        critic.update(half.samples, half.critic)
    checkpoint.save(Path(root), trainer, {"position": 3}, step=3, keep=1, critic=critic)
    return seen(trainer, critic, half)


def restored(root: str, sequences: Sequences) -> Seen:
    trainer, critic = learners(seed=8)
    path = checkpoint.latest(Path(root))
    assert path is not None
    assert checkpoint.load(path, trainer, critic) == {"position": 3}
    return seen(trainer, critic, Half(sequences))


def assert_equal(ours: Sequence[Seen], theirs: Sequence[Seen]) -> None:
    """Weights and moments to the bit, the next step to rounding."""
    for name in ("policy", "policy_moments", "critic", "critic_moments"):
        for kind in ("weights", "gradients") if "moments" in name else ("weights",):
            found, expected = (
                wholes.whole([getattr(rank, name) for rank in job], kind, split_output="critic" not in name)
                for job in (ours, theirs)
            )
            # Tied embeddings have a second name on the last of several pipeline stages.
            common = set(found) & set(expected)
            assert set(found) ^ set(expected) <= {"output_layer.weight"}
            assert any(value.any() for value in expected.values())
            for tensor in common:
                rows = min(len(found[tensor]), len(expected[tensor]))
                assert torch.equal(found[tensor][:rows], expected[tensor][:rows]), (name, kind, tensor)
                assert not any(held[rows:].any() for held in (found[tensor], expected[tensor])), "padding"
    assert ours[0].update.lr == theirs[0].update.lr
    assert ours[0].update.grad_norm == pytest.approx(theirs[0].update.grad_norm, rel=1e-5)
    found, expected = (wholes.whole([rank.after for rank in job], "weights") for job in (ours, theirs))
    wholes.assert_equal(found, {name: value[: len(found[name])] for name, value in expected.items() if name in found})


RESHARDED = {
    "TP 2 to DP 2": (2, Layout(tensor=2), 2, Layout()),
    "DP 2 to TP 2": (2, Layout(), 2, Layout(tensor=2)),
    "PP 2 x TP 2 to DP 2": (4, Layout(tensor=2, pipeline=2), 2, Layout()),
    "the same": (2, Layout(tensor=2), 2, Layout(tensor=2)),
}


@pytest.mark.parametrize("name", RESHARDED)
def test_loaded_by_a_job_that_lies_otherwise(tmp_path: Path, sequences: Sequences, name: str) -> None:
    world, layout, other_world, other_layout = RESHARDED[name]
    saved = jobs.run(world, layout, trained, str(tmp_path), sequences)
    loaded = jobs.run(other_world, other_layout, restored, str(tmp_path), sequences)
    assert_equal(loaded, saved)
    assert_equal([restored(str(tmp_path), sequences)], saved)  # this process alone
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert not list(tmp_path.glob("*/.part-*"))


def few_samples() -> Sequences:
    return Sequences(((1, 2), (3,)), ((4, 5), (VOCABULARY - 1,)))


def save_with_a_fault(fault: str, rank: int) -> None:
    """One checkpoint that succeeds, then one in whose writing something happens to rank 1."""
    trainer, _ = learners(seed=3)
    root = Path("checkpoints")
    checkpoint.save(root, trainer, {}, step=1, keep=1)
    if rank == 1:
        Part.write = {"full": _full, "killed": _killed}[fault]
    writing = checkpoint.begin(root, trainer, {}, step=2, keep=1, behind=fault != "full")
    writing.finish()


def _full(self: Part) -> None:
    raise OSError(28, "No space left on device")


def _killed(self: Part) -> None:
    die()


@pytest.mark.parametrize("fault", ["full", "killed"])
def test_a_fault_of_one_rank_leaves_the_older_checkpoint_and_ends_all(tmp_path: Path, fault: str) -> None:
    endings = run_job(tmp_path, 2, partial(save_with_a_fault, fault), timeout_s=6)
    assert endings[0].status == 3
    assert endings[1].status == (3 if fault == "full" else -9)
    if fault == "full":
        assert all("rank 1: OSError: [Errno 28] No space left on device" in ending.err for ending in endings)
    else:
        assert re.match(r"PeerLost: .*step-00000002.*rank 1", endings[0].err), endings[0].err
    root = tmp_path / "checkpoints"
    latest = checkpoint.latest(root)
    assert latest is not None
    assert latest.name == "step-00000001"
    trainer, _ = learners(seed=5)
    checkpoint.load(latest, trainer)
    checkpoint.save(root, trainer, {}, step=2, keep=2)
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002"]
