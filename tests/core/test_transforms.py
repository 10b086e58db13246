"""torch.compile without a graph break, and torch.func's transforms, where the arithmetic allows them."""

import pytest
import torch
from torch import Tensor

import relax_core as rc
from relax_core import kl, losses, reducers

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


@pytest.mark.parametrize("run", ["ppo_clip", "sapo", "cispo", "reinforce", "gspo", "kl"])
def test_one_graph(run: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    log_probs, old, advantages = batch
    functions = {
        "ppo_clip": lambda lp: losses.ppo_clip(lp, old, advantages, TOKENS, eps_clip=0.2).loss,
        "sapo": lambda lp: losses.sapo(lp, old, advantages, TOKENS, tau_pos=1.0, tau_neg=1.05).loss,
        "cispo": lambda lp: losses.cispo(lp, old, advantages, TOKENS, eps_clip=0.2).loss,
        "reinforce": lambda lp: losses.reinforce(lp, old, advantages, TOKENS).loss,
        "gspo": lambda lp: losses.gspo(lp, old, advantages, TOKENS, eps_clip=0.2).loss,
        "kl": lambda lp: kl.loss(lp, old, "k3"),
    }
    compiled = torch.compile(functions[run], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(log_probs), functions[run](log_probs))
