"""Group statistics of rewards: the very bits that users know, exact where values collapse, clear where they break."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_core import get_algorithm, rewards
from tests.core.ranks import f64

GDPO = get_algorithm("gdpo")
ONES = f64([1.0, 1.0])


def plain(values: Tensor, groups: Tensor, scale: bool = True) -> Tensor:
    """What users migrate from: one torch expression for each group."""
    out = torch.empty_like(values)
    for group in groups.unique():
        r = values[groups == group]
        c = r - r.mean()
        if scale and len(r) > 1:
            c = c / (c.std() + 1e-6)
        out[groups == group] = torch.zeros_like(c) if r.min() == r.max() else c
    return out


REWARDS = {
    "binary": lambda n: torch.randint(0, 2, (n,)).float(),
    "negative": lambda n: -torch.rand(n) * 3,
    "duplicates": lambda n: torch.randint(-2, 3, (n,)) * 0.1,
    "large": lambda n: torch.randn(n) * 1e30,
    "tiny": lambda n: torch.randn(n) * 1e-30,
    "offset": lambda n: 1e6 + torch.rand(n),
    "equal": lambda n: torch.full((n,), 0.35),
}


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("layout", ["contiguous", "interleaved", "uneven"])
@pytest.mark.parametrize("scale", [True, False])
def test_group_mean_std_is_the_plain_expression_to_the_bit(kind: str, layout: str, scale: bool) -> None:
    torch.manual_seed(0)
    for size in (1, 2, 3, 7, 8, 13, 16, 33):
        groups = torch.arange(6).repeat_interleave(size)
        if layout == "interleaved":
            groups = torch.arange(6).repeat(size)
        if layout == "uneven":
            groups = torch.randint(0, 6, (6 * size,))
        values = REWARDS[kind](len(groups))
        assert torch.equal(rewards.group_mean_std(values, groups, scale=scale), plain(values, groups, scale))


def test_a_deviation_is_rounded_as_that_of_a_group_alone() -> None:
    """torch's `std(dim=1)` of several rows rounds 23 of these 2,000 to another neighbour than `row.std()`."""
    torch.manual_seed(0)
    for size in (4, 10):
        values, groups = torch.randint(0, 4, (2000 * size,)) * 6e-5, torch.arange(2000).repeat_interleave(size)
        assert torch.equal(rewards.group_mean_std(values, groups), plain(values, groups))


def test_uneven_groups_are_normalized_each_by_itself() -> None:
    values = f64([1, 2, 3, 4, 10, 12, 5, 6, 7])
    out = rewards.group_mean_std(values, torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2]))
    expected = [-1.161894, -0.387298, 0.387298, 1.161894, -0.707106, 0.707106, -1, 0, 1]
    torch.testing.assert_close(out, f64(expected), rtol=0, atol=2e-6)


def test_a_constant_group_among_others_is_zero() -> None:
    groups = torch.tensor([0] * 4 + [1] * 3 + [2] * 4)
    out = rewards.group_mean_std(torch.tensor([1.0, 2, 3, 4, 5, 5, 5, 6, 7, 8, 9]), groups)
    assert torch.equal(out[4:7], torch.zeros(3))


def test_streamed_groups_are_still_groups() -> None:
    groups = torch.arange(4).repeat_interleave(8)
    assert not rewards.group_mean_std(groups.float(), groups).any()


@pytest.mark.parametrize(("value", "size"), [(0.35, 7), (0.1, 7), (0.3, 7), (100000.1, 7), (1000000.3, 12)])
def test_constants_collapse_to_exact_zeros(value: float, size: int) -> None:
    values, groups = torch.full((size,), value), torch.zeros(size, dtype=torch.long)
    assert not rewards.group_mean_std(values, groups).any()
    assert not rewards.decoupled(torch.stack([values, values], 1).double(), groups, ONES).any()


def test_permuting_rows_with_their_ids_permutes_the_result() -> None:
    torch.manual_seed(1)
    values, groups = torch.rand(24, 2).double(), torch.arange(3).repeat_interleave(8)
    order = torch.randperm(24)
    out = rewards.decoupled(values, groups, ONES)
    assert torch.equal(rewards.decoupled(values[order], groups[order], ONES), out[order])
    interleaved = torch.arange(24).view(3, 8).t().flatten()
    single = rewards.group_mean_std(values[:, 0], groups)
    assert torch.equal(rewards.group_mean_std(values[interleaved, 0], groups[interleaved]), single[interleaved])


