"""A reducer turns the geometry of a whole optimizer batch into a weight for each token; the loss is the weighted sum.

Weights are made once, of all samples that a rank has in the optimizer batch, and cut with `Tokens.token_slice` for
micro-batches: how a batch is cut or spread then cannot change its gradient. A sample without a valid token has no
weight and no vote: it does not count among the samples of a mean.
"""

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relax_core.batch import Tokens
from relax_core.checks import checked
from relax_core.collectives import Reduce, local


@checked
def sample_mean(tokens: Tokens, *, reduce: Reduce = local) -> Float64[Tensor, " tokens"]:
    """Mean over samples of the mean over a sample's valid tokens. One collective."""
    per_sample = tokens.valid[tokens.sample_of].double()
    return torch.where(tokens.mask, 1 / (per_sample * _total(tokens.valid > 0, reduce)), 0.0)


@checked
def token_mean(tokens: Tokens, *, reduce: Reduce = local) -> Float64[Tensor, " tokens"]:
    """Mean over the valid tokens of all samples. One collective."""
    return torch.where(tokens.mask, 1 / _total(tokens.mask, reduce), 0.0)


@checked
def constant_length(tokens: Tokens, length: float, *, reduce: Reduce = local) -> Float64[Tensor, " tokens"]:
    """Mean over samples of the sum over valid tokens divided by a constant. Dr. GRPO, arXiv 2503.20783. One collective.

    Raises:
        ValueError: a length that is not positive.
    """
    if not length > 0:
        raise ValueError(f"the constant length must be positive, got {length}")
    return torch.where(tokens.mask, 1 / (length * _total(tokens.valid > 0, reduce)), 0.0)


def _total(flags: Tensor, reduce: Reduce) -> Tensor:
    """How many flags are up on all ranks; at least 1, which matters only where no token has a weight anyway."""
    return reduce(flags.sum(dtype=torch.float64), "sum").clamp(min=1)


@checked
def weighted_sum(loss: Float[Tensor, " tokens"], weights: Float[Tensor, " tokens"]) -> Float[Tensor, ""]:
    """sum(weight * loss) over tokens whose weight is not 0; what the others hold does not matter, NaN included."""
    result: Tensor = _WeightedSum.apply(loss, weights)  # type: ignore[no-untyped-call]
    return result


class _WeightedSum(torch.autograd.Function):
    """Keeps nothing but the weights, which are the derivative: autograd's own would keep and make four more tensors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(loss: Tensor, weights: Tensor) -> Tensor:
        wide = torch.promote_types(loss.dtype, weights.dtype)
        return torch.dot(torch.where(weights != 0, loss, 0.0).to(wide), weights.to(wide)).to(loss.dtype)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (weights * gradient).to(gradient.dtype), None
