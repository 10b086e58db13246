"""Chunked log-probs and entropy against log_softmax, and what they hold in memory."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from relax_core import vocabulary
from relax_core.collectives import Reduce
from tests.core.ranks import on_ranks

TOKENS, WIDTH, WORDS = 23, 5, 17


def plain(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    entropy = -torch.where(log_p.isinf(), 0.0, log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(11)
    hidden, weight = torch.randn(TOKENS, WIDTH).double(), 3 * torch.randn(WORDS, WIDTH).double()
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, WORDS, (TOKENS,))


@pytest.mark.parametrize("chunk", [1, WORDS * 4, 10**9])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_log_softmax(
    chunk: int, temperature: float, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    hidden, weight, targets = batch
    upstream = torch.randn(2, TOKENS).double()

    def gradients(outputs: tuple[Tensor, Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad((torch.stack(outputs) * upstream).sum(), (hidden, weight)))

    exact = plain(hidden @ weight.T, targets, temperature)
    expected = [*exact, *gradients(exact)]
    for outputs in (
        vocabulary.from_hidden(hidden, weight, targets, temperature=temperature, chunk=chunk),
        vocabulary.from_logits(hidden @ weight.T, targets, temperature=temperature, chunk=chunk),
    ):
        for actual, right in zip([*outputs, *gradients(outputs)], expected, strict=True):
            torch.testing.assert_close(actual, right)


def test_gradcheck(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets = batch
    assert torch.autograd.gradcheck(lambda h, w: vocabulary.from_hidden(h, w, targets, chunk=50), (hidden, weight))


def test_words_that_cannot_be_sampled() -> None:
    logits = torch.randn(3, 4).double()
    logits[:, 1] = -torch.inf
    logits[2, [0, 3]] = -torch.inf
    logits.requires_grad_()
    targets = torch.tensor([0, 3, 2])
    log_probs, entropy = vocabulary.from_logits(logits, targets)
    exact = plain(logits.detach(), targets, 1.0)
    torch.testing.assert_close(log_probs, exact[0])
    torch.testing.assert_close(entropy, exact[1])
    (log_probs + entropy).sum().backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[:, 1].any()
    impossible, _ = vocabulary.from_logits(logits, torch.tensor([1, 0, 2]))
    assert impossible[0] == -torch.inf


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.15)])
def test_half_precision_is_raised(dtype: torch.dtype, bound: float, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets = (value.detach() for value in batch)
    out = vocabulary.from_hidden(hidden.to(dtype), weight.to(dtype), targets)
    for actual, right in zip(out, plain(hidden @ weight.T, targets, 1.0), strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), right, rtol=0, atol=bound)


def test_large_logits_do_not_overflow() -> None:
    log_probs, entropy = vocabulary.from_logits(torch.tensor([[1e30, 0.0, -1e30]]), torch.tensor([0]))
    assert (log_probs.item(), entropy.item()) == (0.0, 0.0)


def test_no_tokens() -> None:
    log_probs, entropy = vocabulary.from_logits(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long))
    assert log_probs.shape == entropy.shape == (0,)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"chunk": 0}])
def test_what_must_be_positive(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        vocabulary.from_logits(torch.zeros(1, 2), torch.tensor([0]), **wrong)


class Largest(TorchDispatchMode):
    """The most elements that any operation's result had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_nothing_of_tokens_times_vocabulary_ever_exists() -> None:
    hidden, weight = torch.randn(512, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    targets = torch.randint(0, 1000, (512,))
    with Largest() as seen:
        log_probs, entropy = vocabulary.from_hidden(hidden, weight, targets, chunk=20_000)
        (log_probs + entropy).sum().backward()
    assert seen.elements <= 20_000
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value.numel()) or value, lambda v: v):
        vocabulary.from_hidden(hidden, weight, targets, chunk=20_000)
    assert max(saved) == weight.numel()


@pytest.mark.parametrize("sizes", [(17,), (9, 8), (1, 16), (6, 6, 5)])
def test_a_vocabulary_spread_over_ranks(sizes: tuple[int, ...], batch: tuple[Tensor, Tensor, Tensor]) -> None:
    """Values are those of the whole, the parts of the hidden states' gradient add up, weights get their own rows."""
    hidden, weight, targets = batch
    upstream = torch.randn(2, TOKENS).double()
    exact = plain(hidden @ weight.T, targets, 0.7)
    of_hidden, of_weight = torch.autograd.grad((torch.stack(exact) * upstream).sum(), (hidden, weight))

    def rank(start: int, reduce: Reduce) -> tuple[Tensor, Tensor, Tensor]:
        size = sizes[starts.index(start)]
        states, rows = hidden.detach().clone(), weight.detach()[start : start + size].clone()
        found = torch.stack(
            vocabulary.from_hidden(
                states.requires_grad_(),
                rows.requires_grad_(),
                targets,
                temperature=0.7,
                chunk=4 * size,
                start=start,
                reduce=reduce,
            )
        )
        return found.detach(), *torch.autograd.grad((found * upstream).sum(), (states, rows))

    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    found, _ = on_ranks(starts, rank)
    for values, _, _ in found:
        torch.testing.assert_close(values, torch.stack(exact).detach())
    torch.testing.assert_close(sum(part for _, part, _ in found), of_hidden)
    torch.testing.assert_close(torch.cat([part for _, _, part in found]), of_weight)