def test_a_group_of_one_has_no_scale() -> None:
    assert rewards.group_mean_std(torch.tensor([0.7]), torch.tensor([3])).tolist() == [0.0]
    with pytest.raises(ValueError, match="group 3 has 1 samples, expected at least 2"):
        rewards.decoupled(f64([[1, 2], [2, 1], [0, 5]]), torch.tensor([0, 0, 3]), ONES)


def test_statistics_that_overflow_are_an_error() -> None:
    with pytest.raises(ValueError, match="group 5 overflow"):
        rewards.group_mean_std(torch.tensor([3.4e38, 3.4e38, 1.0] * 2), torch.tensor([5, 5, 5, 4, 4, 4]))
    finite = rewards.decoupled(f64([[-3.4e38, 0], [0, 0], [3.4e38, 1]]), torch.zeros(3, dtype=torch.long), ONES)
    assert finite.isfinite().all()


# --- GDPO -----------------------------------------------------------------------------------------------------------


def distinct(scores: Tensor, size: int) -> int:
    ordered = (scores.view(-1, size).sort(dim=1).values * 1e6).round()
    return len(ordered.unique(dim=0))


@pytest.mark.parametrize(("size", "gdpo"), list(enumerate([3, 6, 14, 26, 38, 59, 81], start=2)))
def test_distinct_advantages_as_the_paper_counts_them(size: int, gdpo: int) -> None:
    rows = list(itertools.product((0.0, 1.0), repeat=2))
    batches = f64(list(itertools.combinations_with_replacement(rows, size)))
    groups = torch.arange(len(batches)).repeat_interleave(size)
    matrix = batches.view(-1, 2)
    assert distinct(rewards.decoupled(matrix, groups, ONES, eps=0.0), size) == gdpo
    total = matrix.sum(1)
    assert distinct(rewards.group_mean_std(total, groups, eps=0.0), size) == size * (size - 1) // 2 + 1
    assert distinct(rewards.group_mean_std(total, groups, scale=False), size) == size * (size + 1) // 2


def test_two_rollouts_two_binary_rewards() -> None:
    pairs = f64([[[0, 0], [0, 1]], [[0, 0], [1, 1]], [[0, 1], [1, 1]]]).view(-1, 2)
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    half = 2**-0.5
    torch.testing.assert_close(
        rewards.decoupled(pairs, groups, ONES, eps=0.0), f64([-half, half, -2 * half, 2 * half, -half, half])
    )
    torch.testing.assert_close(rewards.group_mean_std(pairs.sum(1), groups, eps=0.0), f64([-half, half] * 3))


@pytest.mark.parametrize(
    ("first", "constant"),
    [
        ((1, 1, 0), 1),
        ((1, 0, 0, 0, 1, 1, 0), 1),
        ((0.625, 0.25, 0.75), 1),
        ((3, 1e6, 7, 0.5), 2**40),
        ((-2, 5, 0.125), 0),
    ],
)
def test_components_that_add_up_to_a_constant_cancel_exactly(first: tuple[float, ...], constant: float) -> None:
    one = f64(first)
    assert torch.equal(constant - (constant - one), one), "the example must be an exact one"
    matrix, groups = torch.stack([one, constant - one], 1), torch.zeros(len(one), dtype=torch.long)
    assert not rewards.decoupled(matrix, groups, ONES).any()
    assert rewards.decoupled(matrix, groups, f64([1.0, 0.5])).abs().max() > 0.1


def test_one_flat_component_leaves_the_other_untouched_to_the_bit() -> None:
    torch.manual_seed(2)
    signal, groups = torch.randn(16).double(), torch.arange(2).repeat_interleave(8)
    alone = rewards.standardized(signal[:, None], groups)[:, 0]
    assert torch.equal(rewards.decoupled(torch.stack([torch.full_like(signal, 0.3), signal], 1), groups, ONES), alone)


