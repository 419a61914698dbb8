"""Dropout whose mask is a function of a seed: no generator is advanced, and no mask is stored.

Other consumers of PyTorch's generator, such as torch's attention, therefore have no effect here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import check_dropout, seed_on
from .fused import check_dtype, kernels_of
from .operators import below_autograd, operator


def dropout(x: Tensor, dropout_p: float, dropout_seed: int | Tensor | None) -> Tensor:
    """x / (1 - p) where the (rows, width) mask kernels.philox.row_mask is True, else 0.

    Args:
        x: (..., width), or 0-d; float32, bfloat16 or float16.
        dropout_p: probability of a 0, in [0, 1); p is dropout_p to within 2^-33.
        dropout_seed: int or 0-d int64, needed with dropout_p > 0.

    Returns:
        Like x, contiguous; x itself if it is contiguous and dropout_p is 0.

    Raises:
        ValueError: invalid dtype, probability or seed. FusedError: our kernels cannot run here.
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
    """The operator: x with dropout. seed: 0-d int64, on x's device."""
    x = x.contiguous()
    out = torch.empty_like(x)
    kernels_of("row_dropout", x.device.type).drop(x, seed, dropout_p, out)
    return out


class _Dropped(torch.autograd.Function):
    """`dropped` with its gradient, which is `dropped` with the same seed."""

    @staticmethod
    def forward(ctx, x, seed, dropout_p):
        ctx.save_for_backward(seed)
        ctx.dropout_p = dropout_p
        return below_autograd(dropped, x, seed, dropout_p)

    @staticmethod
    def backward(ctx, d_out):
        return dropped(d_out, *ctx.saved_tensors, ctx.dropout_p), None, None


dropped = operator(dropped, lambda x, seed, dropout_p: x.new_empty(x.shape), _Dropped.apply)
