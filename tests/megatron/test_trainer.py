import math
import random
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from relax.data.samples import Sequences
from relax.errors import RelaxError
from relax.megatron import hf
from relax.megatron.batch import micro_batches
from relax.megatron.layers import SharedPrompt
from relax.megatron.model import ModelConfig, build_model
from relax.megatron.optimizer import OptimizerConfig
from relax.megatron.trainer import MicroBatch, Trainer
from tests.megatron import reference
from tests.megatron.conftest import ARCHITECTURES, VOCABULARY

MakeTrainer = Callable[..., Trainer]


class WeightedLoss:
    """Some weight on every log-prob and every entropy of a batch: sum(a * log_prob + b * entropy)."""

    def __init__(self, sequences: Sequences, scale: float = 0.1) -> None:
        self.offsets = [0]
        for response in sequences.responses:
            self.offsets.append(self.offsets[-1] + len(response))
        generator = torch.Generator().manual_seed(1)
        self.weights = scale * torch.randn(2, self.offsets[-1], generator=generator)

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        weights = self.weights[:, self.offsets[batch.start] : self.offsets[batch.stop]]
        loss = (weights[0] * batch.log_probs + weights[1] * batch.entropy).sum()
        return loss, {"loss": loss, "tokens": torch.tensor(batch.log_probs.numel())}


