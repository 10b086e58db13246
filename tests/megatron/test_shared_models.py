"""What is wrong on one of the ranks that share a model, and sampling with it."""

from itertools import chain

import pytest
import torch
from megatron.core import parallel_state

from relax.data.samples import Completion, Sequences
from relax.errors import RelaxError
from relax.megatron.batching import Batching
from relax.megatron.layout import Layout
from relax.megatron.trainer import Trainer
from relax.rollout.megatron_engine import MegatronEngine
from tests.megatron import jobs, wholes
from tests.megatron.conftest import MODEL
from tests.megatron.test_parallel import OPTIMIZER


def faults(sequences: Sequences, layout: Layout) -> list[str]:
    """What each rank is told of samples that do not fit, and of a gradient that is not finite, on one rank alone."""
    trainer = Trainer(MODEL, OPTIMIZER, seed=3, batching=Batching(micro_batch_size=4))
    told = []
    if layout.data(2) == 2:
        long = Sequences(((1,) * 60,), ((2,) * 5,))
        with pytest.raises(ValueError, match="tokens") as refused:
            trainer.log_probs(long if parallel_state.get_data_parallel_rank() else sequences)
        told.append(str(refused.value))
    before = wholes.part_of(trainer.model).weights
    with torch.no_grad():  # a weight that only the last layer of one rank has
        last = list(trainer.model.decoder.layers)[-1].mlp.linear_fc2.weight
        if torch.distributed.get_rank() == 1:
            last[0, 0] = torch.nan
    with pytest.raises(RelaxError, match="step 1 is not finite") as not_finite:
        trainer.update(sequences, lambda batch: (batch.log_probs.sum(), {}))
    told.append(str(not_finite.value))
    changed = [name for name, weight in trainer.model.named_parameters() if not weight.equal(before[name])]
    assert changed in ([], [f"decoder.layers.{len(trainer.model.decoder.layers) - 1}.mlp.linear_fc2.weight"])
    return told


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(context=2)], ids=str)
def test_what_is_wrong_on_one_rank_is_raised_on_all(layout: Layout, sequences: Sequences) -> None:
    first, second = jobs.run(2, layout, faults, sequences, layout)
    assert first[-1] == second[-1]
    if layout == Layout():
        assert "sample 0 has 65 tokens, but the model has 64 positions" in first[0]
        assert "another rank failed" in first[0]
        assert "this rank failed" in second[0]


def sampled() -> list[list[Completion]]:
    trainer = Trainer(MODEL, OPTIMIZER, seed=3, batching=Batching(micro_batch_size=4))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.mul_(1.1)
    engine = MegatronEngine([1])
    engine.update_weights(trainer)
    asked = [[3, 4, 5], [6], [7, 8]]
    return engine.generate(asked, n=2, max_new_tokens=6, temperature=1.0, seeds=[0, 1, 2])


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(context=2), Layout(pipeline=2)], ids=str)
def test_sampling_with_a_model_that_ranks_share(layout: Layout) -> None:
    """The same tokens as of one process, on every rank."""
    alone = sampled()
    for groups in jobs.run(2, layout, sampled):
        for ours, theirs in zip(chain(*groups), chain(*alone), strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
