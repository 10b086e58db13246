"""Other ways to compute the same step: activations again, bfloat16, an optimizer spread over ranks, a GPU."""

import random
from pathlib import Path

import attrs
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from relax.data.samples import Sequences
from relax.megatron import checkpoint
from relax.megatron.batching import Batching
from relax.megatron.critic import Critic, ValueBatch
from relax.megatron.layout import Layout
from relax.megatron.model import ModelConfig
from relax.megatron.optimizer import OptimizerConfig
from relax.megatron.trainer import MicroBatch, Trainer
from relax.rollout.megatron_engine import MegatronEngine
from tests.megatron import jobs
from tests.megatron.conftest import MODEL, VOCABULARY

BF16 = attrs.evolve(MODEL, bf16=True)
OPTIMIZER = OptimizerConfig(total_steps=10, lr=1e-2, adam_eps=1e-4)
ON_A_CPU = 2.77171


def draw(samples: int) -> Sequences:
    chance = random.Random(7)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(chance.randrange(VOCABULARY) for _ in range(chance.randint(1, most)))

    return Sequences(tuple(tokens(6) for _ in range(samples)), tuple(tokens(9) for _ in range(samples)))


def build(model: ModelConfig, optimizer: OptimizerConfig = OPTIMIZER) -> Trainer:
    trainer = Trainer(model, optimizer, seed=3, batching=Batching(micro_batch_size=3))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.mul_(1.1)
    trainer.reset_optimizer(optimizer)  # its weights are copies where the model's are bfloat16
    return trainer


def negative_log_likelihood(batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    loss = -batch.log_probs.sum() / 40
    return loss, {"loss": loss}


def gradients(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.main_grad.flatten() for parameter in trainer.model.parameters()])


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_activations_computed_again_change_no_bit() -> None:
    sequences = draw(7)
    kept, again = build(MODEL), build(attrs.evolve(MODEL, recompute_activations=True))
    for trainer in (kept, again):
        trainer.update(sequences, negative_log_likelihood)
    assert all(map(torch.equal, weights(kept), weights(again)))
    assert torch.equal(gradients(kept), gradients(again))


def test_a_recomputed_layer_keeps_its_input_only() -> None:
    """What the backward pass holds on to, counted where autograd saves it."""
    sequences = draw(7)

    def held(model: ModelConfig) -> int:
        trainer, total = build(model), 0

        def count(saved: Tensor) -> Tensor:
            nonlocal total
            total += saved.numel()
            return saved

        with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
            trainer.update(sequences, negative_log_likelihood)
        return total

    assert held(attrs.evolve(MODEL, recompute_activations=True)) < held(MODEL) / 2


def test_a_step_in_bfloat16_is_near_the_one_in_float32() -> None:
    sequences = draw(7)
    exact, coarse = build(MODEL), build(BF16)
    updates = [trainer.update(sequences, negative_log_likelihood) for trainer in (exact, coarse)]
    assert {parameter.dtype for parameter in coarse.model.parameters()} == {torch.bfloat16}
    assert {parameter.main_grad.dtype for parameter in coarse.model.parameters()} == {torch.float32}
    assert {p.dtype for group in coarse._optimizer.param_groups for p in group["params"]} == {torch.float32}
    difference = (gradients(coarse) - gradients(exact)).norm() / gradients(exact).norm()
    assert 0 < difference < 0.05  # a bfloat16 has 8 bits: 0.4 % in each of a dozen operations
    assert updates[1].metrics["loss"] == pytest.approx(updates[0].metrics["loss"], rel=0.01)
    found = coarse.log_probs(sequences)
    assert found.log_probs.dtype == found.entropy.dtype == torch.float32


def test_small_steps_add_up_in_bfloat16() -> None:
    """A hundred steps that each are lost in a weight of 8 bits move it, since the optimizer's own has 24."""
    optimizer = OptimizerConfig(total_steps=200, lr=1e-5, adam_eps=1e-4)
    trainer, sequences = build(BF16, optimizer), draw(4)
    before = trainer.update(sequences, negative_log_likelihood).metrics["loss"]
    start = trainer._optimizer.param_groups[0]["params"][0].clone()
    for _ in range(100):
        after = trainer.update(sequences, negative_log_likelihood).metrics["loss"]
    moved = (trainer._optimizer.param_groups[0]["params"][0] - start).abs().max()
    assert 0.5e-3 < moved < 1.5e-3
    assert after < before


def test_engine_and_critic_in_bfloat16() -> None:
    trainer, prompt = build(BF16), (1, 2, 3)
    engine = MegatronEngine([VOCABULARY])  # an id that is never drawn
    engine.update_weights(trainer)
    (answers,) = engine.generate([prompt], n=4, max_new_tokens=6, temperature=1.0, seeds=[0])
    sequences = Sequences((prompt,) * 4, tuple(answer.token_ids for answer in answers))
    reported = torch.tensor([value for answer in answers for value in answer.log_probs])
    assert (trainer.log_probs(sequences).log_probs - reported).abs().max() < 0.1

    critic = Critic(BF16, OPTIMIZER, seed=4, batching=Batching(micro_batch_size=3))

    def loss(batch: ValueBatch) -> tuple[Tensor, dict[str, Tensor]]:
        squared = (batch.values - 1).square().mean()
        return squared, {"loss": squared}

    first, *_, last = (critic.update(sequences, loss).metrics["loss"] for _ in range(8))
    assert last < first


def resume(optimizer: OptimizerConfig, model: ModelConfig, root: Path) -> tuple[list[Tensor], list[Tensor], int]:
    """A rank's weights after two steps, a checkpoint and a third one, undisturbed and resumed; its moments' size."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    sequences = draw(8).select(8 * rank // size, 8 * (rank + 1) // size)
    trainer, resumed = build(model, optimizer), build(model, optimizer)
    for _ in range(2):
        trainer.update(sequences, negative_log_likelihood)
    checkpoint.save(root, trainer, {}, step=2, keep=1)
    latest = checkpoint.latest(root)
    assert latest is not None
    checkpoint.load(latest, resumed)
    for learner in (trainer, resumed):
        learner.update(sequences, negative_log_likelihood)
    moments = sum(state["exp_avg"].numel() for state in trainer._optimizer.optimizer.state.values())
    return weights(trainer), weights(resumed), moments


@pytest.mark.parametrize("model", [MODEL, BF16], ids=["float32", "bfloat16"])
def test_a_distributed_optimizer_takes_the_same_steps_and_resumes(model: ModelConfig, tmp_path: Path) -> None:
    distributed = attrs.evolve(OPTIMIZER, distributed=True)
    plain = jobs.run(2, Layout(), resume, OPTIMIZER, model, tmp_path / "plain")
    spread = jobs.run(2, Layout(), resume, distributed, model, tmp_path / "spread")
    for (one, _, _), (other, resumed, _) in zip(plain, spread, strict=True):
        assert all(map(torch.equal, other, resumed))
        for ours, theirs in zip(other, one, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5 if model is MODEL else 2**-7, atol=1e-5)
    # Half of the state on each rank, but for padding.
    assert sum(moments for _, _, moments in spread) == plain[0][2]
    assert max(moments for _, _, moments in spread) < 0.7 * plain[0][2]


def test_the_gradient_norm_on_a_cpu() -> None:
    """What the test on a GPU compares with: there is no CPU path where there is a GPU."""
    assert build(MODEL).update(draw(7), negative_log_likelihood).grad_norm == pytest.approx(ON_A_CPU, rel=1e-4)
