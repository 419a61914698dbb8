"""A linear layer, the residual addition and the LayerNorm or RMSNorm that follows it, in one function.

The matrix product is torch's, without bias. One kernel then adds bias and residual and normalises. Backward, one
kernel computes the gradients of residual stream and product, and the reductions over rows for bias, gain and shift.
Unfused, these are three kernels each way, which read and write the same tensors repeatedly.

`add_norm` has the kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import check_dropout, seed_on
from ..operators import below_autograd, in_backward, operator
from .add_norm import launch_backward, launch_forward
from .checks import check_device, check_operands, no_second_derivative


def linear_add_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor,
    shift: Tensor | None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    eps: float = 1e-5,
    rms: bool = False,
) -> tuple[Tensor, Tensor]:
    """x + dropout(y @ weight.T + bias), and the LayerNorm or RMSNorm of that.

    Statistics and sums are computed in float32, and so are bias and dropout (mask: kernels.philox.row_mask).
    Gradients are bitwise repeatable. The backward may run repeatedly, but there is no second derivative.

    Args:
        x: (..., width), the residual stream. All inputs are float32, bfloat16 or float16.
        y: (..., inner), with the leading dimensions of x. weight: (width, inner).
        bias, gain, shift: (width,); gain and shift are the LayerNorm's weight and bias. bias and shift may be None.
        dropout_p: probability of zeroing an element of the linear layer's output; others are divided by 1 - p.
        dropout_seed: int or 0-d int64, needed with dropout_p > 0.
        eps: added to the variance in the LayerNorm, to the mean square in the RMSNorm.
        rms: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), without mean and shift, in place of the LayerNorm.

    Returns:
        Two contiguous tensors shaped as x: the first in x's dtype, the second in the product's (under autocast the
        autocast dtype).

    Raises:
        ValueError: mismatched shapes, dtypes or devices, or invalid dropout. FusedError: our kernels cannot run here.
    """
    return dropout_add_norm(x, F.linear(y, weight), bias, gain, shift, dropout_p, dropout_seed, eps, rms)


def dropout_add_norm(
    x: Tensor,
    update: Tensor,
    bias: Tensor | None,
    gain: Tensor,
    shift: Tensor | None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    eps: float = 1e-5,
    rms: bool = False,
) -> tuple[Tensor, Tensor]:
    """x + dropout(update + bias), and the norm of that: `linear_add_norm` after its product.

    update: the product y @ weight.T, shaped as x. All else as there.
    """
    check_dropout(dropout_p, dropout_seed)
    seed = seed_on(x.device, dropout_seed) if dropout_p else None
    if rms and shift is not None:
        raise ValueError("RMSNorm has no shift: rms=True needs shift=None")
    vectors = {"gain": gain} | {name: x for name, x in (("shift", shift), ("bias", bias)) if x is not None}
    check_operands(update, x, **vectors)
    # In eager mode, what the operator would call, without the dispatcher; torch.compile sees the operator.
    add = add_norm if torch.compiler.is_compiling() else _AddNorm.apply
    x_new, normalised, _ = add(x, update, bias, gain, shift, seed, dropout_p, eps, rms)
    return x_new, normalised


def add_norm(
    x: Tensor,
    update: Tensor,
    bias: Tensor | None,
    gain: Tensor,
    shift: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator: x + dropout(update + bias), like x; its norm, like update; mean and 1 / standard deviation,
    float32 (2, ...) for x (..., width); for an RMSNorm 1 / root mean square alone, (1, ...)."""
    check_device("linear_add_norm", x.device.type)
    results = _forward_like(x, update, rms)
    bias, shift = (x if x is None else x.contiguous() for x in (bias, shift))
    inputs = (x.contiguous(), update.contiguous(), bias, gain.contiguous(), shift)
    launch_forward(*inputs, *results, seed, dropout_p, eps, rms)
    return results


