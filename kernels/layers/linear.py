"""A linear layer whose product adds the weight's gradient to what earlier micro-steps have left (sums.py)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import in_autocast_dtype
from ..operators import NAMESPACE
from .sums import add_product, total_of


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, torch's, unless the weight's gradient is summed."""
    total = total_of(weight)
    if total is None:
        return F.linear(x, weight, bias)
    (x,) = in_autocast_dtype(x)
    low = weight.low  # type: ignore[attr-defined]
    return _linear(x, low, None if bias is None else bias.to(x.dtype), total)


@torch.library.custom_op(f"{NAMESPACE}::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


@_linear.register_fake
def _(x, weight, bias, total):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op(f"{NAMESPACE}::sum_product", mutates_args=("total",))
def sum_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    with torch.autocast(total.device.type, enabled=False):
        add_product(total, a, b)


@sum_product.register_fake
def _(total, a, b):
    return None


def _save(ctx, inputs, output):
    x, weight, bias, total = inputs
    ctx.save_for_backward(x, weight)
    ctx.total = total  # not saved: other layers' backwards change the bucket that it may be part of
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, d_out):
    x, weight = ctx.saved_tensors
    rows = d_out.flatten(0, -2)
    sum_product(ctx.total, rows.T, x.flatten(0, -2))
    d_bias = None if ctx.bias_dtype is None else rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return d_out @ weight, None, d_bias, None


_linear.register_autograd(_backward, setup_context=_save)
