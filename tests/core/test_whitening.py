"""GDPO's step over optimizer batches: each by itself, the same bits however it is spread, the same error everywhere."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import relax_core as rc
from relax_core.advantages import whiten_samples
from relax_core.collectives import Reduce
from tests.core.ranks import f64, on_ranks

GDPO = rc.get_algorithm("gdpo")
H = GDPO.hyperparameters()


def whiten(values: Tensor, segment: object = rc.whole_batch, reduce: Reduce = rc.local) -> Tensor:
    tokens = rc.Tokens.full([1] * len(values))
    return GDPO.estimate_advantages(H, values, tokens, segment=segment, reduce=reduce).advantages


def test_values_far_from_zero() -> None:
    out = whiten(f64([1000, 1000.01, 1000.02, 1000.03]))
    # std is 0.0129, so that eps takes 0.77 % off the textbook's 1.1619.
    torch.testing.assert_close(
        out * (1 + 1e-4 / 0.012909944), f64([-1.161895, -0.387298, 0.387298, 1.161895]), rtol=1e-5, atol=0
    )
    assert not whiten(f64([1000.1] * 7)).any()


def test_each_batch_by_itself_not_the_whole_rollout() -> None:
    values = f64([1.4, 1.2, -0.1, -0.2, -0.1, -0.3, -0.9, -1.0])
    torch.testing.assert_close(
        whiten(values, rc.split_by([4, 4]))[4:], f64([1.073, 0.621, -0.734, -0.960]), rtol=0, atol=1e-3
    )
    assert (whiten(values)[4:] < 0).all()


def test_a_batch_is_untouched_to_the_bit_by_its_neighbours() -> None:
    values = torch.cat([torch.randn(5) * 1e-30, torch.randn(7) * 1e30, torch.randn(4)]).double()
    apart = torch.cat([whiten(part) for part in values.split([5, 7, 4])])
    assert torch.equal(whiten(values, rc.split_by([5, 7, 4])), apart)


def test_any_segmentation_into_views_is_understood() -> None:
    values = torch.randn(8).double()
    every_other = whiten(values, lambda samples: (samples[::2], samples[1::2]))
    assert torch.equal(every_other[::2], whiten(values[::2]))
    assert torch.equal(every_other[1::2], whiten(values[1::2]))


def test_float32_extremes_do_not_overflow() -> None:
    for dtype in (torch.float32, torch.float64):
        largest = torch.finfo(torch.float32).max
        out = whiten(torch.tensor([-largest, 0, largest], dtype=dtype))
        assert out.dtype == dtype
        assert out.tolist() == [-1.0, 0.0, 1.0]


def test_equal_as_a_trainer_sees_them_is_equal() -> None:
    assert not whiten(f64([1.0, 1.0 + 1e-12, 1.0 - 1e-12])).any()
    assert not whiten(f64([1e-60, 2e-60])).any()
    assert whiten(f64([1.0, 1.0 + 1e-6])).any()
    assert whiten(f64([5.0])).tolist() == [0.0]


def test_empty_rollout() -> None:
    assert whiten(f64([])).shape == (0,)


def test_spread_over_tokens_and_dtype_kept() -> None:
    tokens = rc.Tokens.full([2, 0, 3])
    out = GDPO.estimate_advantages(H, torch.tensor([0.0, 1.0, 2.0]), tokens)
    assert out.advantages.dtype == torch.float32
    assert torch.equal(out.returns, out.advantages)
    assert torch.unique_consecutive(out.advantages).shape == (2,)


def test_the_paper_in_one_batch() -> None:
    """A group where one component varies and one where both do: the second weighs twice as much, as it should."""
    run = rc.pipeline("gdpo")
    scores = run.scores(f64([[0, 0], [1, 0], [0, 0], [1, 1]]), torch.tensor([0, 0, 1, 1]))
    expected = f64([-0.547680, 0.547680, -1.095360, 1.095360])
    torch.testing.assert_close(whiten(scores), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "weights", "expected"),
    [
        ("101011 001000", (), [-0.6454, -0.6454, 1.2909, -0.6454, 1.2909, -0.6454]),
        ("100101 100110", (), [0.0] * 6),
        ("100110 011001", (1.0, 0.5), [0.6454, -1.2907, 0.6454, -0.6454, 1.2907, -0.6454]),
        ("0011", (), [-0.707071, 0.707071]),
    ],
)
def test_right_values_of_public_faults(groups: str, weights: tuple[float, ...], expected: list[float]) -> None:
    """Groups of binary reward pairs, written as digits."""
    matrix = f64([int(digit) for digit in groups.replace(" ", "")]).view(-1, 2)
    ids = torch.arange(groups.count(" ") + 1).repeat_interleave(len(groups.split()[0]) // 2)
    run = rc.pipeline("gdpo", GDPO.hyperparameters(gdpo_reward_weights=weights))
    torch.testing.assert_close(whiten(run.scores(matrix, ids)), f64(expected), rtol=0, atol=1e-4 * any(expected))


def test_an_all_constant_batch_gets_nothing() -> None:
    matrix = f64([(0.35, 0.95)] * 7 + [(0.3, 0.6)] * 7)
    assert not whiten(rc.pipeline("gdpo").scores(matrix, torch.arange(2).repeat_interleave(7))).any()


def test_what_eps_leaves_of_opposite_components_is_the_formulas() -> None:
    """A batch of nothing but a residue of 1e-5 is blown up to order 1. Beside one healthy group it is 1e-4."""
    matrix = f64([(100, 0), (0, 1), (50, 1), (60, 0)])
    run, ids = rc.pipeline("gdpo"), torch.tensor([0, 0, 1, 1])
    out = whiten(run.scores(matrix, ids))
    torch.testing.assert_close(out, f64([0.4731, -0.4731, -0.4301, 0.4301]), rtol=0, atol=1e-4)
    healthy = whiten(run.scores(torch.cat([matrix, f64([(0, 0), (1, 1)])]), torch.tensor([0, 0, 1, 1, 2, 2])))
    assert healthy[:4].abs().max() < 1e-3


# --- over ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [[[3, 2], [1, 4]], [[0, 5], [4, 1]], [[4, 5], [0, 0]], [[1, 1], [1, 1], [2, 0], [0, 3]]]
)
def test_ranks_agree_with_a_single_process_to_the_bit(sizes: list[list[int]]) -> None:
    torch.manual_seed(3)
    shares = [[torch.randn(n).double() * 1e3 + 7 for n in batches] for batches in sizes]
    results, world = on_ranks(
        list(zip(shares, sizes, strict=True)),
        lambda share, reduce: whiten(torch.cat(share[0]), rc.split_by(share[1]), reduce),
    )
    together = [torch.cat([share[batch] for share in shares]) for batch in range(2)]
    alone = [whiten(values) for values in together]
    for batch in range(2):
        spread = torch.cat([result.split(own)[batch] for result, own in zip(results, sizes, strict=True)])
        assert torch.equal(spread, alone[batch])
    assert world.collectives == 3


def test_three_collectives_however_many_batches() -> None:
    _, world = on_ranks(
        [torch.randn(40).double()] * 2, lambda share, reduce: whiten(share, rc.split_by([1] * 40), reduce)
    )
    assert world.collectives == 3


NAN = float("nan")
VALUES = f64([1.0, 2.0, 3.0, 4.0])
FAULTS: dict[str, tuple[Callable[[Reduce], Tensor], str]] = {
    "no segmentation": (lambda reduce: whiten(VALUES, None, reduce), "segmentation into optimizer batches is missing"),
    "no sizes": (lambda reduce: whiten(VALUES, rc.split_by(None), reduce), "never taken to be one batch"),
    "empty sizes": (lambda reduce: whiten(VALUES, rc.split_by([]), reduce), "non-empty"),
    "fractional sizes": (lambda reduce: whiten(VALUES, rc.split_by([2.0, 2.0]), reduce), "whole numbers"),
    "negative sizes": (lambda reduce: whiten(VALUES, rc.split_by([-1, 5]), reduce), "whole numbers"),
    "bool sizes": (lambda reduce: whiten(VALUES, rc.split_by([True, 3]), reduce), "whole numbers"),
    "wrong sum": (lambda reduce: whiten(VALUES, rc.split_by([2, 3]), reduce), "add up to 5, not to 4"),
    "overlap": (lambda reduce: whiten(VALUES, lambda v: (v[:3], v[2:]), reduce), "each of 4 samples once"),
    "nan": (lambda reduce: whiten(f64([1, NAN, 2, 3]), rc.split_by([2, 2]), reduce), "sample 1 is nan"),
    "nan twice": (lambda reduce: whiten(f64([1, 2, NAN, NAN]), rc.split_by([2, 2]), reduce), "sample 2 is nan"),
    "overflow": (lambda reduce: whiten(f64([1, 2, 1e39, 3]), rc.split_by([2, 2]), reduce), "sample 2 is 1e"),
    "integers": (lambda reduce: whiten(torch.tensor([1, 2, 3, 4]), rc.split_by([2, 2]), reduce), "scores"),
    "wrong shape": (
        lambda reduce: whiten_samples(VALUES, rc.Tokens.full([1] * 3), segment=rc.split_by([2, 2]), reduce=reduce),
        "4 values for 3 samples",
    ),
    "broken segment": (lambda reduce: whiten(VALUES, lambda v: 1 / 0, reduce), "division by zero"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("faulty", [0, 1])
def test_one_ranks_fault_raises_the_same_on_every_rank(fault: str, faulty: int) -> None:
    run, message = FAULTS[fault]
    healthy = lambda reduce: whiten(VALUES, rc.split_by([2, 2]), reduce)  # noqa: E731
    errors, world = on_ranks(
        [rank == faulty for rank in range(3)], lambda bad, reduce: (run if bad else healthy)(reduce)
    )
    assert world.collectives == 1
    assert len({type(error) for error in errors}) == 1
    assert all(message in str(error) for error in errors)
    assert ["this rank failed" in str(error) for error in errors] == [rank == faulty for rank in range(3)]
    assert isinstance(errors[0], RuntimeError if fault == "broken segment" else (ValueError, TypeError))


def test_two_unlike_faults_do_not_make_a_garbled_message() -> None:
    runs = [FAULTS["nan"][0], FAULTS["wrong sum"][0]]
    errors, _ = on_ranks(runs, lambda run, reduce: run(reduce))
    assert all("several ranks failed" in str(error) for error in errors)


def test_ranks_that_disagree_on_the_number_of_batches() -> None:
    errors, world = on_ranks([[4], [2, 2]], lambda sizes, reduce: whiten(VALUES, rc.split_by(sizes), reduce))
    assert all(isinstance(error, ValueError) and "from 1 to 2" in str(error) for error in errors)
    assert world.collectives == 1


def test_a_batch_that_is_empty_everywhere() -> None:
    errors, _ = on_ranks([[0, 4], [0, 4]], lambda sizes, reduce: whiten(VALUES, rc.split_by(sizes), reduce))
    assert all(isinstance(error, ValueError) and "optimizer batch 0 holds no sample" in str(error) for error in errors)
    for values in (VALUES, VALUES[:1]):
        with pytest.raises(ValueError, match="optimizer batch 0 holds no sample on any rank"):
            whiten(values, rc.split_by([0, len(values)]))


def test_a_single_process_gets_the_plain_error() -> None:
    with pytest.raises(ValueError, match=r"never taken to be one batch$"):
        whiten(VALUES, rc.split_by(None))