def add_norm_backward(
    d_x_new: Tensor | None,
    d_normalised: Tensor,
    x_new: Tensor,
    statistics: Tensor,
    gain: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    with_shift: bool,
    with_bias: bool,
    rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """d_x; d_update, empty if it would equal d_x; d_gain, d_shift if with_shift and d_bias if with_bias, float32
    (1 to 3, width)."""
    if d_x_new is not None:
        d_x_new = d_x_new.contiguous()
    d_x, d_update = _gradients_like(d_normalised, x_new, seed)
    inputs = (d_x_new, d_normalised.contiguous(), x_new, statistics, gain.contiguous())
    apart = d_update if _is_apart(d_normalised, x_new, seed) else None
    return d_x, d_update, launch_backward(*inputs, d_x, apart, seed, dropout_p, with_shift, with_bias, rms)


class _AddNorm(torch.autograd.Function):
    """`add_norm` with its gradient."""

    @staticmethod
    def forward(ctx, x, update, bias, gain, shift, seed, dropout_p, eps, rms):
        inputs = (x, update, bias, gain, shift, seed, dropout_p, eps, rms)
        x_new, normalised, statistics = below_autograd(add_norm, *inputs)
        ctx.save_for_backward(x_new, statistics, gain, seed)
        ctx.dropout_p, ctx.rms = dropout_p, rms
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.dtypes = update.dtype, gain.dtype, *(None if x is None else x.dtype for x in (shift, bias))
        return x_new, normalised, statistics

    @staticmethod
    def backward(ctx, d_x_new, d_normalised, _):
        if d_x_new is None and d_normalised is None:
            return (None,) * 9
        x_new, statistics, gain, seed = ctx.saved_tensors
        update_dtype, *vectors = ctx.dtypes
        with_shift, with_bias = (dtype is not None for dtype in vectors[1:])
        if d_normalised is None:
            d_normalised = torch.zeros_like(x_new, dtype=update_dtype)
        inputs = (d_x_new, d_normalised, x_new, statistics, gain, seed, ctx.dropout_p)
        d_x, d_update, sums = in_backward(add_norm_backward, *inputs, with_shift, with_bias, ctx.rms)
        if not _is_apart(d_normalised, x_new, seed):
            d_update = d_x
        rows = iter(sums)
        d_gain, d_shift, d_bias = (None if dtype is None else next(rows).to(dtype) for dtype in vectors)
        return d_x, d_update, d_bias, d_gain, d_shift, None, None, None, None


def _forward_like(x: Tensor, update: Tensor, rms: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised results of `add_norm`."""
    shape = x.shape  # its rows are not counted with numel(), which turns a symbolic length into a number
    return (
        x.new_empty(shape),
        update.new_empty(shape),
        x.new_empty((2 - rms, *shape[:-1]), dtype=torch.float32),
    )


def _is_apart(d_normalised: Tensor, x_new: Tensor, seed: Tensor | None) -> bool:
    """Whether d_update differs from d_x, by dropout or dtype."""
    return seed is not None or x_new.dtype != d_normalised.dtype


def _gradients_like(d_normalised: Tensor, x_new: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Uninitialised d_x and d_update."""
    shape = x_new.shape if _is_apart(d_normalised, x_new, seed) else 0
    return x_new.new_empty(x_new.shape), d_normalised.new_empty(shape)


def _backward_like(
    d_x_new, d_normalised, x_new, statistics, gain, seed, dropout_p, with_shift, with_bias, rms
):
    sums = x_new.new_empty((1 + with_shift + with_bias, x_new.shape[-1]), dtype=torch.float32)
    return *_gradients_like(d_normalised, x_new, seed), sums


add_norm = operator(add_norm, lambda x, update, *rest: _forward_like(x, update, rest[-1]), _AddNorm.apply)
add_norm_backward = operator(add_norm_backward, _backward_like, no_gradient=no_second_derivative)
