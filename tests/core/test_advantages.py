"""Returns and GAE over ragged, masked responses, and normalization over all tokens of all ranks."""

import itertools

import pytest
import torch
from torch import Tensor

import relax_core as rc
from relax_core import advantages
from tests.core.ranks import f64, on_ranks


def masked(lengths: list[int], mask: list[int]) -> rc.Tokens:
    return rc.Tokens(torch.tensor(lengths), torch.tensor(mask).bool())


def loop_gae(r: list[float], v: list[float], mask: list[int], gamma: float, lambd: float) -> list[float]:
    """The recursion as it stands in the paper, over the tokens that count."""
    out, next_v, next_a = [0.0] * len(r), 0.0, 0.0
    for t in reversed(range(len(r))):
        if mask[t]:
            next_a = r[t] + gamma * next_v - v[t] + gamma * lambd * next_a
            out[t], next_v = next_a, v[t]
    return out


def loop_returns(r: list[float], mask: list[int], gamma: float) -> list[float]:
    out, following = [0.0] * len(r), 0.0
    for t in reversed(range(len(r))):
        following = (r[t] if mask[t] else 0.0) + gamma * following
        out[t] = following if mask[t] else 0.0
    return out


@pytest.mark.parametrize(("gamma", "lambd"), list(itertools.product([0.0, 0.3, 0.99, 1.0], [0.0, 0.95, 1.0])))
def test_scans_are_the_recursions(gamma: float, lambd: float) -> None:
    torch.manual_seed(7)
    lengths = [5, 0, 1, 17, 64, 3, 130, 32, 33, 0, 31, 1100]
    mask = (torch.rand(sum(lengths)) < 0.7).int().tolist()
    tokens, r, v = masked(lengths, mask), torch.randn(sum(lengths)).double(), torch.randn(sum(lengths)).double()
    expected_gae, expected_returns = [], []
    for start, stop in itertools.pairwise(tokens.offsets):
        part = r[start:stop].tolist(), v[start:stop].tolist(), mask[start:stop]
        expected_gae += loop_gae(*part, gamma, lambd)
        expected_returns += loop_returns(part[0], part[2], gamma)
    out = advantages.gae(r, v, tokens, gamma=gamma, lambd=lambd)
    torch.testing.assert_close(out.advantages, f64(expected_gae), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.returns, torch.where(tokens.mask, out.advantages + v, 0.0))
    returns = advantages.discounted_returns(r, tokens, gamma=gamma)
    torch.testing.assert_close(returns, f64(expected_returns), rtol=1e-12, atol=1e-12)


def test_what_is_returned_is_nobody_elses() -> None:
    """Where nothing follows any token and all count, returns are the rewards: equal, not the same tensor."""
    rewards, tokens = torch.tensor([1.0, 2.0]), rc.Tokens.full([1, 1])
    returns = advantages.discounted_returns(rewards, tokens, gamma=0.9)
    assert returns.tolist() == [1.0, 2.0]
    assert returns.data_ptr() != rewards.data_ptr()


def test_a_response_is_untouched_to_the_bit_by_its_neighbours() -> None:
    torch.manual_seed(8)
    tokens = rc.Tokens.full([3, 200, 7, 50])
    r, v = torch.randn(260), torch.randn(260)
    v[3:203] = 1e30
    whole = advantages.gae(r, v, tokens, gamma=0.9, lambd=0.95)
    for sample in range(4):
        part, own = tokens.token_slice(sample, sample + 1), tokens.select(sample, sample + 1)
        alone = advantages.gae(r[part], v[part], own, gamma=0.9, lambd=0.95)
        assert torch.equal(alone.advantages, whole.advantages[part])
        returns = advantages.discounted_returns(r[part], own, gamma=0.9)
        assert torch.equal(returns, advantages.discounted_returns(r, tokens, gamma=0.9)[part])


def test_masked_values_do_not_bootstrap() -> None:
    tokens = masked([3], [1, 1, 0])
    out = advantages.gae(f64([0, 1, 0]), f64([0, 0, 100]), tokens, gamma=1, lambd=0.95)
    torch.testing.assert_close(out.advantages, f64([0.95, 1, 0]))


