"""Dropout whose mask is a function of a seed: no generator is advanced, and no mask is stored.

Other consumers of PyTorch's generator, such as torch's attention, therefore have no effect here. The mask is
kernels/philox.py's row_mask; the backward recomputes it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import check_dropout, seed_on
from ..flash.dropout import philox
from ..launch import launch
from ..operators import below_autograd, operator
from ..philox import row_threshold
from .checks import check_device, check_dtype

WARPS = 4
COLUMNS = 8192  # of a row that a program holds


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
    check_device("dropout", x.device.type)
    x = x.contiguous()
    out = torch.empty_like(x)

    def prepare():
        width = x.shape[-1:].numel()  # 1 for a 0-d tensor
        block = min(triton.next_power_of_2(width), COLUMNS)
        grid = (x.numel() // width, triton.cdiv(width, block), 1)
        return drop_kernel, grid, (width, block, row_threshold(dropout_p)), {"num_warps": WARPS}

    if x.numel():
        launch((x, out, seed), ("drop", x.shape, dropout_p), prepare)
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
        (seed,) = ctx.saved_tensors
        return dropped(d_out, seed, ctx.dropout_p), None, None


dropped = operator(dropped, lambda x, seed, dropout_p: x.new_empty(x.shape), _Dropped.apply)


@triton.jit
def kept(x, seed, rows, columns, DROP_BELOW: tl.constexpr):
    """x / (1 - p) where dropout keeps it, else 0. rows, columns: int32, broadcastable against x.

    Written as if every element evaluated Philox; the compiler merges the evaluations of four neighbours in a thread.
    """
    zero = tl.full([], 0, tl.uint32)
    words = philox(seed, rows.to(tl.uint32), zero, (columns >> 2).to(tl.uint32), zero)
    odd = (columns & 1) != 0
    low, high = tl.where(odd, words[1], words[0]), tl.where(odd, words[3], words[2])
    SCALE: tl.constexpr = 2.0**32 / (2**32 - DROP_BELOW)
    return tl.where(tl.where((columns & 2) != 0, high, low) >= DROP_BELOW, x * SCALE, 0.0)


@triton.jit
def drop_kernel(X, Out, Seed, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DROP_BELOW: tl.constexpr):
    """One program per BLOCK columns of a row. Grid (rows, blocks in a row)."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    if WIDTH > BLOCK:
        columns += tl.program_id(1) * BLOCK
    begin = row.to(tl.int64) * WIDTH
    x = tl.load(X + begin + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    x = kept(x, tl.load(Seed), row, columns, DROP_BELOW)
    tl.store(Out + begin + columns, x.to(Out.dtype.element_ty), mask=columns < WIDTH)