def test_weights_stay_float64_and_act_on_normalized_values() -> None:
    matrix, groups = f64([[0, 5], [1, 5], [3, 5]]), torch.zeros(3, dtype=torch.long)
    near, nearer = (rewards.decoupled(matrix, groups, f64([w, 1.0])) for w in (16777216.0, 16777217.0))
    assert not torch.equal(near, nearer)
    torch.testing.assert_close(near / 16777216, rewards.standardized(matrix, groups)[:, 0])


def test_conditioned_reward() -> None:
    out = rewards.conditioned(f64([0.5, 0.7, 0.9]), f64([0.0, 1.0, 2.0]), 1.0)
    assert out.tolist() == [0.0, 0.7, 0.9]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0, 0.25, 9.0), "3 reward weights for 2"),
        ((1.0,), "1 reward weights for 2"),
    ],
)
def test_as_many_weights_as_components(weights: tuple[float, ...], message: str) -> None:
    hyperparameters = GDPO.hyperparameters(gdpo_reward_weights=weights)
    with pytest.raises(ValueError, match=message):
        GDPO.normalize_rewards(hyperparameters, f64([[1, 2], [3, 4]]), torch.tensor([0, 0]))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0.0, 0.0), "all be zero"),
        ((1e-60, 0.0), "all be zero"),
        ((1e300, 1.0), "float32"),
        ((float("nan"), 1.0), "finite"),
        ((True, 1.0), "real numbers"),
        ("11", "tuple"),
    ],
)
def test_weights_that_cannot_be(weights: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"gdpo_reward_weights.*{message}"):
        GDPO.hyperparameters(gdpo_reward_weights=weights)


def test_a_score_that_float32_cannot_hold_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"weighted score of sample 1 is -?[0-9.]*e\+38, which float32 cannot hold"):
        rewards.combined(f64([[1, 1], [-2, -2], [3, 3]]), f64([1e38, 1e38]))


def test_weights_may_come_from_python() -> None:
    assert rewards.weight_vector((), 2).tolist() == [1.0, 1.0]
    assert rewards.weight_vector((2, 0.5), 2).tolist() == [2.0, 0.5]
    with pytest.raises(ValueError, match=r"reward weights must not all be zero \(in float32\), got \(0, 0\)"):
        rewards.weight_vector((0, 0), 2)


def test_zero_and_negative_weights_are_fine() -> None:
    for weights in ((0.0, 1.0), (-1.0, 0.5)):
        GDPO.hyperparameters(gdpo_reward_weights=weights)


