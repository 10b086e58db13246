"""Log-probs and entropy of tokens, from logits or from hidden states, without a second tensor of tokens x vocabulary.

Both work chunk by chunk, keep one number a token for the backward pass and recompute the rest there. The vocabulary may
be spread over ranks: then each holds the words from `start` on, and `reduce` combines what they find.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relax_core.checks import checked
from relax_core.collectives import Reduce, local

CHUNK: Final = 2**24
"""Logits in one chunk: 64 MiB of float32, some 110 tokens of a vocabulary of 151,936."""
_LEAST: Final = -1e4
"""Stands for a log-prob of -inf (a masked logit) where it is multiplied by its probability, 0."""


@checked
def from_logits(
    logits: Float[Tensor, "tokens vocabulary"],
    targets: Int[Tensor, " tokens"],
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    start: int = 0,
    reduce: Reduce = local,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """log_softmax(logits / temperature) at the targets, and the entropy in nats; float32 at least.

    Beside the logits and their gradient, memory is that of a chunk. A logit of -inf is a word that cannot be sampled.

    Args:
        chunk: how many logits to hold at a time.
        start: the first of this rank's words; targets are numbered over the whole vocabulary.
        reduce: over the ranks that share the vocabulary, twice for each chunk, in the forward pass only; for all of
            them a chunk must be equally many tokens.

    Raises:
        ValueError: a temperature or chunk that is not positive.
    """
    _expect_positive(temperature, chunk)
    how = _How(temperature, chunk, start, reduce)
    log_probs, entropy = _FromLogits.apply(logits, targets, how)  # type: ignore[no-untyped-call]
    return log_probs, entropy


@checked
def from_hidden(
    hidden: Float[Tensor, "tokens width"],
    weight: Float[Tensor, "vocabulary width"],
    targets: Int[Tensor, " tokens"],
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    start: int = 0,
    reduce: Reduce = local,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """`from_logits` of hidden @ weight.T, of which only a chunk exists at a time, in the backward pass too.

    Gradient flows to `hidden` and `weight`; that of `hidden` is the part of this rank's words. Raises as `from_logits`
    does.
    """
    _expect_positive(temperature, chunk)
    how = _How(temperature, chunk, start, reduce)
    log_probs, entropy = _FromHidden.apply(hidden, weight, targets, how)  # type: ignore[no-untyped-call]
    return log_probs, entropy


@attrs.frozen
class _How:
    temperature: float
    chunk: int
    start: int
    reduce: Reduce


def _expect_positive(temperature: float, chunk: int) -> None:
    if not temperature > 0 or chunk < 1:
        raise ValueError(f"temperature and chunk must be positive, got {temperature} and {chunk}")


def _chunks(logits: Sequence[int], chunk: int, like: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of [tokens, vocabulary], and two buffers for them, float32 at least.

    The same memory serves all chunks: to touch fresh pages takes longer than the arithmetic on them.
    """
    tokens, words = logits
    step = max(1, min(tokens, chunk // max(1, words)))
    first, second = (like.new_empty(step, words, dtype=_wide(like)) for _ in range(2))
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        yield slice(start, stop), first[: stop - start], second[: stop - start]


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _own(targets: Tensor, start: int, words: int) -> tuple[Tensor, Tensor]:
    """[rows, 1] each: the column of each target among the words from `start` on, and whether it is one of them."""
    column = targets[:, None] - start
    return column.clamp(0, words - 1), (column >= 0) & (column < words)


def _statistics(logits: Tensor, scratch: Tensor, targets: Tensor, how: _How) -> Tensor:
    """[3, rows]: log-probs at the targets, entropy and log-normalizer of rows of logits. Both buffers are used up."""
    top = how.reduce(logits.amax(dim=-1, keepdim=True), "max")
    shifted = logits.sub_(top)
    column, own = _own(targets, how.start, logits.shape[1])
    chosen = shifted.gather(-1, column).masked_fill_(~own, 0.0)[:, 0]
    total = torch.exp(shifted, out=scratch).sum(dim=-1)
    expected = scratch.mul_(shifted).sum(dim=-1)
    if expected.isnan().any():  # 0 times -inf: a word that cannot be sampled
        expected = torch.exp(shifted.clamp_(min=_LEAST), out=scratch).mul_(shifted).sum(dim=-1)
    chosen, total, expected = how.reduce(torch.stack([chosen, total, expected]), "sum")
    log_total = total.log()
    return torch.stack([chosen - log_total, log_total - expected / total, top[:, 0] + log_total])


def _logits_gradient(
    logits: Tensor,
    scratch: Tensor,
    start: int,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    """d/d logits of grad_log_probs * log_prob + grad_entropy * entropy, in `scratch`. Both buffers are used up.

    grad log_prob = [target] - p; grad entropy = -p (log p + entropy).
    """
    log_p = logits.sub_(normalizer[:, None])
    p = torch.exp(log_p, out=scratch)
    if grad_entropy.any():
        slope, rest = -grad_entropy[:, None], -(grad_log_probs + grad_entropy * entropy)[:, None]
        p.mul_(log_p.clamp_(min=_LEAST).mul_(slope).add_(rest))
    else:
        p.mul_(-grad_log_probs[:, None])
    column, own = _own(targets, start, logits.shape[1])
    return p.scatter_add_(-1, column, grad_log_probs[:, None].masked_fill(~own, 0.0))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """In place."""
    return logits if temperature == 1 else logits.div_(temperature)


def _product(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """hidden @ weight.T, in its own precision, in `out`."""
    if hidden.dtype == weight.dtype == out.dtype:
        return torch.mm(hidden, weight.T, out=out)
    return out.copy_(hidden @ weight.T)


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, targets: Tensor, how: _How) -> tuple[Tensor, Tensor]:
        out = logits.new_empty(3, len(targets), dtype=_wide(logits))
        for rows, buffer, scratch in _chunks(logits.shape, how.chunk, logits):
            scaled = _scaled(buffer.copy_(logits[rows]), how.temperature)
            out[:, rows] = _statistics(scaled, scratch, targets[rows], how)
        log_probs, entropy, normalizer = out
        ctx.save_for_backward(logits, targets, normalizer, entropy)
        ctx.how = how  # type: ignore[attr-defined]
        return log_probs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, normalizer, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        how: _How = ctx.how  # type: ignore[attr-defined]
        gradient = torch.empty_like(logits)
        per_token = targets, normalizer, entropy, grad_log_probs, grad_entropy
        for rows, buffer, scratch in _chunks(logits.shape, how.chunk, logits):
            scaled = _scaled(buffer.copy_(logits[rows]), how.temperature)
            of_logits = _logits_gradient(scaled, scratch, how.start, *(values[rows] for values in per_token))
            gradient[rows] = _scaled(of_logits, how.temperature)
        return gradient, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, how: _How) -> tuple[Tensor, Tensor]:
        out = hidden.new_empty(3, len(targets), dtype=_wide(hidden))
        for rows, buffer, scratch in _chunks((len(hidden), len(weight)), how.chunk, hidden):
            logits = _scaled(_product(hidden[rows], weight, buffer), how.temperature)
            out[:, rows] = _statistics(logits, scratch, targets[rows], how)
        log_probs, entropy, normalizer = out
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropy)
        ctx.how = how  # type: ignore[attr-defined]
        return log_probs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        how: _How = ctx.how  # type: ignore[attr-defined]
        learns = ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=normalizer.dtype) if learns else None
        per_token = targets, normalizer, entropy, grad_log_probs, grad_entropy
        for rows, buffer, scratch in _chunks((len(hidden), len(weight)), how.chunk, hidden):
            logits = _scaled(_product(hidden[rows], weight, buffer), how.temperature)
            of_logits = _logits_gradient(logits, scratch, how.start, *(values[rows] for values in per_token))
            gradient = _scaled(of_logits, how.temperature)
            grad_hidden[rows] = gradient.to(hidden.dtype) @ weight
            if grad_weight is not None:
                grad_weight.addmm_(gradient.T, hidden[rows].to(gradient.dtype))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None
