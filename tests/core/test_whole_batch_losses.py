"""Losses that choose among the tokens of the whole optimizer batch, cut into parts that choose as the whole does."""

import pytest
import torch

import relax_core as rc
from relax_core.pipeline import summed

CHOOSING = [name for name, algorithm in rc.ALGORITHMS.items() if algorithm.traits.whole_batch_loss]
TOKENS = rc.Tokens(torch.tensor([3, 0, 4, 2, 5]), torch.tensor([True] * 6 + [False] + [True] * 7))
# Shares and ranges that leave something to choose among a dozen tokens.
WIDE = {
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_low": 0.0},
    "kl_cov": {"kl_cov_ratio": 0.2},
    "m2po": {"m2po_budget": 0.3},
}


def test_they_are_the_three_that_say_so() -> None:
    assert set(CHOOSING) == set(WIDE)


@pytest.mark.parametrize("name", CHOOSING)
def test_parts_of_the_tangent_add_up_to_the_whole_and_parts_by_themselves_do_not(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    old, advantages = torch.randn(2, 14, generator=generator, dtype=torch.float64)
    log_probs = (old + torch.randn(14, generator=generator, dtype=torch.float64)).requires_grad_()
    algorithm = rc.get_algorithm(name)
    bound = rc.pipeline(algorithm, algorithm.hyperparameters(**WIDE[name]))
    weights = bound.weights(TOKENS)
    whole, metrics = bound.loss(log_probs, old, advantages, TOKENS, weights)
    (expected,) = torch.autograd.grad(whole, log_probs)

    tangent = bound.tangent(log_probs, old, advantages, TOKENS)
    cuts = [(0, 1), (1, 3), (3, 5)]
    cut, alone, found = torch.zeros(()), torch.zeros(()), dict.fromkeys(metrics, 0.0)
    for start, stop in cuts:
        span, tokens = TOKENS.token_slice(start, stop), TOKENS.select(start, stop)
        loss, share = summed(tangent.cut(span).along(log_probs[span]), tokens, weights[span], (stop - start) / 5)
        cut = cut + loss
        found = {key: found[key] + value for key, value in share.items()}
        alone = alone + bound.loss(log_probs[span], old[span], advantages[span], tokens, weights[span])[0]
    torch.testing.assert_close(cut, whole)
    torch.testing.assert_close(torch.autograd.grad(cut, log_probs)[0], expected)
    assert {key: float(value) for key, value in found.items()} == pytest.approx(
        {key: float(value) for key, value in metrics.items()}
    )
    assert not torch.allclose(torch.autograd.grad(alone, log_probs)[0], expected, rtol=1e-3)
