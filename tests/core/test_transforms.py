"""torch.compile without a graph break, and torch.func's transforms, where the arithmetic allows them."""

import pytest
import torch
from torch import Tensor

import relax_core as rc
from relax_core import corrections, kl, losses, reducers
from relax_core.advantages import broadcast as spread

# Compiled once each without a backend that generates code: what is tested is that one graph holds everything.
TOKENS = rc.Tokens(torch.tensor([2, 4]), torch.tensor([1, 1, 1, 0, 1, 1]).bool())
WEIGHTS = reducers.sample_mean(TOKENS)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(14)
    log_probs, advantages = -torch.rand(6).double(), torch.randn(6).double()
    return log_probs, log_probs + 0.1 * torch.randn(6).double(), advantages


def total(name: str, log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    algorithm = rc.get_algorithm(name)
    loss = algorithm.policy_loss(algorithm.hyperparameters(), log_probs, old, advantages, TOKENS)
    return reducers.weighted_sum(loss.loss, WEIGHTS)


@pytest.mark.parametrize("name", rc.ALGORITHMS)
def test_grad_and_vmap(name: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    log_probs, old, advantages = batch
    leaf = log_probs.clone().requires_grad_()
    total(name, leaf, old, advantages).backward()
    assert torch.allclose(torch.func.grad(lambda lp: total(name, lp, old, advantages))(log_probs), leaf.grad)
    many = torch.stack([log_probs, old, log_probs + 0.01])
    together = torch.func.vmap(lambda lp: total(name, lp, old, advantages))(many)
    torch.testing.assert_close(together, torch.stack([total(name, lp, old, advantages) for lp in many]))


# They look at values to choose tokens, which no graph can hold.
CHOOSING = ("clip_cov", "kl_cov", "m2po")


@pytest.mark.parametrize("name", [name for name in rc.ALGORITHMS if name not in CHOOSING])
def test_one_graph(name: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    log_probs, old, advantages = batch
    loss, hyperparameters = rc.get_algorithm(name).policy_loss, rc.get_algorithm(name).hyperparameters()

    def run(leaf: Tensor) -> Tensor:
        return reducers.weighted_sum(loss(hyperparameters, leaf, old, advantages, TOKENS).loss, WEIGHTS)

    torch.compiler.reset()  # there is a limit to how often one function is compiled
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(log_probs), run(log_probs))


@pytest.mark.parametrize("run", ["value_loss", "broadcast", "corrections", "reducers"])
def test_one_graph_of_what_surrounds_a_loss(run: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    log_probs, old, advantages = batch

    def corrected(leaf: Tensor) -> Tensor:
        loss = losses.ppo_clip(leaf, old, advantages, TOKENS, eps_clip=0.2)
        loss = corrections.truncated_importance(loss, old, log_probs, TOKENS)
        loss = corrections.masked_importance(loss, old, log_probs, TOKENS)
        loss = corrections.off_policy_masking(loss, log_probs, old, advantages, TOKENS)
        loss = corrections.with_entropy(loss, -leaf, TOKENS, coef=0.1)
        return corrections.with_kl(loss, kl.loss(leaf, old, "k3"), TOKENS, coef=0.1).loss

    functions = {
        "value_loss": lambda leaf: losses.value_loss(leaf, old, advantages, TOKENS, value_clip=0.2).loss,
        "broadcast": lambda leaf: spread(leaf[:2], TOKENS),
        "corrections": corrected,
        "reducers": lambda leaf: reducers.weighted_sum(leaf, reducers.sample_mean(TOKENS)),
    }
    torch.compiler.reset()
    compiled = torch.compile(functions[run], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(log_probs), functions[run](log_probs))
