"""The critic and the reference: what they start as, what moves them and what does not."""

import attrs
import pytest
import torch

from relax.data.samples import Sequences
from relax.megatron.batching import Batching
from relax.megatron.critic import Critic, ValueBatch
from relax.megatron.optimizer import OptimizerConfig
from tests.megatron.conftest import MODEL
from tests.megatron.test_trainer import MakeTrainer, WeightedLoss


def make_critic(
    micro_batch_size: int = 4, lr: float = 1e-2, *, bf16: bool = False, distributed: bool = False
) -> Critic:
    return Critic(
        attrs.evolve(MODEL, bf16=bf16),
        OptimizerConfig(lr=lr, total_steps=99, distributed=distributed),
        seed=1,
        batching=Batching(micro_batch_size=micro_batch_size),
    )


def towards(target: torch.Tensor, sequences: Sequences):  # type: ignore[no-untyped-def]
    def loss(batch: ValueBatch):  # type: ignore[no-untyped-def]
        span = sequences.tokens.token_slice(batch.start, batch.stop)
        distance = (batch.values - target[span]).square().sum() / len(target)
        return distance, {"distance": distance.detach()}

    return loss


def test_a_new_critic_knows_nothing_and_learns_what_it_is_told(sequences: Sequences) -> None:
    critic = make_critic()
    assert critic.values(sequences).tolist() == [0.0] * sequences.tokens.num_tokens
    target = torch.linspace(-1, 1, sequences.tokens.num_tokens)
    distances = [critic.update(sequences, towards(target, sequences)).metrics["distance"] for _ in range(30)]
    assert distances[0] == pytest.approx(float(target.square().mean()), rel=1e-5)
    assert distances[-1] < distances[0] / 3


def test_values_do_not_depend_on_micro_batches(sequences: Sequences) -> None:
    target = torch.ones(sequences.tokens.num_tokens)
    found = []
    for size in (1, 3, 64):
        critic = make_critic(size)
        for _ in range(2):
            update = critic.update(sequences, towards(target, sequences))
        found.append((critic.values(sequences), update.grad_norm))
    for values, norm in found[1:]:
        torch.testing.assert_close(values, found[0][0], rtol=1e-4, atol=1e-6)
        assert norm == pytest.approx(found[0][1], rel=1e-4)


def test_the_value_of_a_token_is_that_of_what_stands_before_it(sequences: Sequences) -> None:
    critic = make_critic()
    target = torch.linspace(-1, 1, sequences.tokens.num_tokens)
    for _ in range(3):
        critic.update(sequences, towards(target, sequences))
    prompt, response = (1, 2, 3), (4, 5, 6)
    values = critic.values(Sequences((prompt,), (response,)))
    other = critic.values(Sequences((prompt,), ((4, 7, 6),)))
    assert values[:2].equal(other[:2])  # the second token itself is not yet known
    assert values[2] != other[2]


def test_a_critic_starts_from_the_policys_body(make_trainer: MakeTrainer, sequences: Sequences) -> None:
    trainer, critic = make_trainer(seed=5), make_critic()
    critic.start_from(trainer.model)
    policy, value = trainer.model.state_dict(), critic.model.state_dict()
    body = [name for name in policy if not name.startswith("output_layer") and policy[name] is not None]
    assert len(body) > 10
    assert all(policy[name].equal(value[name]) for name in body if isinstance(policy[name], torch.Tensor))
    assert not value["output_layer.weight"].any()


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed optimizer"])
def test_the_first_step_in_bfloat16_starts_from_the_policys_body(
    make_trainer: MakeTrainer, sequences: Sequences, distributed: bool
) -> None:
    """The optimizer steps copies of its own: a step of nothing must leave the body where the policy's is."""
    trainer = make_trainer(attrs.evolve(MODEL, bf16=True), seed=5)
    critic = make_critic(lr=0.0, bf16=True, distributed=distributed)
    critic.start_from(trainer.model)
    critic.update(sequences, towards(torch.ones(sequences.tokens.num_tokens), sequences))
    policy, value = dict(trainer.model.named_parameters()), dict(critic.model.named_parameters())
    for name in policy.keys() & value.keys() - {"output_layer.weight"}:
        assert policy[name].equal(value[name]), name


def test_the_reference_stays_where_it_was_kept(make_trainer: MakeTrainer, sequences: Sequences) -> None:
    trainer = make_trainer(reference=True)
    before = trainer.log_probs(sequences).log_probs
    trainer.keep_reference()
    for _ in range(2):
        trainer.update(sequences, WeightedLoss(sequences))
    assert trainer.reference_log_probs(sequences).log_probs.equal(before)
    assert not trainer.log_probs(sequences).log_probs.equal(before)
    trainer.keep_reference()
    assert trainer.reference_log_probs(sequences).log_probs.equal(trainer.log_probs(sequences).log_probs)
    with pytest.raises(RuntimeError, match="without a reference"):
        make_trainer().reference_log_probs(sequences)
