"""Checkpoints in jobs of several processes: every rank takes its share, and together they give back the whole."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from relax.data.samples import Sequences
from relax.megatron import hf
from relax.megatron.batching import Batching
from relax.megatron.layout import Layout
from relax.megatron.optimizer import OptimizerConfig
from relax.megatron.trainer import Trainer
from tests.megatron import jobs, reference
from tests.megatron.checkpoints import make
from tests.megatron.test_hf_pretrained import contents

SEQUENCES = Sequences(((4, 5), (9, 3, 7), (8,)), ((6, 7, 1), (8, 2), (250, 13, 14, 15)))
LAYOUTS = [Layout(tensor=2), Layout(pipeline=2), Layout(tensor=2, pipeline=2)]


def start_and_export(source: Path, target: Path) -> tuple[Tensor, Tensor]:
    """Log-probs under the policy and the reference that start from `source`; writes them out again."""
    pretrained = hf.read_pretrained(source)
    trainer = Trainer(
        pretrained.config,
        OptimizerConfig(total_steps=1, lr=1e-2),
        seed=0,
        batching=Batching(micro_batch_size=2),
        reference=True,
    )
    trainer.start_from(pretrained.weights)
    hf.save_pretrained(trainer.model, pretrained.config, target, pretrained.companions)
    return trainer.log_probs(SEQUENCES).log_probs, trainer.reference_log_probs(SEQUENCES).log_probs


@pytest.mark.parametrize("layout", LAYOUTS, ids=["tensor 2", "pipeline 2", "tensor 2 pipeline 2"])
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_every_layout_starts_from_a_checkpoint_and_gives_it_back(tmp_path: Path, name: str, layout: Layout) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    model = make(source, name, max_shard_size="30KB", dtype=torch.bfloat16)
    results = jobs.run(layout.replica, layout, start_and_export, source, target)
    with torch.no_grad():
        expected = reference.log_probs(model.float(), SEQUENCES)
    for policy, frozen in results:
        torch.testing.assert_close(policy, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(frozen, expected, atol=1e-4, rtol=0)
    assert contents(target) == contents(source)
