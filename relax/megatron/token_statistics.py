"""Log-probability and entropy of tokens from logits whose vocabulary may be spread over the tensor-parallel ranks."""

import torch
from megatron.core import parallel_state
from torch import Tensor, distributed
from torch.autograd.function import FunctionCtx


def _all_reduce(values: Tensor, op: distributed.ReduceOp.RedOpType) -> Tensor:
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        distributed.all_reduce(values, op, group=parallel_state.get_tensor_model_parallel_group())
    return values


class _TokenStatistics(torch.autograd.Function):
    """Keeps one tensor of the logits' size, the local vocabulary's log-probs, for the gradients of both outputs."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        size = logits.shape[-1]
        start = size * parallel_state.get_tensor_model_parallel_rank()
        local = targets - start
        elsewhere = (local < 0) | (local >= size)
        local = local.masked_fill(elsewhere, 0)

        peak = _all_reduce(logits.amax(-1, keepdim=True), distributed.ReduceOp.MAX)
        log_probs = logits - peak
        log_probs -= _all_reduce(log_probs.exp().sum(-1, keepdim=True), distributed.ReduceOp.SUM).log_()
        chosen = log_probs.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill_(elsewhere, 0.0)
        entropy = (log_probs.exp() * log_probs).sum(-1).neg_()
        _all_reduce(chosen, distributed.ReduceOp.SUM)
        _all_reduce(entropy, distributed.ReduceOp.SUM)

        ctx.save_for_backward(log_probs, local, elsewhere, entropy)
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_chosen: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None]:
        # d log p[target] / d logit[j] = [j == target] - p[j];  d H / d logit[j] = -p[j] (log p[j] + H)
        log_probs, local, elsewhere, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        if grad_chosen is None and grad_entropy is None:
            return None, None
        weight = torch.zeros_like(entropy).unsqueeze(-1) if grad_chosen is None else -grad_chosen.unsqueeze(-1)
        if grad_entropy is not None:
            weight = weight - grad_entropy.unsqueeze(-1) * (log_probs + entropy.unsqueeze(-1))
        grad = log_probs.exp().mul_(weight)
        if grad_chosen is not None:
            grad.scatter_add_(-1, local.unsqueeze(-1), grad_chosen.masked_fill(elsewhere, 0.0).unsqueeze(-1))
        return grad, None


def token_statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution: [tokens, local vocabulary], [tokens] -> 2 x [tokens].

    In nats, differentiable in the logits. Tensor-parallel rank r holds the ids from r * size up to (r + 1) * size.
    """
    log_probs, entropy = _TokenStatistics.apply(logits, targets)  # type: ignore[no-untyped-call]
    return log_probs, entropy
