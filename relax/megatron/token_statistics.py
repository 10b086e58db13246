"""Log-probability and entropy of tokens, over a vocabulary that may be spread over the tensor-parallel ranks."""

from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, distributed
from torch.autograd.function import FunctionCtx

from relax_core import vocabulary
from relax_core.vocabulary import CHUNK


def _reduce(values: Tensor, op: Literal["sum", "max"]) -> Tensor:
    """Over the tensor-parallel ranks, in place: what comes here is nobody else's."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        kind = distributed.ReduceOp.SUM if op == "sum" else distributed.ReduceOp.MAX
        distributed.all_reduce(values, kind, group=parallel_state.get_tensor_model_parallel_group())
    return values


class _TokenStatistics(torch.autograd.Function):
    """Keeps one tensor of the logits' size, the local vocabulary's log-probs, for the gradients of both outputs."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, targets: Tensor, start: int) -> tuple[Tensor, Tensor]:
        size = logits.shape[-1]
        local = targets - start
        elsewhere = (local < 0) | (local >= size)
        local = local.masked_fill(elsewhere, 0)

        peak = _reduce(logits.amax(-1, keepdim=True), "max")
        log_probs = logits - peak
        log_probs -= _reduce(log_probs.exp().sum(-1, keepdim=True), "sum").log_()
        chosen = log_probs.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(elsewhere, 0.0)
        entropy = (log_probs.exp() * log_probs).sum(-1).neg_()
        _reduce(chosen, "sum")
        _reduce(entropy, "sum")

        ctx.save_for_backward(log_probs, local, elsewhere, entropy)
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_chosen: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        # d log p[target] / d logit[j] = [j == target] - p[j];  d H / d logit[j] = -p[j] (log p[j] + H)
        log_probs, local, elsewhere, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        if grad_chosen is None and grad_entropy is None:
            return None, None, None
        weight = torch.zeros_like(entropy).unsqueeze(-1) if grad_chosen is None else -grad_chosen.unsqueeze(-1)
        if grad_entropy is not None:
            weight = weight - grad_entropy.unsqueeze(-1) * (log_probs + entropy.unsqueeze(-1))
        grad = log_probs.exp().mul_(weight)
        if grad_chosen is not None:
            grad.scatter_add_(-1, local.unsqueeze(-1), grad_chosen.masked_fill(elsewhere, 0.0).unsqueeze(-1))
        return grad, None, None


def token_statistics(logits: Tensor, targets: Tensor, *, start: int = 0) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution: [tokens, local vocabulary], [tokens] -> 2 x [tokens].

    In nats, differentiable in the logits. The local vocabulary are the ids from `start` on.
    """
    log_probs, entropy = _TokenStatistics.apply(logits, targets, start)  # type: ignore[no-untyped-call]
    return log_probs, entropy


def projected_statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, temperature: float, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of softmax(hidden @ weight.T / `temperature`): 2 x [tokens], in nats.

    hidden [tokens, width], targets [tokens], and this rank's rows [rows, width] of the output layer, as many as any
    rank's: those beyond the vocabulary take no part. More than `chunk` logits are never held: they come chunk by chunk
    then, and again in the backward pass.
    """
    hidden = copy_to_tensor_model_parallel_region(hidden)
    rows = len(weight)
    start = rows * parallel_state.get_tensor_model_parallel_rank()
    if start + rows > vocab_size:
        weight = weight[: vocab_size - start]
    if len(targets) * rows > chunk:
        # As many tokens at a time on every rank, however many of its rows are padding.
        chunk = max(1, chunk // rows) * len(weight)
        return vocabulary.from_hidden(
            hidden, weight, targets, temperature=temperature, chunk=chunk, start=start, reduce=_reduce
        )
    logits = torch.mm(hidden, weight.t())
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return token_statistics(logits if temperature == 1.0 else logits / temperature, targets, start=start)