def test_observations_are_skipped_not_walked_through() -> None:
    tokens = masked([4], [1, 0, 0, 1])
    algorithm = rc.get_algorithm("ppo")
    hyperparameters = algorithm.hyperparameters(gamma=0.9, lambd=0.9)
    out = algorithm.estimate_advantages(hyperparameters, f64([1.0]), tokens, values=torch.zeros(4).double())
    torch.testing.assert_close(out.advantages, f64([0.81, 0, 0, 1.0]))


def test_the_reward_stands_on_the_last_valid_token() -> None:
    tokens = masked([3, 2, 0, 2], [1, 1, 0, 0, 0, 1, 1])
    out = advantages.token_rewards(f64([5, 6, 7, 8]), tokens, kl=f64([1, 2, float("nan"), 9, 9, 3, 4]), kl_coef=0.5)
    assert out.tolist() == [-0.5, 4.0, 0.0, 0.0, 0.0, -1.5, 6.0]
    with pytest.raises(ValueError, match=r"kl_coef is 0\.5, but no kl"):
        advantages.token_rewards(f64([5, 6, 7, 8]), tokens, kl_coef=0.5)


def test_without_a_coefficient_kl_has_no_part_in_rewards() -> None:
    tokens, score = rc.Tokens.full([2]), f64([5])
    for kl in (None, f64([1, float("nan")])):
        assert advantages.token_rewards(score, tokens, kl=kl).tolist() == [0.0, 5.0]


def test_ppo_needs_values() -> None:
    algorithm = rc.get_algorithm("ppo")
    with pytest.raises(ValueError, match="needs the critic's values"):
        algorithm.estimate_advantages(algorithm.hyperparameters(), f64([1.0]), rc.Tokens.full([2]))


def test_the_baseline_variant_has_no_kl_term_and_nothing_under_the_mask() -> None:
    algorithm = rc.get_algorithm("reinforce_plus_plus_baseline")
    tokens = masked([2, 1], [1, 0, 1])
    kl = f64([1e3, 1e3, 1e3])
    out = algorithm.estimate_advantages(algorithm.hyperparameters(), f64([2, 3]), tokens, kl=kl)
    assert out.advantages.tolist() == [2.0, 0.0, 3.0]


def test_rewards_and_values_are_data() -> None:
    scores, values = f64([1.0]).requires_grad_(), f64([1.0, 2.0]).requires_grad_()
    for name in rc.ALGORITHMS:
        algorithm = rc.get_algorithm(name)
        out = algorithm.estimate_advantages(algorithm.hyperparameters(), scores, rc.Tokens.full([2]), values=values)
        assert not out.advantages.requires_grad
        assert not out.returns.requires_grad


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_lies_under_the_mask_never_leaks(poison: float) -> None:
    tokens = masked([3, 2], [1, 0, 1, 0, 0])
    r, v, kl = (torch.randn(5).double() for _ in range(3))
    dirty = [value.masked_fill(~tokens.mask, poison) for value in (r, v, kl)]
    for name in ("ppo", "reinforce_plus_plus"):
        algorithm = rc.get_algorithm(name)
        hyperparameters = algorithm.hyperparameters(kl_coef=0.1, gamma=0.9)
        clean, soiled = (
            algorithm.estimate_advantages(hyperparameters, f64([1, 2]), tokens, kl=kl_, values=v_)
            for v_, kl_ in ((v, kl), dirty[1:])
        )
        assert torch.equal(clean.advantages, soiled.advantages)
        assert torch.equal(clean.returns, soiled.returns)
    for kind in ("whiten", "token_global"):
        clean, soiled = (advantages.normalize(value, tokens, kind) for value in (r, dirty[0]))
        assert torch.equal(clean, soiled)
        assert not clean[~tokens.mask].any()


# --- normalization over tokens ----------------------------------------------------------------------------------------


