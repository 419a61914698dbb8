"""Dropout whose mask is a function of a seed: no generator is moved, and no mask is stored.

So what else draws from PyTorch's generator, as torch's attention does, changes nothing here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import check_dropout, seed_on
from .fused import check_dtype, kernels_of
from .operators import below_autograd, operator


def dropout(x: Tensor, dropout_p: float, dropout_seed: int | Tensor | None) -> Tensor:
    """x / (1 - p) where kernels.philox.row_mask of (rows, width) is True, else 0.

    Args:
        x: (..., width); float32, bfloat16 or float16.
        dropout_p: probability of a 0, p to 2^-33; at least 0 and below 1.
        dropout_seed: int or 0-d int64, needed with dropout_p > 0.

    Returns:
        Like x, contiguous; x itself where that is the same.

    Raises:
        ValueError: another dtype, probability or seed. FusedError: our kernels cannot run here.
    """
    check_dtype("x", x)
    check_dropout(dropout_p, dropout_seed)
    if not dropout_p:
        return x.contiguous()
    seed = seed_on(x.device, dropout_seed)
    return (
        dropped(x, seed, dropout_p) if torch.compiler.is_compiling() else _Dropped.apply(x, seed, dropout_p)
    )


def dropped(x: Tensor, seed: Tensor, dropout_p: float) -> Tensor:
    """x with dropout."""
    x = x.contiguous()
    out = torch.empty_like(x)
    kernels_of("row_dropout", x.device.type).drop(x, seed, dropout_p, out)
    return out


class _Dropped(torch.autograd.Function):
    """The gradient of `dropped`: itself."""

    @staticmethod
    def forward(ctx, x, seed, dropout_p):
        ctx.save_for_backward(seed)
        ctx.dropout_p = dropout_p
        return below_autograd(dropped, x, seed, dropout_p)

    @staticmethod
    def backward(ctx, d_out):
        return dropped(d_out, *ctx.saved_tensors, ctx.dropout_p), None, None


dropped = operator(dropped, lambda x, seed, dropout_p: x.new_empty(x.shape), _Dropped.apply)
