"""The Triton kernels of `linear_gelu`: bias and GELU in one pass over memory; one backward, with the bias gradient.

A program owns a range of columns and loops over rows, so that it reads their biases once and accumulates the bias
gradients in registers.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import launch, sm_count


class Tile(NamedTuple):
    """How elements are distributed over programs."""

    rows: int  # that a program holds at a time
    columns: int  # that a program owns
    warps: int  # per program; with columns / 256 or more, sums over rows stay within threads
    programs: int  # per SM
    stages: int  # num_stages of the row loop; 1: no prefetch


# 65,536 x 3,072 in bfloat16 on an H200: 202 and 301 us, 4.0 TB/s.
FORWARD = Tile(rows=4, columns=1024, warps=4, programs=8, stages=1)
BACKWARD = Tile(rows=1, columns=1024, warps=4, programs=6, stages=3)
# tanh(u) = 2 sigmoid(2 u) - 1, so GELU(x) = x sigmoid(2 u) with 2 u = LINEAR x + CUBIC x^3.
LINEAR = tl.constexpr(2 * math.sqrt(2 / math.pi))
CUBIC = tl.constexpr(2 * math.sqrt(2 / math.pi) * 0.044715)
LOG2_E = tl.constexpr(math.log2(math.e))
# The sigmoid saturates long before x^2 reaches LARGE. The clamp keeps out an infinite x^2: 0 * inf is NaN.
LARGE = tl.constexpr(1e4)
FINITE = tl.constexpr(3e38)  # just below the largest float32


def forward(pre: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """Write out = GELU(pre + bias). pre, out: (..., width), contiguous; bias: (width,)."""
    width = pre.shape[-1]
    rows = pre.shape[:-1].numel()

    def prepare():
        grid = (*_grid(FORWARD, rows, width, pre.device), 1)
        numbers = (rows, width, FORWARD.rows, FORWARD.columns, FORWARD.stages)
        return bias_gelu_kernel, grid, numbers, {"num_warps": FORWARD.warps}

    if pre.numel():
        launch((pre, bias, out), ("bias_gelu", rows, width), prepare)


def backward(d_out: torch.Tensor, pre: torch.Tensor, bias: torch.Tensor, d_pre: torch.Tensor) -> torch.Tensor:
    """Write d_pre. Returns its sum over rows, the gradient of bias, before d_pre is rounded: float32 (width,)."""
    width = pre.shape[-1]
    rows = pre.shape[:-1].numel()
    across, down = _grid(BACKWARD, rows, width, pre.device)
    partials = bias.new_empty((down, width), dtype=torch.float32)

    def prepare():
        numbers = (rows, width, BACKWARD.rows, BACKWARD.columns, BACKWARD.stages)
        return bias_gelu_backward_kernel, (across, down, 1), numbers, {"num_warps": BACKWARD.warps}

    if pre.numel():
        launch((d_out, pre, bias, d_pre, partials), ("bias_gelu_backward", rows, width), prepare)
    return partials.sum(0)


@functools.lru_cache(1024)  # Triton's cdiv and next_power_of_2 cost 5 us a call
def _grid(tile: Tile, rows: int, width: int, device: torch.device) -> tuple[int, int]:
    """The grid: (programs across the columns, programs down the rows)."""
    across = max(triton.cdiv(width, tile.columns), 1)
    down = max(sm_count(device) * tile.programs // across, 1)
    return across, min(down, triton.cdiv(rows, tile.rows))


@triton.jit
def bias_gelu_kernel(
    Pre,
    Bias,
    Out,
    rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A grid-stride loop over blocks of ROWS rows. Grid: see `_grid`."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < WIDTH) | (WIDTH % COLUMNS == 0)
    bias = tl.load(Bias + columns, mask=inside, other=0.0).to(tl.float32)
    of_block = tl.arange(0, ROWS)
    offsets = of_block[:, None] * WIDTH + columns[None, :]
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        here = (block * ROWS + of_block < rows)[:, None] & inside[None, :]
        begin = tl.cast(block, tl.int64) * (ROWS * WIDTH)
        x = tl.load(Pre + begin + offsets, mask=here, other=0.0).to(tl.float32) + bias[None, :]
        square = tl.minimum(x * x, LARGE)
        s, _ = sigmoid(x, square)
        out = x * s
        tl.store(Out + begin + offsets, out.to(Out.dtype.element_ty), mask=here)


@triton.jit
def bias_gelu_backward_kernel(
    DOut,
    Pre,
    Bias,
    DPre,
    Partials,
    rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Loop and grid as in the forward. With s = sigmoid(2 u), GELU' = s + x s (1 - s) 2 u'."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < WIDTH) | (WIDTH % COLUMNS == 0)
    bias = tl.load(Bias + columns, mask=inside, other=0.0).to(tl.float32)
    d_bias = tl.zeros([COLUMNS], tl.float32)
    of_block = tl.arange(0, ROWS)
    offsets = of_block[:, None] * WIDTH + columns[None, :]
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        here = (block * ROWS + of_block < rows)[:, None] & inside[None, :]
        begin = tl.cast(block, tl.int64) * (ROWS * WIDTH)
        x = tl.load(Pre + begin + offsets, mask=here, other=0.0).to(tl.float32) + bias[None, :]
        d = tl.load(DOut + begin + offsets, mask=here, other=0.0).to(tl.float32)
        square = tl.minimum(x * x, LARGE)
        s, e = sigmoid(x, square)
        # 1 - s is computed as e s, since the difference would cancel. For huge |x|, s or e is 0, so their product is
        # 0 and stays 0 when multiplied by x.
        d *= s + s * (tl.minimum(e, FINITE) * s) * x * (LINEAR + 3 * CUBIC * square)
        tl.store(DPre + begin + offsets, d.to(DPre.dtype.element_ty), mask=here)
        d_bias += tl.sum(d, 0)
    tl.store(Partials + tl.program_id(1) * WIDTH + columns, d_bias, mask=inside)


@triton.jit
def sigmoid(x, square):
    """(sigmoid(2 u) = 1 / (1 + e), e). square: x^2, clamped to LARGE."""
    e = tl.exp2(x * (-LOG2_E * LINEAR - LOG2_E * CUBIC * square))
    return 1.0 / (1.0 + e), e
