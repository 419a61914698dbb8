"""A linear layer, the residual addition and the LayerNorm that follows it, in one function.

The matrix product is torch's, without bias. One kernel then adds bias and residual and normalises. Backward, one
kernel computes the gradients of residual stream and product, and the reductions over rows for bias, gain and shift.
Unfused, these are three kernels each way, which read and write the same tensors repeatedly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import check_dropout, seed_on
from .fused import check_operands, kernels_of, no_second_derivative
from .operators import below_autograd, in_backward, operator


def linear_add_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor,
    shift: Tensor,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """x + dropout(y @ weight.T + bias), and the LayerNorm of that.

    Statistics and sums are computed in float32, and so are bias and dropout (mask: kernels.philox.row_mask).
    Gradients are bitwise repeatable. The backward may run repeatedly, but there is no second derivative.

    Args:
        x: (..., width), the residual stream. All inputs are float32, bfloat16 or float16.
        y: (..., inner), with the leading dimensions of x. weight: (width, inner).
        bias, gain, shift: (width,); gain and shift are the LayerNorm's weight and bias. bias may be None.
        dropout_p: probability of zeroing an element of the linear layer's output; others are divided by 1 - p.
        dropout_seed: int or 0-d int64, needed with dropout_p > 0.
        eps: added to the variance in the LayerNorm.

    Returns:
        Two contiguous tensors shaped as x: the first in x's dtype, the second in the product's (under autocast the
        autocast dtype).

    Raises:
        ValueError: mismatched shapes, dtypes or devices, or invalid dropout. FusedError: our kernels cannot run here.
    """
    return dropout_add_norm(x, F.linear(y, weight), bias, gain, shift, dropout_p, dropout_seed, eps)


def dropout_add_norm(
    x: Tensor,
    update: Tensor,
    bias: Tensor | None,
    gain: Tensor,
    shift: Tensor,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """x + dropout(update + bias), and the LayerNorm of that: `linear_add_norm` after its product.

    update: the product y @ weight.T, shaped as x. All else as there.
    """
    check_dropout(dropout_p, dropout_seed)
    seed = seed_on(x.device, dropout_seed) if dropout_p else None
    check_operands(update, x, gain=gain, shift=shift, **({} if bias is None else {"bias": bias}))
    # In eager mode, what the operator would call, without the dispatcher; torch.compile sees the operator.
    add = add_norm if torch.compiler.is_compiling() else _AddNorm.apply
    x_new, normalised, _ = add(x, update, bias, gain, shift, seed, dropout_p, eps)
    return x_new, normalised


def add_norm(
    x: Tensor,
    update: Tensor,
    bias: Tensor | None,
    gain: Tensor,
    shift: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator: x + dropout(update + bias), like x; its LayerNorm, like update; mean and 1 / standard deviation,
    float32 (2, ...) for x (..., width)."""
    results = _forward_like(x, update)
    if bias is not None:
        bias = bias.contiguous()
    inputs = (x.contiguous(), update.contiguous(), bias, gain.contiguous(), shift.contiguous())
    kernels_of("add_norm", x.device.type).forward(*inputs, *results, seed, dropout_p, eps)
    return results


def add_norm_backward(
    d_x_new: Tensor | None,
    d_normalised: Tensor,
    x_new: Tensor,
    statistics: Tensor,
    gain: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """d_x; d_update, empty if it would equal d_x; (d_gain, d_shift, d_bias if with_bias), float32 (2 or 3, width)."""
    if d_x_new is not None:
        d_x_new = d_x_new.contiguous()
    d_x, d_update = _gradients_like(d_normalised, x_new, seed)
    inputs = (d_x_new, d_normalised.contiguous(), x_new, statistics, gain.contiguous())
    apart = d_update if _is_apart(d_normalised, x_new, seed) else None
    kernels = kernels_of("add_norm", x_new.device.type)
    return d_x, d_update, kernels.backward(*inputs, d_x, apart, seed, dropout_p, with_bias)


class _AddNorm(torch.autograd.Function):
    """`add_norm` with its gradient."""

    @staticmethod
    def forward(ctx, x, update, bias, gain, shift, seed, dropout_p, eps):
        inputs = (x, update, bias, gain, shift, seed, dropout_p, eps)
        x_new, normalised, statistics = below_autograd(add_norm, *inputs)
        ctx.save_for_backward(x_new, statistics, gain, seed)
        ctx.dropout_p = dropout_p
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.dtypes = update.dtype, None if bias is None else bias.dtype, gain.dtype, shift.dtype
        return x_new, normalised, statistics

    @staticmethod
    def backward(ctx, d_x_new, d_normalised, _):
        if d_x_new is None and d_normalised is None:
            return (None,) * 8
        x_new, statistics, gain, seed = ctx.saved_tensors
        update_dtype, bias_dtype, gain_dtype, shift_dtype = ctx.dtypes
        if d_normalised is None:
            d_normalised = torch.zeros_like(x_new, dtype=update_dtype)
        inputs = (d_x_new, d_normalised, x_new, statistics, gain, seed, ctx.dropout_p, bias_dtype is not None)
        d_x, d_update, sums = in_backward(add_norm_backward, *inputs)
        if not _is_apart(d_normalised, x_new, seed):
            d_update = d_x
        d_bias = None if bias_dtype is None else sums[2].to(bias_dtype)
        return d_x, d_update, d_bias, sums[0].to(gain_dtype), sums[1].to(shift_dtype), None, None, None


def _forward_like(x: Tensor, update: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised results of `add_norm`."""
    shape = x.shape  # its rows are not counted with numel(), which makes a number of a symbolic length
    return x.new_empty(shape), update.new_empty(shape), x.new_empty((2, *shape[:-1]), dtype=torch.float32)


def _is_apart(d_normalised: Tensor, x_new: Tensor, seed: Tensor | None) -> bool:
    """Whether d_update differs from d_x, by dropout or dtype."""
    return seed is not None or x_new.dtype != d_normalised.dtype


def _gradients_like(d_normalised: Tensor, x_new: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Uninitialised d_x and d_update."""
    shape = x_new.shape if _is_apart(d_normalised, x_new, seed) else 0
    return x_new.new_empty(x_new.shape), d_normalised.new_empty(shape)


def _backward_like(d_x_new, d_normalised, x_new, statistics, gain, seed, dropout_p, with_bias):
    sums = x_new.new_empty((2 + with_bias, x_new.shape[-1]), dtype=torch.float32)
    return *_gradients_like(d_normalised, x_new, seed), sums


add_norm = operator(add_norm, lambda x, update, *rest: _forward_like(x, update), _AddNorm.apply)
add_norm_backward = operator(add_norm_backward, _backward_like, no_gradient=no_second_derivative)
