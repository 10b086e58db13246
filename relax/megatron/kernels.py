"""Elementwise parts of a layer with gradients written out: the same mathematics as autograd's, in fewer passes.

On a CPU these passes over memory cost as much as the matrix products. Everywhere else torch's own kernels serve.
"""

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

Rotation = tuple[Tensor, Tensor]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        size = states.shape[-1]
        scale = torch.linalg.vector_norm(states, dim=-1, keepdim=True).square_().div_(size).add_(epsilon).rsqrt_()
        ctx.save_for_backward(states, weight, scale)
        normed: Tensor = (states * scale).mul_(weight)
        return normed

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # With n = states * scale: d states = scale * (grad * w - n * mean(grad * w * n)), d weight = sum(grad * n).
        states, weight, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        size = states.shape[-1]
        normalized = states * scale
        product = (grad * normalized).view(-1, size)
        mean = torch.mv(product, weight).div_(size).view(scale.shape)
        grad_states = (grad * weight).addcmul_(normalized, mean, value=-1.0).mul_(scale)
        return grad_states, product.sum(0), None


class RMSNorm(nn.Module):
    """RMSNorm (arXiv:1910.07467) over the last axis, as a part of Megatron's layer spec."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, states: Tensor) -> Tensor:
        if states.is_cuda:
            return nn.functional.rms_norm(states, self.weight.shape, self.weight, self.eps)
        normed: Tensor = _RMSNorm.apply(states, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, states: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        gate, linear = states.chunk(2, dim=-1)
        return nn.functional.silu(gate).mul_(linear)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        (states,) = ctx.saved_tensors  # type: ignore[attr-defined]
        gate, linear = states.chunk(2, dim=-1)
        grad_states = torch.empty_like(states)
        grad_gate, grad_linear = grad_states.chunk(2, dim=-1)
        torch.mul(nn.functional.silu(gate), grad, out=grad_linear)
        torch.ops.aten.silu_backward.grad_input(grad * linear, gate, grad_input=grad_gate)
        return grad_states


class SwiGLU(MegatronModule):  # type: ignore[misc]
    """silu(first half) * second half of the last axis (arXiv:2002.05202), as a part of Megatron's layer spec."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)

    def forward(self, states: Tensor) -> Tensor:
        activated: Tensor = _SwiGLU.apply(states)  # type: ignore[no-untyped-call]
        return activated


def _turn(states: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    turned = torch.empty_like(states, memory_format=torch.contiguous_format)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin, value=direction)
    return turned


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(states, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # type: ignore[attr-defined]
        return _turn(grad, cos, sin, -1.0), None, None


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """RoPE (arXiv:2104.09864), half-split layout: states [..., d] by `(cos, sin)` of [..., d / 2]."""
    rotated: Tensor = _Rotate.apply(states, *rotation)  # type: ignore[no-untyped-call]
    return rotated