def test_whiten_and_token_global_are_their_formulas() -> None:
    torch.manual_seed(9)
    values, tokens = torch.randn(50).double() + 1e3, masked([20, 30], torch.randint(0, 2, (50,)).tolist())
    valid = values[tokens.mask]
    whitened = (valid - valid.mean()) * (valid.var() + 1e-8).rsqrt()
    torch.testing.assert_close(advantages.whiten(values, tokens)[tokens.mask], whitened)
    glob = (valid - valid.mean()) / valid.var(correction=0).clamp(min=1e-8).sqrt()
    torch.testing.assert_close(advantages.token_global(values, tokens)[tokens.mask], glob)


def test_one_pass_variance_would_fail_here() -> None:
    values = torch.tensor([1000, 1000.01, 1000.02, 1000.03], dtype=torch.float64)
    out = advantages.whiten(values, rc.Tokens.full([4]))
    torch.testing.assert_close(out, f64([-1.1619, -0.3873, 0.3873, 1.1619]), rtol=0, atol=1e-4)
    for kind in ("whiten", "token_global"):
        assert not advantages.normalize(torch.full((7,), 1000.1), rc.Tokens.full([7]), kind).any()


def test_without_the_shift_only_the_scale_changes() -> None:
    out = advantages.whiten(f64([1, 2, 6]), rc.Tokens.full([3]), shift_mean=False)
    torch.testing.assert_close(out, f64([0.377964, 0.755929, 2.267787]), rtol=1e-5, atol=0)


def test_the_variance_floor() -> None:
    out = advantages.token_global(f64([1.0, 1.0 + 2e-6]), rc.Tokens.full([2]))
    torch.testing.assert_close(out, f64([-1e-2, 1e-2]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["whiten", "token_global"])
def test_no_valid_token_on_one_rank_or_on_all(kind: str) -> None:
    values, full, none = f64([1.0, 2.0, 4.0]), rc.Tokens.full([3]), masked([3], [0, 0, 0])
    run = lambda tokens, reduce: advantages.normalize(values, tokens, kind, reduce=reduce)  # noqa: E731
    (first, second), world = on_ranks([full, none], run)
    assert torch.equal(first, advantages.normalize(values, full, kind))
    assert not second.any()
    assert world.collectives == 3
    (first, second), _ = on_ranks([none, none], run)
    assert not first.any()
    assert not second.any()


@pytest.mark.parametrize("kind", ["whiten", "token_global"])
def test_a_non_finite_advantage_raises_everywhere_and_says_where(kind: str) -> None:
    tokens = rc.Tokens.full([2, 2])
    shares = [f64([1, 2, 3, 4]), f64([1, 2, 3, float("nan")])]
    with pytest.raises(ValueError, match=r"the advantage of token 0 of sample 1 is inf"):
        advantages.normalize(f64([1, 2, float("inf"), float("nan")]), tokens, kind)
    errors, _ = on_ranks(shares, lambda share, reduce: advantages.normalize(share, tokens, kind, reduce=reduce))
    assert all("token 1 of sample 1 is nan" in str(error) for error in errors)


@pytest.mark.parametrize("kind", ["whiten", "token_global"])
def test_the_largest_number_in_float32_is_an_advantage(kind: str) -> None:
    largest = torch.finfo(torch.float32).max
    out = advantages.normalize(f64([-largest, largest]), rc.Tokens.full([2]), kind)
    assert out.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5] if kind == "whiten" else [-1, 1])


@pytest.mark.parametrize("kind", ["whiten", "token_global"])
def test_malformed_advantages_on_one_rank_raise_everywhere(kind: str) -> None:
    def run(values: Tensor, reduce: rc.collectives.Reduce) -> Tensor:
        return advantages.normalize(values, rc.Tokens.full([4]), kind, reduce=reduce)

    for broken in (torch.ones(3), torch.ones(4, dtype=torch.long), torch.ones(4, 1)):
        errors, _ = on_ranks([broken, torch.ones(4)], run)
        assert len({type(error) for error in errors}) == 1
        assert isinstance(errors[0], ValueError | TypeError)
