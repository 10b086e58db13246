"""Does a group carry signal, and how sound is it."""

import math

import pytest
import torch
from torch import Tensor

import relax_core as rc
from relax_core import signal
from tests.core.ranks import f64

GRPO, GDPO = rc.get_algorithm("grpo"), rc.get_algorithm("gdpo")
ONES = f64([1.0, 1.0])


@pytest.mark.parametrize(
    ("name", "group", "carries"),
    [
        ("grpo", [[0.0], [1.0]], True),
        ("grpo", [[0.35]] * 7, False),
        ("grpo", [[1.0], [1.0 + 1e-12]], False),
        ("grpo", [], False),
        ("rloo", [[1.0]], False),
        ("gdpo", [[1, 0], [0, 1], [1, 0]], False),
        ("gdpo", [[1, 0], [1, 1]], True),
        ("gdpo", [[0.1, 0.3]] * 7, False),
        ("gdpo", [[1, 2]], False),
        ("gdpo", [], False),
    ],
)
def test_does_a_group_carry_signal(name: str, group: list[list[float]], carries: bool) -> None:
    algorithm = rc.get_algorithm(name)
    matrix = f64(group).view(len(group), 2 if name == "gdpo" else 1)
    assert signal.carries_signal(algorithm, algorithm.hyperparameters(), matrix) is carries


def test_weights_count_for_the_signal() -> None:
    opposite = f64([[1, 0], [0, 1], [1, 0]])
    for weights, carries in (((1.0, 0.5), True), ((1.0, 1.0), False), ((1.0, 0.0), True)):
        hyperparameters = GDPO.hyperparameters(gdpo_reward_weights=weights)
        assert signal.carries_signal(GDPO, hyperparameters, opposite) is carries


def test_signal_of_many_groups_at_once() -> None:
    matrix = f64([[1, 0], [5, 5], [0, 1], [5, 5], [2, 0], [7, 7]])
    ids = torch.tensor([9, -2, 9, -2, 9, 4])
    assert signal.groups_with_signal(GDPO, GDPO.hyperparameters(), matrix, ids).tolist() == [False, False, True]


def test_broken_rewards_are_no_silent_no() -> None:
    with pytest.raises(ValueError, match="is nan"):
        signal.carries_signal(GRPO, GRPO.hyperparameters(), f64([[float("nan")], [1.0]]))


# --- how sound it is --------------------------------------------------------------------------------------------------


def one_group(matrix: Tensor, weights: Tensor = ONES) -> signal.Components:
    return signal.components(matrix, torch.zeros(len(matrix), dtype=torch.long), weights)


def test_a_sound_group() -> None:
    found = one_group(f64([[0, 0], [1, 0], [1, 1], [0, 1]]))
    assert not found.flat.any()
    assert not found.cancels.any()
    assert found.condition.item() == pytest.approx(1.0)
    assert found.rounding.item() < 1e-14
    torch.testing.assert_close(found.share, f64([[0.5, 0.5]]))


def test_shares_add_up_and_tell_who_works_against() -> None:
    found = one_group(f64([[0, 1, 3], [1, 0.5, 3], [2, 0, 3], [5, 0.25, 3]]), f64([1.0, 0.5, 1.0]))
    assert found.share.sum().item() == pytest.approx(1.0)
    assert found.flat.tolist() == [[False, False, True]]
    assert found.share[0, 0] > 1
    assert found.share[0, 1] < 0
    assert found.share[0, 2] == 0


def test_exact_cancellation() -> None:
    found = one_group(f64([[1, 0], [0, 1], [1, 0]]))
    assert found.condition.item() == math.inf
    assert found.cancels.tolist() == [[True, True]]
    assert not found.share.any()


def test_all_flat_is_no_cancellation() -> None:
    found = one_group(f64([[0.1, 0.3]] * 7))
    assert found.flat.all()
    assert (found.condition.item(), found.rounding.item()) == (1.0, 0.0)
    assert not found.cancels.any()


