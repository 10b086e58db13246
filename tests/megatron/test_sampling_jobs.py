"""Engines of jobs whose ranks share a model: they say what one process says, and no token that is only padding."""

from collections.abc import Sequence

import attrs
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from relax.data.samples import Completion, Sequences
from relax.megatron import hf, stages
from relax.megatron.batching import Batching
from relax.megatron.layout import Layout
from relax.megatron.model import PolicyModel
from relax.megatron.trainer import Trainer
from relax.rollout.megatron_engine import MegatronEngine
from relax.rollout.transformers_engine import TransformersEngine
from tests.megatron import jobs
from tests.megatron.conftest import MODEL
from tests.megatron.steps import OPTIMIZER
from tests.megatron.test_engines import EOS, responses
from tests.megatron.test_trainer import WeightedLoss

# Two ranks that share it hold 42 rows. 41 x 20 numbers and 42 x 20 are drawn differently, down to the first 41 rows.
SIZE = attrs.evolve(MODEL, vocab_size=41, hidden_size=20)
LAYOUTS = [Layout(tensor=2), Layout(pipeline=2), Layout(tensor=2, pipeline=2)]


@attrs.frozen
class Said:
    """Fresh weights, and what the engines say with them sharpened and after an optimizer step, the update before."""

    fresh: dict[str, Tensor]
    groups: list[list[list[Completion]]]
    grad_norm: float


def said(sequences: Sequences, *, tied: bool) -> Said:
    config = attrs.evolve(SIZE, tie_embeddings=tied)
    trainer = Trainer(config, OPTIMIZER, seed=3, batching=Batching(micro_batch_size=4))
    fresh = {name: tensor.clone() for name, tensor in hf.export(trainer.model, config).items()}
    _sharpen(trainer.model)
    engines = MegatronEngine([EOS]), TransformersEngine([EOS])
    groups = []
    for engine in engines:
        engine.update_weights(trainer)
        groups.append(responses(engine))
    update = trainer.update(sequences, WeightedLoss(sequences))
    for engine in engines:
        engine.update_weights(trainer)
        groups.append(responses(engine))
    return Said(fresh, groups, update.grad_norm)


@torch.no_grad()
def _sharpen(model: PolicyModel) -> None:
    """A fresh model is nearly uniform, which hides faults; and padding that took part anywhere would be heard."""
    for name, parameter in model.named_parameters():
        parameter.mul_(6.0) if parameter.dim() > 1 else parameter.mul_(1.1)
        if name in (stages.EMBEDDING, stages.OUTPUT):
            start = len(parameter) * parallel_state.get_tensor_model_parallel_rank()
            parameter[SIZE.vocab_size - start :] = 9.0


def both(sequences: Sequences) -> list[Said]:
    return [said(sequences, tied=tied) for tied in (True, False)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["TP 2", "PP 2", "TP 2 x PP 2"])
def test_engines_say_what_one_process_says(layout: Layout, sequences: Sequences) -> None:
    alone = both(sequences)
    for ours in jobs.run(layout.replica, layout, both, sequences):
        for found, expected in zip(ours, alone, strict=True):
            assert found.fresh.keys() == expected.fresh.keys()
            assert all(tensor.equal(expected.fresh[name]) for name, tensor in found.fresh.items())
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            _assert_same(found.groups, expected.groups)
            assert found.groups[0] != found.groups[2]  # the engines took the new weights over


def _assert_same(found: Sequence[list[list[Completion]]], expected: Sequence[list[list[Completion]]]) -> None:
    pairs = [
        (ours, theirs)
        for said, wanted in zip(found, expected, strict=True)
        for group, other in zip(said, wanted, strict=True)
        for ours, theirs in zip(group, other, strict=True)
    ]
    assert [ours.token_ids for ours, _ in pairs] == [theirs.token_ids for _, theirs in pairs]
    for ours, theirs in pairs:
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
