"""A linear layer and its GELU in one function: torch's matrix product, then one kernel for bias and GELU.

Backward, one kernel computes the gradients of the product and of the bias, whose reduction would otherwise read the
whole gradient once more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused import check_operands, kernels_of, no_second_derivative
from .operators import below_autograd, in_backward, operator


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU(x @ weight.T + bias), tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2).

    Bias and GELU are computed in float32. Gradients are bitwise repeatable. The backward may run repeatedly, but
    there is no second derivative.

    Args:
        x: (..., inner). All inputs are float32, bfloat16 or float16.
        weight: (width, inner). bias: (width,).

    Returns:
        (..., width), contiguous, in the product's dtype (under autocast the autocast dtype).

    Raises:
        ValueError: mismatched shape, dtype or device of bias. FusedError: our kernels cannot run here.
    """
    pre = F.linear(x, weight)
    check_operands(pre, bias=bias)
    # In eager mode, what the operator would call, without the dispatcher; torch.compile sees the operator.
    return bias_gelu(pre, bias) if torch.compiler.is_compiling() else _BiasGelu.apply(pre, bias)


def bias_gelu(pre: Tensor, bias: Tensor) -> Tensor:
    """The operator: GELU(pre + bias), like pre."""
    out = pre.new_empty(pre.shape)
    kernels_of("bias_gelu", pre.device.type).forward(pre.contiguous(), bias.contiguous(), out)
    return out


def bias_gelu_backward(d_out: Tensor, pre: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """d_pre, like pre, and d_bias, float32 (width,)."""
    d_pre = pre.new_empty(pre.shape)
    kernels = kernels_of("bias_gelu", pre.device.type)
    return d_pre, kernels.backward(d_out.contiguous(), pre.contiguous(), bias.contiguous(), d_pre)


class _BiasGelu(torch.autograd.Function):
    """`bias_gelu` with its gradient."""

    @staticmethod
    def forward(ctx, pre, bias):
        ctx.save_for_backward(pre, bias)
        return below_autograd(bias_gelu, pre, bias)

    @staticmethod
    def backward(ctx, d_out):
        pre, bias = ctx.saved_tensors
        d_pre, d_bias = in_backward(bias_gelu_backward, d_out, pre, bias)
        return d_pre, d_bias.to(bias.dtype)


bias_gelu = operator(bias_gelu, lambda pre, bias: pre.new_empty(pre.shape), _BiasGelu.apply)
bias_gelu_backward = operator(
    bias_gelu_backward,
    lambda d_out, pre, bias: (pre.new_empty(pre.shape), bias.new_empty(bias.shape, dtype=torch.float32)),
    no_gradient=no_second_derivative,
)