def test_one_component_is_no_gdpo_and_two_are_no_grpo() -> None:
    with pytest.raises(ValueError, match="at least 2 reward components, got 1"):
        GDPO.normalize_rewards(GDPO.hyperparameters(), f64([[1], [2]]), torch.tensor([0, 0]))
    grpo = get_algorithm("grpo")
    with pytest.raises(ValueError, match="one scalar reward for each sample, but got 0 components"):
        grpo.normalize_rewards(grpo.hyperparameters(), torch.zeros(3, 0), torch.tensor([0, 0, 0]))
    with pytest.raises(ValueError, match="one scalar reward for each sample, but got 2 components"):
        grpo.normalize_rewards(grpo.hyperparameters(), f64([[1, 2], [2, 3], [3, 4]]), torch.tensor([0, 0, 0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("name", ["grpo", "gdpo"])
def test_broken_rewards_raise_and_name_sample_component_and_value(name: str, value: float) -> None:
    algorithm = get_algorithm(name)
    matrix = f64([[0.0, 1.0], [1.0, value], [2.0, 3.0]])[:, -2 if name == "gdpo" else -1 :]
    component = matrix.shape[1] - 1
    with pytest.raises(
        ValueError, match=f"component {component} of the reward of sample 1 is {value}".replace("+", r"\+")
    ):
        algorithm.normalize_rewards(algorithm.hyperparameters(), matrix, torch.zeros(3, dtype=torch.long))


# --- from reward mappings -------------------------------------------------------------------------------------------


def test_component_matrix_reads_python_and_numpy_numbers() -> None:
    samples = [{"a": 1, "b": 0.5, "other": "kept out"}, {"a": np.float32(0.25), "b": np.int64(-3)}]
    assert torch.equal(rewards.component_matrix(samples, ["b", "a"]), f64([[0.5, 1.0], [-3.0, 0.25]]))
    assert rewards.component_matrix([], ["a", "b"]).shape == (0, 2)


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        ({"a": True}, TypeError, "'a' of sample 1 must be a real number, got True"),
        ({"a": np.bool_(True)}, TypeError, "'a' of sample 1"),
        ({"a": "1"}, TypeError, "'a' of sample 1 must be a real number, got '1'"),
        ({"a": None}, TypeError, "'a' of sample 1 must be a real number, got None"),
        ({"a": 1j}, TypeError, "'a' of sample 1"),
        ({"a": float("nan")}, ValueError, "'a' of sample 1 .*got nan"),
        ({"a": float("-inf")}, ValueError, "'a' of sample 1 .*got -inf"),
        ({"a": 1e300}, ValueError, "'a' of sample 1 .*got 1e\\+300"),
        ({"a": -(10**400)}, ValueError, "'a' of sample 1"),
        ({"b": 1.0}, ValueError, "sample 1 has no key 'a', only \\['b'\\]"),
        (0.5, ValueError, "sample 1 is no mapping"),
        (None, ValueError, "sample 1 is no mapping"),
    ],
)
def test_component_matrix_names_key_sample_and_value(reward: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rewards.component_matrix([{"a": 1.0}, reward], ["a"])


@pytest.mark.parametrize("keys", [[], ["a", "a"]])
def test_component_matrix_refuses_keys_that_cannot_be(keys: list[str]) -> None:
    with pytest.raises(ValueError, match="at least one, without duplicates"):
        rewards.component_matrix([{"a": 1.0}], keys)


def test_group_ids_of_any_kind() -> None:
    assert rewards.group_ids(["x", 7, "x", (1, 2), 7]).tolist() == [0, 1, 0, 2, 1]
    assert rewards.group_ids(["x", 7, "x", 7], size=2).tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="group 7 has 1 samples, expected 2"):
        rewards.group_ids(["x", 7, "x"], size=2)
    with pytest.raises(ValueError, match="sample 1 has no group id"):
        rewards.group_ids(["x", None])
    with pytest.raises(ValueError, match="group 7 has 3 samples, expected 2"):
        rewards.group_ids([7, 7, 7], size=2)


LARGEST = torch.finfo(torch.float32).max


def test_the_largest_float32_is_a_reward_and_a_weight() -> None:
    matrix = rewards.component_matrix([{"a": LARGEST}, {"a": -LARGEST}, {"a": 0}, {"a": LARGEST}], ["a"])
    assert matrix[:, 0].tolist() == [LARGEST, -LARGEST, 0.0, LARGEST]
    rewards.expect_finite(matrix)
    assert rewards.leave_one_out(matrix[:, 0], torch.tensor([0, 0, 1, 1])).tolist() == pytest.approx(
        [2 * LARGEST, -2 * LARGEST, -LARGEST, LARGEST]
    )
    assert rewards.weight_vector([LARGEST, -LARGEST], 2).tolist() == [LARGEST, -LARGEST]


def test_the_first_of_several_broken_places_is_named() -> None:
    nan, groups = torch.nan, torch.tensor([9, 5, 7, 5, 7, 9])
    with pytest.raises(ValueError, match=r"component 1 of the reward of sample 2 is nan.*\(3 such values\)"):
        rewards.expect_finite(f64([[1, 1], [1, 1], [1, nan], [nan, 1], [1, nan], [1, 1]]))
    with pytest.raises(ValueError, match=r"^group 7 has rewards \[nan\] at samples \[2\]$"):
        rewards.leave_one_out(f64([1, 1, nan, nan, 1, nan]), groups)
    with pytest.raises(ValueError, match=r"in group 5$"):
        rewards.length_weighted_baseline(f64([1, 2, 3, 4, 5, 6]), f64([-1, 0, 1, 0, 1, 1]), groups)
    with pytest.raises(ValueError, match="statistics of group 5 overflow"):
        rewards.group_mean_std(f64([1, 1.7e308, 1.7e308, 1.6e308, 1.6e308, 2]), groups)


def test_components_of_fixed_meaning_are_as_many_as_their_names() -> None:
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"reward, length, got {count} components"):
            rewards.named_components(torch.ones(2, count), "reward", "length")


def test_a_buffer_of_one_token() -> None:
    found = rewards.overlong_penalty(torch.tensor([8, 9, 10]), max_length=10, buffer=1)
    assert found.tolist() == [0.0, 0.0, -1.0]