def weights_of(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@ARCHITECTURES
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers(
    make_trainer: MakeTrainer, sequences: Sequences, temperature: float, config: ModelConfig
) -> None:
    trainer = make_trainer(config, temperature=temperature)
    with torch.no_grad():
        expected = reference.log_probs(reference.transformers_model(trainer), sequences, temperature)
    torch.testing.assert_close(trainer.log_probs(sequences).log_probs, expected, atol=1e-5, rtol=0)


def test_entropy_is_that_of_the_whole_distribution(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    sequences = Sequences(((4, 5),), ((6, 7, 8),))
    with torch.no_grad():
        logits = reference.transformers_model(trainer)(torch.tensor([[4, 5, 6, 7]])).logits[0, 1:]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(trainer.log_probs(sequences).entropy, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 5, 100])
def test_a_step_does_not_depend_on_the_micro_batch_size(
    make_trainer: MakeTrainer, sequences: Sequences, micro_batch_size: int
) -> None:
    loss = WeightedLoss(sequences)
    torch.manual_seed(7)
    whole = make_trainer(micro_batch_size=len(sequences))
    torch.manual_seed(7)
    cut = make_trainer(micro_batch_size=micro_batch_size)
    expected, update = whole.update(sequences, loss), cut.update(sequences, loss)
    assert update.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert update.metrics == pytest.approx(expected.metrics, rel=1e-5)
    for ours, theirs in zip(whole._ddp.buffers, cut._ddp.buffers, strict=True):
        torch.testing.assert_close(ours.grad_data, theirs.grad_data, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("prompt_lengths", [(9, 9, 9), (9, 4, 12)], ids=["equal", "uneven"])
def test_sharing_a_prompt_changes_nothing(make_trainer: MakeTrainer, prompt_lengths: tuple[int, ...]) -> None:
    """Samples that share the computation of their prompt, against each sample alone."""
    generator = random.Random(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(generator.randrange(VOCABULARY) for _ in range(count))

    copies = zip(map(tokens, prompt_lengths), (4, 3, 1), strict=True)
    prompts = [prompt for prompt, count in copies for _ in range(count)]
    grouped = Sequences(tuple(prompts), tuple(map(tokens, (5, 0, 9, 1, 4, 4, 2, 7))))
    (batch,) = micro_batches(grouped, [(0, 8)], torch.device("cpu"))
    assert isinstance(batch.attention, SharedPrompt)
    assert batch.input_ids.shape[0] == 3
    torch.manual_seed(7)
    together = make_trainer(micro_batch_size=8)
    torch.manual_seed(7)
    alone = make_trainer(micro_batch_size=1)
    ours, theirs = together.log_probs(grouped), alone.log_probs(grouped)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=1e-5, rtol=0)
    loss = WeightedLoss(grouped)
    assert together.update(grouped, loss).grad_norm == pytest.approx(alone.update(grouped, loss).grad_norm, rel=1e-5)
    for shared, single in zip(together._ddp.buffers, alone._ddp.buffers, strict=True):
        torch.testing.assert_close(shared.grad_data, single.grad_data, atol=1e-6, rtol=1e-4)


@ARCHITECTURES
def test_steps_are_those_of_plain_torch(make_trainer: MakeTrainer, sequences: Sequences, config: ModelConfig) -> None:
    """Three steps of transformers' model with torch's AdamW and clipping end at the same weights."""
    optimizer_config = OptimizerConfig(total_steps=10, lr=1e-2, weight_decay=0.1, clip_grad=0.5, adam_beta2=0.95)
    trainer = make_trainer(config, optimizer_config)
    loss = WeightedLoss(sequences)
    model = reference.transformers_model(trainer)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(3):
        update = trainer.update(sequences, _only_log_probs(loss))
        optimizer.zero_grad()
        (loss.weights[0] * reference.log_probs(model, sequences)).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert update.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert update.grad_norm > 0.5  # the clipping is exercised
        assert update.lr == 1e-2
    theirs = dict(model.named_parameters())
    for name, ours in hf.export(trainer.model, trainer.model_config).items():
        # Adam divides by the gradient's size: where it is tiny, its rounding shows, to a part of the 3e-2 moved.
        torch.testing.assert_close(ours, theirs[name].detach(), atol=5e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def _only_log_probs(loss: WeightedLoss) -> Callable[[MicroBatch], tuple[Tensor, Mapping[str, Tensor]]]:
    def log_prob_part(batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        weights = loss.weights[0, loss.offsets[batch.start] : loss.offsets[batch.stop]]
        return (weights * batch.log_probs).sum(), {}

    return log_prob_part


def test_metrics_are_added_up(make_trainer: MakeTrainer, sequences: Sequences) -> None:
    loss = WeightedLoss(sequences)
    trainer = make_trainer(micro_batch_size=2)
    metrics = trainer.update(sequences, loss).metrics
    assert metrics["tokens"] == sum(map(len, sequences.responses))


def test_a_gradient_that_is_not_finite_changes_nothing(make_trainer: MakeTrainer, sequences: Sequences) -> None:
    trainer = make_trainer()
    before = weights_of(trainer)
    with pytest.raises(RelaxError, match="step 1 is not finite"):
        trainer.update(sequences, lambda batch: (batch.log_probs.sum() * math.nan, {}))
    assert all(map(torch.equal, before, weights_of(trainer)))
    assert math.isfinite(trainer.update(sequences, WeightedLoss(sequences)).grad_norm)


def test_the_learning_rate_follows_the_schedule(make_trainer: MakeTrainer, sequences: Sequences) -> None:
    config = OptimizerConfig(total_steps=6, lr=0.08, min_lr=0.02, lr_warmup_steps=2, lr_decay_style="linear")
    trainer = make_trainer(optimizer=config)
    rates = [trainer.update(sequences, WeightedLoss(sequences, 0.0)).lr for _ in range(7)]
    assert rates == pytest.approx([0.0, 0.04, 0.08, 0.065, 0.05, 0.035, 0.02])


def test_a_reset_optimizer_remembers_nothing(make_trainer: MakeTrainer, sequences: Sequences) -> None:
    config, loss = OptimizerConfig(total_steps=10, lr=1e-2), WeightedLoss(sequences)
    used = make_trainer(optimizer=config)
    used.update(sequences, loss)
    fresh = make_trainer(optimizer=config)
    fresh.model.load_state_dict(used.model.state_dict())
    used.reset_optimizer(config)
    assert used.update(sequences, loss) == fresh.update(sequences, loss)
    assert all(map(torch.equal, weights_of(used), weights_of(fresh)))


def test_a_batch_without_tokens_takes_a_step_of_zero(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    before = weights_of(trainer)
    for empty in (Sequences((), ()), Sequences(((3,), (4, 5)), ((), ()))):
        assert trainer.log_probs(empty).log_probs.shape == (0,)
        assert trainer.update(empty, lambda batch: (batch.log_probs.sum(), {})).grad_norm == 0.0
    assert all(map(torch.equal, before, weights_of(trainer)))


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        (Sequences(((1,), (1,) * 60), ((2,), (2,) * 5)), "sample 1 has 65 tokens, but the model has 64 positions"),
        (Sequences(((1,), (1,)), ((2,), (2, 40))), "sample 1 has a token id outside the vocabulary of 40"),
    ],
)
def test_sequences_that_do_not_fit_are_named(make_trainer: MakeTrainer, sequences: Sequences, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer().log_probs(sequences)


def test_models_of_a_seed_are_equal_and_leave_the_random_state_alone() -> None:
    config = ModelConfig(vocab_size=11, num_layers=1, hidden_size=16, ffn_hidden_size=16, kv_channels=4)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = (build_model(config, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not all(map(torch.equal, first.parameters(), other.parameters()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_attention_heads": 4, "num_query_groups": 3}, "multiple of num_query_groups"),
        ({"kv_channels": 7}, "kv_channels must be even"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_an_impossible_model_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(vocab_size=10, **arguments)
