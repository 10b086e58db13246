from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from relax.megatron import kernels
from relax.megatron.token_statistics import projected_statistics, token_statistics


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def rotation() -> tuple[Tensor, Tensor]:
    angles = torch.randn(5, 1, 1, 4, dtype=torch.float64)
    return angles.cos(), angles.sin()


def complex_rotation(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as a product of complex numbers, first half real and second half imaginary."""
    first, second = states.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), dim=-1)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "rms norm": (
        lambda states, weight: kernels._RMSNorm.apply(states, weight, 1e-3),
        lambda states, weight: nn.functional.rms_norm(states, weight.shape, weight, 1e-3),
        (draw(3, 2, 6), draw(6)),
    ),
    "swiglu": (
        kernels._SwiGLU.apply,
        lambda states: nn.functional.silu(states[..., :4]) * states[..., 4:],
        (draw(3, 2, 8),),
    ),
    "rope": (
        lambda states, cos, sin: kernels.rotate(states, (cos, sin)),
        complex_rotation,
        (draw(5, 2, 3, 8), *rotation()),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    ours, theirs, inputs = CASES[name]
    torch.testing.assert_close(ours(*inputs), theirs(*inputs), atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(ours, inputs)


def test_token_statistics_have_the_right_gradients() -> None:
    logits, targets = draw(4, 7), torch.tensor([0, 6, 3, 3])
    expected = torch.distributions.Categorical(logits=logits)
    log_probs, entropy = token_statistics(logits, targets)
    torch.testing.assert_close(log_probs, expected.log_prob(targets), atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, expected.entropy(), atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(lambda values: token_statistics(values, targets), (logits,))
    for chosen in (0, 1):  # a loss of either alone
        assert torch.autograd.gradcheck(lambda values, i=chosen: token_statistics(values, targets)[i], (logits,))


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor holds that anything computed."""

    numel = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, tuple | list) else [result]
        self.numel = max([self.numel, *(part.numel() for part in found if isinstance(part, Tensor))])
        return result


@pytest.mark.parametrize("chunk", [1, 100, 128, 500, 10_000])
def test_logits_come_in_chunks_and_change_nothing(chunk: int) -> None:
    torch.manual_seed(4)
    hidden, weight = torch.randn(23, 8, dtype=torch.float64), torch.randn(50, 8, dtype=torch.float64)
    targets, out = torch.randint(50, (23,)), torch.randn(2, 23, dtype=torch.float64)

    def run(statistics: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        states, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = torch.stack(statistics(states, matrix))
        (found * out).sum().backward()
        return [found.detach(), states.grad, matrix.grad]

    expected = run(lambda states, matrix: token_statistics(states @ matrix.t() / 0.7, targets))
    with Largest() as largest:
        found = run(
            lambda states, matrix: projected_statistics(
                states, matrix, targets, vocab_size=50, temperature=0.7, chunk=chunk
            )
        )
    for ours, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12)
    # Nothing larger than a chunk (one row of logits at least) or than the weights and states that were there before.
    assert largest.numel <= max(chunk, 50 * 8)