def test_a_residue_of_rounding_is_known_for_one() -> None:
    """1e13 - r is rounded when it is made: what is left of the two components is rounding, and said to be."""
    torch.manual_seed(12)
    reward = torch.rand(8).double()
    found = one_group(torch.stack([reward, 1e13 - reward], 1))
    assert found.rounding.item() >= 1
    assert found.cancels.all()
    healthy = one_group(torch.stack([reward, 1e3 - 2 * reward.square()], 1))
    assert healthy.rounding.item() < 1e-9


def test_a_residue_of_eps_is_flagged_by_the_condition() -> None:
    groups = torch.tensor([0, 0, 1, 1])
    found = signal.components(f64([(100, 0), (0, 1), (50, 1), (60, 0)]), groups, ONES)
    assert (found.condition > 1e3).all()
    assert (found.rounding < 1e-6).all()


def test_the_bound_holds() -> None:
    """Rewards with more digits than float64 has: the exact score is within the bound of the computed one."""
    from fractions import Fraction

    generator = torch.Generator().manual_seed(13)
    for offset in (0, 10**6, 10**15):
        integers = torch.randint(0, 2**62, (6, 2), generator=generator).tolist()
        exact = [[Fraction(v, 2**62) + offset for v in row] for row in integers]
        matrix = f64([[float(v) for v in row] for row in exact])
        scores = rc.rewards.decoupled(matrix, torch.zeros(6, dtype=torch.long), ONES)
        right = [Fraction(0)] * 6
        for k in range(2):
            column = [row[k] for row in exact]
            mean = sum(column) / 6
            variance = sum((v - mean) ** 2 for v in column) / 5
            std = Fraction(math.isqrt(int(variance * 2**200)), 2**100)
            right = [a + (v - mean) / (std + Fraction(1, 10**4)) for a, v in zip(right, column, strict=True)]
        found = one_group(matrix)
        error = max(abs(float(Fraction(s) - a)) for s, a in zip(scores.tolist(), right, strict=True))
        assert error <= found.rounding.item() * scores.abs().max().item()
        assert offset == 0 or error > 0


def test_groups_are_diagnosed_each_by_itself() -> None:
    matrix, ids = f64([[0, 0], [3, 1], [0, 1], [3, 5], [1, 1]]), torch.tensor([7, 2, 7, 2, 7])
    both = signal.components(matrix, ids, ONES)
    assert both.groups.tolist() == [2, 7]
    alone = one_group(matrix[ids == 7])
    for field in ("flat", "share", "condition", "rounding", "cancels"):
        assert torch.equal(getattr(both, field)[1], getattr(alone, field)[0])
    assert both.flat.tolist() == [[True, False], [False, False]]


def test_distinct_groups() -> None:
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3, 3])
    scores = f64([1, -1, -1 + 1e-9, 1, 1, -1, 0, 2, -2])
    assert signal.distinct_groups(scores, groups) == 3
    assert signal.distinct_groups(scores, groups, resolution=1e-10) == 4
    assert signal.distinct_groups(f64([]), torch.zeros(0, dtype=torch.long)) == 0


def test_distinct_groups_of_unlike_sizes_do_not_widen_each_other() -> None:
    """One group of 20,000 and 20,000 of two: a row for each as wide as the widest would be 3.2 GB."""
    groups = torch.cat([torch.zeros(20_000, dtype=torch.long), torch.arange(1, 20_001).repeat_interleave(2)])
    scores = torch.cat([torch.arange(20_000).double(), torch.tensor([1.0, -1.0]).double().repeat(20_000)])
    assert signal.distinct_groups(scores, groups) == 2


# --- what an algorithm reads, and what each component gave ------------------------------------------------------------


def test_group_scores_are_the_first_stage_where_groups_are_large_enough() -> None:
    scores = signal.group_scores(
        rc.get_algorithm("rloo"),
        rc.get_algorithm("rloo").hyperparameters(),
        f64([[1], [5], [3]]),
        torch.tensor([4, 9, 4]),
    )
    assert scores.tolist() == [-2.0, 0.0, 2.0]


