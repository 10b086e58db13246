"""Elementwise parts of a layer with gradients written out: the same mathematics as autograd's, in fewer passes.

On a CPU these passes over memory cost as much as the matrix products. Everywhere else torch's own kernels serve.
Where no gradient is wanted the same values come without a custom function, which costs more to call than small tensors
cost to compute: decoding makes such calls by the thousand.
"""

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

Rotation = tuple[Tensor, Tensor]


def _normalize(states: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    norm = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    scale = norm.square_().div_(states.shape[-1]).add_(epsilon).rsqrt_()
    return (states * scale).mul_(weight), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normed, scale = _normalize(states, weight, epsilon)
        ctx.save_for_backward(states, weight, scale)
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
        if states.is_cuda or states.dtype == torch.bfloat16:
            return nn.functional.rms_norm(states, self.weight.shape, self.weight, self.eps)
        if not torch.is_grad_enabled():
            return _normalize(states, self.weight, self.eps)[0]
        normed: Tensor = _RMSNorm.apply(states, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


def _swiglu(states: Tensor) -> Tensor:
    gate, linear = states.chunk(2, dim=-1)
    return nn.functional.silu(gate).mul_(linear)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, states: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        return _swiglu(states)

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
        if not torch.is_grad_enabled():
            return _swiglu(states)
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
    if not torch.is_grad_enabled():
        return _turn(states, *rotation, 1.0)
    rotated: Tensor = _Rotate.apply(states, *rotation)  # type: ignore[no-untyped-call]
    return rotated
