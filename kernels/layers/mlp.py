"""A block's two linear layers with GELU between them, in one function.

On a Hopper GPU GELU is part of the first product, and its derivative of the product that the second layer's backward
begins with (gelu_product.py), so autograd sees both layers as one. Elsewhere they are `linear_gelu` and `linear`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import in_autocast_dtype
from ..flash.dispatch import HOPPER_DTYPES, machine_lacks
from ..operators import below_autograd, in_backward, operator
from .checks import check_operands, no_second_derivative
from .linear import linear, sum_product
from .linear_gelu import linear_gelu
from .sums import total_of

# GPT-2 small takes 0.80 of linear and linear_gelu's time forward (GROUP 1), 0.98 backward; 1,024 rows, 0.96 and 0.99.
MIN_ROWS = 2048


def mlp(x: Tensor, first: Tensor, bias: Tensor | None, second: Tensor) -> Tensor:
    """GELU(x @ first.T + bias) @ second.T, tanh approximation; the second layer's bias is added by what follows.

    Bias and GELU are computed in float32. Gradients are bitwise repeatable. The backward may run repeatedly, but
    there is no second derivative.

    Args:
        x: (..., inner). All inputs are float32, bfloat16 or float16.
        first: (width, inner). bias: (width,), or None. second: (outer, width).

    Returns:
        (..., outer), in the products' dtype (under autocast the autocast dtype).

    Raises:
        ValueError: mismatched shape, dtype or device of bias. FusedError: our kernels cannot run here.
    """
    # An exported program takes any number of rows.
    if not torch.compiler.is_exporting() and _has_gelu_product(x.device) and _fits(x, first, second):
        totals = total_of(first), total_of(second)
        weights = [
            weight if total is None else weight.low  # type: ignore[attr-defined]
            for weight, total in zip((first, second), totals, strict=True)
        ]
        x, low_first, low_second = in_autocast_dtype(x, *weights)
        if x.dtype in HOPPER_DTYPES and low_first.dtype == low_second.dtype == x.dtype:
            check_operands(low_first.T, **({} if bias is None else {"bias": bias}))
            # In eager mode, what the operator would call, without the dispatcher; torch.compile sees the operator.
            call = gelu_mlp if torch.compiler.is_compiling() else _GeluMLP.apply
            return call(x, low_first, bias, low_second, *totals)[0]
    return linear(linear_gelu(x, first, bias), second)


def _fits(x: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether gelu_product's kernels take these, and pay off. Operands that do not match are for torch to refuse."""
    (width, inner), (outer, of_second) = first.shape, second.shape
    rows = x.numel() // inner
    agree = x.shape[-1] == inner and of_second == width and x.device == first.device == second.device
    return agree and rows >= MIN_ROWS and rows % 128 == width % 128 == inner % 64 == outer % 64 == 0


@torch.compiler.assume_constant_result
def _has_gelu_product(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and machine_lacks(device) is None


def gelu_mlp(
    x: Tensor,
    first: Tensor,
    bias: Tensor | None,
    second: Tensor,
    first_total: Tensor | None,
    second_total: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator: `mlp` of 16-bit tensors on Hopper, its hidden layer, and that before bias and GELU.

    The totals are what the backward adds the weights' gradients to; None: it returns them.
    """
    from .gelu_product import gelu_product  # imports Gluon

    hidden, pre = (x.new_empty((*x.shape[:-1], first.shape[0])) for _ in range(2))
    rows = (each.flatten(0, -2) for each in (pre, hidden))
    gelu_product(_for_tma(x.flatten(0, -2)), _for_tma(first), _or_zeros(bias, first), *rows)
    return F.linear(hidden, second), hidden, pre


def gelu_mlp_backward(
    d_out: Tensor, second: Tensor, pre: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """d_pre, like pre, and d_bias, float32 (width,)."""
    from .gelu_product import gelu_product_backward

    d_pre = pre.new_empty(pre.shape)
    inputs = _for_tma(d_out.flatten(0, -2)), _for_tma(second), pre.flatten(0, -2)
    return d_pre, gelu_product_backward(*inputs, _or_zeros(bias, second[0]), d_pre.flatten(0, -2))


def _for_tma(x: Tensor) -> Tensor:
    """x, contiguous and at an address that TMA takes: a copy if need be."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _or_zeros(bias: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(len(like)) if bias is None else bias.contiguous()


class _GeluMLP(torch.autograd.Function):
    """`gelu_mlp` with its gradient."""

    @staticmethod
    def forward(ctx, x, first, bias, second, first_total, second_total):
        out, hidden, pre = below_autograd(gelu_mlp, x, first, bias, second, first_total, second_total)
        ctx.save_for_backward(x, first, bias, second, hidden, pre)
        ctx.totals = first_total, second_total  # not saved: see linear.py
        ctx.mark_non_differentiable(pre)
        ctx.set_materialize_grads(False)
        return out, hidden, pre

    @staticmethod
    def backward(ctx, d_out, d_hidden, _):
        if d_hidden is not None:  # from a gradient of d_second, which is a product with hidden
            raise no_second_derivative()
        x, first, bias, second, hidden, pre = ctx.saved_tensors
        first_total, second_total = ctx.totals
        needs_x, needs_first, needs_bias, needs_second, *_ = ctx.needs_input_grad
        d_second = _weight_gradient(needs_second, d_out, hidden, second_total)
        if not (needs_x or needs_first or needs_bias or first_total is not None):
            return None, None, None, d_second, None, None
        d_pre, d_bias = in_backward(gelu_mlp_backward, d_out, second, pre, bias)
        d_x = d_pre @ first if needs_x else None
        d_first = _weight_gradient(needs_first, d_pre, x, first_total)
        return d_x, d_first, d_bias.to(bias.dtype) if needs_bias else None, d_second, None, None


def _weight_gradient(needed: bool, d_out: Tensor, x: Tensor, total: Tensor | None) -> Tensor | None:
    """The gradient of a linear layer's weight; None if it is not needed, or once it is added to `total`."""
    if not needed and total is None:
        return None
    d_out, x = d_out.flatten(0, -2).T, x.flatten(0, -2)
    return d_out @ x if total is None else sum_product(total, d_out, x)


def _forward_like(x, first, bias, second, *totals):
    return tuple(x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in (second, first, first))


def _forward_flops(x, first, bias, second, *totals, out_shape=None):
    """What FlopCounterMode counts, from shapes: the products, as torch's own."""
    return 2 * math.prod(x[:-1]) * (math.prod(first) + math.prod(second))


def _backward_flops(d_out, second, pre, bias, out_shape=None):
    return 2 * math.prod(d_out[:-1]) * math.prod(second)


gelu_mlp = operator(gelu_mlp, _forward_like, _GeluMLP.apply, flops=_forward_flops)
gelu_mlp_backward = operator(
    gelu_mlp_backward,
    lambda d_out, second, pre, bias: (
        pre.new_empty(pre.shape),
        pre.new_empty(pre.shape[-1], dtype=torch.float32),
    ),
    no_gradient=no_second_derivative,
    flops=_backward_flops,
)