def test_what_an_algorithm_reads() -> None:
    components, weights = f64([[1, 4], [2, 8]]), f64([1.0, 0.5])
    assert signal.readable(GDPO, components, weights).tolist() == [[1, 4], [2, 8]]
    assert signal.readable(GRPO, components, weights).tolist() == [[3], [6]]


def test_contributions_to_a_group_mean_and_std_are_shares_of_the_sums_variance() -> None:
    """x = (0, 1, 2), y = (0, 4, 2): cov(x, x + y) = 2, cov(y, x + y) = 5 (variances 1 and 4, covariance 1)."""
    found = signal.contributions(
        GRPO, GRPO.hyperparameters(), f64([[0, 0], [1, 4], [2, 2]]), torch.zeros(3, dtype=torch.long), ONES
    )
    torch.testing.assert_close(found / found.sum(), f64([[2 / 7, 5 / 7]]))
    assert found.sum().item() == pytest.approx(2.0, rel=1e-5)  # three standardized scores: squares add up to n - 1


def test_contributions_to_decoupled_scores_are_their_shares() -> None:
    weights = f64([1.0, 0.5, 1.0])
    matrix = f64([[0, 1, 3], [1, 0.5, 3], [2, 0, 3], [5, 0.25, 3], [1, 1, 1], [0, 2, 1]])
    ids = torch.tensor([3, 3, 3, 3, 1, 1])
    hyperparameters = GDPO.hyperparameters(gdpo_reward_weights=(1.0, 0.5, 1.0))
    found = signal.contributions(GDPO, hyperparameters, matrix, ids, weights)
    torch.testing.assert_close(
        found / found.sum(dim=1, keepdim=True), signal.components(matrix, ids, weights).share, atol=1e-12, rtol=0
    )
    # Group 1: z = (+-0.7071, -+0.7071) less eps, so A = +-(0.7071 - 0.3536) and A^2 adds up to 0.25.
    assert found[0].tolist() == pytest.approx([0.5, -0.25, 0.0], abs=1e-3)


def test_contributions_to_scores_of_another_kind() -> None:
    """ReMax, rewards 0, 1, 3 less 0, 1, 1: d = (-2, -2, 4) / 3; parts (-4, -1, 5) / 3 and (2, -1, -1) / 3."""
    remax = rc.get_algorithm("remax")
    zeros = torch.zeros(3, dtype=torch.long)
    found = signal.contributions(remax, remax.hyperparameters(), f64([[0, 0], [1, 1], [3, 1]]), zeros, ONES)
    torch.testing.assert_close(found, f64([[30 / 9, -6 / 9]]), rtol=1e-6, atol=0)


def test_equal_scores_teach_where_the_baseline_is_not_the_groups() -> None:
    """ReMax: all right where the greedy response was wrong, all as good as it, one sample alone, and OPO beside it."""
    matrix = f64([[1, 0], [1, 0], [1, 1], [1, 1], [0, 1], [0, 0]])
    groups = torch.tensor([3, 3, 4, 4, 5, 6])
    remax, opo = map(rc.get_algorithm, ("remax", "opo"))
    assert signal.groups_with_signal(remax, remax.hyperparameters(), matrix, groups).tolist() == [
        True,
        False,
        True,
        False,
    ]
    lengths = f64([[1, 2], [1, 3]])
    assert not signal.carries_signal(opo, opo.hyperparameters(), lengths)


def test_no_signal_no_contribution() -> None:
    zeros = torch.zeros(2, dtype=torch.long)
    for algorithm in (GRPO, GDPO):
        found = signal.contributions(algorithm, algorithm.hyperparameters(), f64([[1, 0], [0, 1]]), zeros, ONES)
        assert found.tolist() == [[0.0, 0.0]]
