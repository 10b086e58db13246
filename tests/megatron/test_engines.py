from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from relax.data.samples import Completion, Sequences
from relax.megatron.model import ModelConfig
from relax.megatron.trainer import Trainer
from relax.rollout.engine import Engine, choose, sample
from relax.rollout.megatron_engine import MegatronEngine
from relax.rollout.transformers_engine import TransformersEngine
from tests.megatron.conftest import ARCHITECTURES
from tests.megatron.test_trainer import WeightedLoss

MakeTrainer = Callable[..., Trainer]
EOS = 1
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17, 18]]
ENGINES = pytest.mark.parametrize("engine_type", [MegatronEngine, TransformersEngine])


def responses(
    engine: Engine, prompts: Sequence[Sequence[int]] = PROMPTS, *, temperature: float = 1.0, n: int = 3, seed: int = 4
) -> list[list[Completion]]:
    seeds = [seed * 10 + len(prompt) for prompt in prompts]
    return engine.generate(prompts, n=n, max_new_tokens=20, temperature=temperature, seeds=seeds)


@ENGINES
@ARCHITECTURES
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_reported_log_probs_are_the_trainers(
    make_trainer: MakeTrainer, engine_type: type[MegatronEngine], temperature: float, config: ModelConfig
) -> None:
    trainer = make_trainer(config, temperature=temperature)
    engine = engine_type([EOS])
    engine.update_weights(trainer)
    groups = responses(engine, temperature=temperature)
    sampled = Sequences(
        tuple(tuple(prompt) for prompt, group in zip(PROMPTS, groups, strict=True) for _ in group),
        tuple(completion.token_ids for group in groups for completion in group),
    )
    reported = torch.tensor([value for group in groups for completion in group for value in completion.log_probs])
    torch.testing.assert_close(reported, trainer.log_probs(sampled).log_probs, atol=1e-5, rtol=0)
    lengths = {len(response) for response in sampled.responses}
    assert len(lengths) > 2  # rows ended at different times
    for completion in (completion for group in groups for completion in group):
        assert completion.finished == (completion.token_ids[-1] == EOS)
        assert EOS not in completion.token_ids[:-1]
        assert completion.finished or len(completion.token_ids) == 20


@ARCHITECTURES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_engines_say_the_same(make_trainer: MakeTrainer, temperature: float, config: ModelConfig) -> None:
    trainer = make_trainer(config)
    engines = MegatronEngine([EOS]), TransformersEngine([EOS])
    for engine in engines:
        engine.update_weights(trainer)
    ours, theirs = (responses(engine, temperature=temperature) for engine in engines)
    assert [[c.token_ids for c in group] for group in ours] == [[c.token_ids for c in group] for group in theirs]


@ENGINES
@pytest.mark.parametrize(("temperature", "n"), [(0.0, 1), (1.0, 3)])
def test_a_prompt_is_answered_as_it_would_be_alone(
    make_trainer: MakeTrainer, engine_type: type[MegatronEngine], temperature: float, n: int
) -> None:
    engine = engine_type([EOS])
    engine.update_weights(make_trainer())
    together = responses(engine, temperature=temperature, n=n)
    for prompt, group in zip(PROMPTS, together, strict=True):
        (alone,) = responses(engine, [prompt], temperature=temperature, n=n)
        for own, other in zip(alone, group, strict=True):
            assert own.token_ids == other.token_ids
            assert own.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@ENGINES
