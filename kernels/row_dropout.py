"""Dropout of matrix rows in Triton: the mask as a device function, and the kernel of `dropout`.

The mask is kernels/philox.py's row_mask. It is never stored; the backward recomputes it.
"""

import torch
import triton
import triton.language as tl

from .flash.dropout import philox
from .launch import launch
from .philox import row_threshold

WARPS = 4
COLUMNS = 8192  # of a row that a program holds


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


def drop(x: torch.Tensor, seed: torch.Tensor, dropout_p: float, out: torch.Tensor) -> None:
    """Write x with dropout to out: both (..., width), or 0-d, contiguous. seed: 0-d int64."""

    def prepare():
        width = x.shape[-1:].numel()  # 1 for a 0-d tensor
        block = min(triton.next_power_of_2(width), COLUMNS)
        grid = (x.numel() // width, triton.cdiv(width, block), 1)
        return drop_kernel, grid, (width, block, row_threshold(dropout_p)), {"num_warps": WARPS}

    if x.numel():
        launch((x, out, seed), ("drop", x.shape, dropout_p), prepare)


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
