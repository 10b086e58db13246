"""How samples are cut into micro-batches and laid out, in numbers worked out by hand."""

import pytest
import torch

from relax.data.samples import Sequences
from relax.megatron import context
from relax.megatron.batch import micro_batches
from relax.megatron.batching import Batching
from relax.megatron.layers import Segments

CPU = torch.device("cpu")
# 4, 4, 9, 2 and 5 tokens; the fourth has no response.
SAMPLES = Sequences(((1, 2), (3,), (4, 5, 6), (7, 8), (9,)), ((10, 11), (12, 13, 14), (15,) * 6, (), (16,) * 4))


def spans(batching: Batching, context_ranks: int = 1) -> list[tuple[int, int]]:
    return batching.spans(SAMPLES, context_ranks)


def test_micro_batches_by_samples() -> None:
    assert spans(Batching(micro_batch_size=2)) == [(0, 2), (2, 4), (4, 5)]
    assert spans(Batching(micro_batch_size=9, qkv_format="thd")) == [(0, 5)]
    assert Batching(micro_batch_size=2).spans(Sequences((), ()), 1) == []


@pytest.mark.parametrize(
    ("prompts", "responses", "places"),
    [
        # One row of 3 + 2 x 3 places, against two of 3 + 4 - 1.
        (((1, 2, 3), (1, 2, 3)), ((4, 5, 6, 7), (8, 9, 10, 11)), (1, 9)),
        # One row of 1 + 2 x 3, against two of 1 + 4 - 1: nothing is saved by more than is lost.
        (((1,), (1,)), ((4, 5, 6, 7), (8,)), (1, 7)),
        # Two rows of 2 + 3 x 5, since one prompt has three responses, against four of 2 + 6 - 1.
        (((1, 2), (1, 2), (1, 2), (3,)), ((4,) * 6, (5,), (6,), (7,)), (4, 7)),
        # Equal prompts that are no neighbours.
        (((1, 2), (3, 4), (1, 2)), ((5, 6), (7, 8), (9, 9)), (3, 3)),
    ],
)
def test_prompts_are_shared_where_that_leaves_fewer_places(
    prompts: tuple[tuple[int, ...], ...], responses: tuple[tuple[int, ...], ...], places: tuple[int, int]
) -> None:
    (batch,) = micro_batches(Sequences(prompts, responses), [(0, len(prompts))], CPU)
    assert tuple(batch.input_ids.shape) == places


def test_micro_batches_by_tokens_count_the_padding_unless_there_is_none() -> None:
    # Padded: 2 x 4 fit, 3 x 9 do not; 9 and 2 make 2 x 9, which do not fit; 2 and 5 make 2 x 5.
    assert spans(Batching(micro_batch_size=1, max_tokens_per_gpu=12)) == [(0, 2), (2, 3), (3, 5)]
    # Packed: 4 + 4; 9 + 2; 5.
    assert spans(Batching(micro_batch_size=1, max_tokens_per_gpu=12, qkv_format="thd")) == [(0, 2), (2, 4), (4, 5)]
    # Two ranks share them: 4 + 4 + 9 + 2 + 5.
    assert spans(Batching(micro_batch_size=1, max_tokens_per_gpu=12, qkv_format="thd"), 2) == [(0, 5)]


def test_a_budget_that_a_sequence_may_exceed_is_refused() -> None:
    budget = Batching(micro_batch_size=1, max_tokens_per_gpu=12)
    budget.check(24, 2)
    with pytest.raises(ValueError, match=r"--max-tokens-per-gpu 12 on 2 context-parallel ranks: .*may have 25 tokens"):
        budget.check(25, 2)


@pytest.mark.parametrize("values", [{"micro_batch_size": 0}, {"micro_batch_size": 1, "max_tokens_per_gpu": 0}])
def test_sizes_below_one_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        Batching(**values)


def test_packed_samples_lie_behind_one_another_without_padding() -> None:
    """The last token of each is predicted, never fed; a sample without a response has nothing to predict."""
    (batch,) = micro_batches(SAMPLES, [(0, 4)], CPU, packed=True)
    assert batch.input_ids.tolist() == [[1, 2, 10, 3, 12, 13, 4, 5, 6, 15, 15, 15, 15, 15]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.places.tolist() == [1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]
    assert batch.targets.tolist() == [10, 11, 12, 13, 14] + [15] * 6
    assert batch.attention == Segments((3, 3, 8))
    (empty,) = micro_batches(SAMPLES, [(3, 4)], CPU, packed=True)
    assert (empty.input_ids.tolist(), len(empty.places), empty.start, empty.stop) == ([[0]], 0, 3, 4)


def test_zigzag_gives_every_rank_an_early_and_a_late_chunk_of_each_sequence() -> None:
    assert context.zigzag((4, 8), 2).tolist() == [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]
    assert context.zigzag((6,), 3).tolist() == [[0, 5], [1, 4], [2, 3]]