def test_a_seed_decides_and_the_global_random_state_is_left_alone(
    make_trainer: MakeTrainer, engine_type: type[MegatronEngine]
) -> None:
    engine = engine_type([EOS])
    engine.update_weights(make_trainer())
    before = torch.get_rng_state()
    assert responses(engine) == responses(engine)
    assert responses(engine) != responses(engine, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_arrive_when_the_protocol_says(make_trainer: MakeTrainer, sequences: Sequences) -> None:
    trainer = make_trainer()
    engine, reference = TransformersEngine([EOS]), MegatronEngine([EOS])
    engine.update_weights(trainer)
    reference.update_weights(trainer)
    before = responses(engine)
    trainer.update(sequences, WeightedLoss(sequences))
    assert responses(engine) == before
    engine.update_weights(trainer)
    updated = responses(engine)
    assert updated != before
    assert [[c.token_ids for c in g] for g in updated] == [[c.token_ids for c in g] for g in responses(reference)]


@ENGINES
def test_requests_that_cannot_be_met_are_refused(make_trainer: MakeTrainer, engine_type: type[MegatronEngine]) -> None:
    engine = engine_type([EOS])
    with pytest.raises(RuntimeError, match="call update_weights first"):
        responses(engine)
    engine.update_weights(make_trainer())
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        responses(engine, [[3], []])
    with pytest.raises(ValueError, match="prompt of 50 tokens and 20 new ones"):
        responses(engine, [[3] * 50])
    with pytest.raises(ValueError, match="1 seeds for 2 prompts"):
        engine.generate([[3], [4]], n=1, max_new_tokens=2, temperature=1.0, seeds=[0])
    assert responses(engine, []) == []


def test_choices_follow_the_distribution() -> None:
    """An even grid of N random numbers must give each token N times its probability, to within one."""
    probabilities = torch.tensor([0.1, 0.0, 0.25, 0.4, 0.05, 0.2], dtype=torch.float64)
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for temperature in (1.0, 0.5):
        expected = probabilities ** (1 / temperature)
        expected = expected / expected.sum()
        tokens, log_probs = choose(probabilities.log().float().expand(1000, -1), grid, temperature)
        counts = torch.bincount(tokens, minlength=6)
        assert (counts - 1000 * expected).abs().max() <= 1.0
        torch.testing.assert_close(log_probs.double(), expected[tokens].log(), atol=1e-6, rtol=0)


def test_the_extremes_of_the_random_numbers_hit_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]]).expand(2, -1)
    tokens, _ = choose(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), 1.0)
    assert tokens.tolist() == [1, 2]


@ENGINES
def test_any_of_several_tokens_ends_a_response(make_trainer: MakeTrainer, engine_type: type[MegatronEngine]) -> None:
    """Each response is what the engine says that knows no end, up to the first of them."""
    ends, trainer = (EOS, 9, 30), make_trainer()
    said, endless = engine_type(ends), engine_type([1_000])
    for engine in (said, endless):
        engine.update_weights(trainer)
    last = set()
    for group, whole in zip(responses(said, n=8), responses(endless, n=8), strict=True):
        for ours, theirs in zip(group, whole, strict=True):
            first = next((at for at, token in enumerate(theirs.token_ids) if token in ends), None)
            assert ours.token_ids == theirs.token_ids[: len(theirs.token_ids) if first is None else first + 1]
            assert ours.finished == (first is not None)
            last.add(ours.token_ids[-1])
    assert last >= set(ends)


class Countdown:
    """A made-up model: the token after t is t - 1; so a prompt that ends in k answers k - 1, ..., 1, 0."""

    def __init__(self) -> None:
        self.prefilled: list[int] = []
        self.batches: list[int] = []

    def prefill(self, prompts: Tensor, lengths: Tensor, n: int, max_new_tokens: int) -> Tensor:
        self.prefilled = lengths.tolist()
        return self._logits(prompts[range(len(prompts)), lengths - 1])

    def step(self, tokens: Tensor) -> Tensor:
        self.batches.append(len(tokens))
        return self._logits(tokens)

    def keep(self, rows: Tensor) -> None:
        assert len(rows) > 0

    def _logits(self, tokens: Tensor) -> Tensor:
        return 100.0 * torch.nn.functional.one_hot(tokens - 1, 10).float()


def test_prompts_are_read_once_and_finished_rows_leave() -> None:
    model = Countdown()
    groups = sample(
        model,
        [[9, 2], [4]],
        n=2,
        max_new_tokens=3,
        temperature=1.0,
        seeds=[0, 1],
        end_ids=[0],
        max_positions=100,
        device=torch.device("cpu"),
    )
    assert [[c.token_ids for c in group] for group in groups] == [[(1, 0)] * 2, [(3, 2, 1)] * 2]
    assert [[c.finished for c in group] for group in groups] == [[True] * 2, [False] * 2]
    assert model.prefilled == [2, 1]
    assert model.batches == [4, 2]
