"""The kernels of `linear_add_norm`: bias, dropout, residual addition and norm, forward and backward.

Both are memory-bound: what counts is that each element moves once, in wide loads, with enough loads in flight. A
program holds whole rows in registers and loops over rows, so that bias, gain and shift, and the partial sums of their
gradients, stay in registers too.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch, sm_count
from ..philox import row_threshold
from .checks import block_of
from .dropout import kept


class Tile(NamedTuple):
    """How rows are distributed over programs and threads."""

    rows: int  # that a program holds at a time
    columns: int  # of a row per thread
    warps: int  # per SM, over all of its programs
    stages: int  # num_stages of the row loop; 1: no prefetch

    def fitted(self, block: int) -> "Tile":
        """With fewer rows and stages where a row of `block` columns would not leave room for them."""
        rows = max(min(self.rows, BUFFERED // (block * (self.stages - 1) or 1)), 1)
        return self._replace(rows=rows, stages=min(self.stages, 1 + BUFFERED // (rows * block)))


# 65,536 rows of 768, float32 and bfloat16, on an H200 whose copies run at 4.2 TB/s: 152 and 203 us, 4.0 TB/s. The
# first guess, made without a GPU, took 162 and 235 (LOG.md).
FORWARD = Tile(rows=1, columns=16, warps=16, stages=1)
BACKWARD = Tile(rows=2, columns=4, warps=16, stages=3)
# Elements of a tensor that the row loop may prefetch: 96 KB for three in float32, which every GPU from sm_80 on has.
BUFFERED = 8192
WIDE = 16384  # columns from which a program has 32 warps, for their registers


def launch_forward(
    x: Tensor,
    update: Tensor,
    bias: Tensor | None,
    gain: Tensor,
    shift: Tensor | None,
    x_new: Tensor,
    normalised: Tensor,
    statistics: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    eps: float,
    rms: bool,
) -> None:
    """Write x_new = x + dropout(update + bias), its norm, and each row's mean and 1 / standard deviation.

    x, x_new: (rows, width). update, normalised: the same shape, possibly another dtype. bias, gain, shift: (width,).
    statistics: float32 (2, rows), or (2, ...) of as many; (1, ...) if rms. All contiguous. seed: 0-d int64, for
    dropout; None: none.
    """
    pointers = (x, update, bias, gain, shift, x_new, normalised, statistics, seed)
    rows, width = statistics.numel() // statistics.shape[0], x.shape[-1]

    def prepare():
        tile, block, warps, programs = _grid(FORWARD, rows, width, x.device)
        vector, threshold = _vector(x, update), row_threshold(dropout_p)
        numbers = (rows, eps, width, block, vector, tile.rows, tile.stages, threshold, rms)
        return add_norm_kernel, (programs, 1, 1), numbers, {"num_warps": warps}

    if x.numel():
        launch(pointers, ("add_norm", rows, width, dropout_p, eps, rms), prepare)


def launch_backward(
    d_x_new: Tensor | None,
    d_normalised: Tensor,
    x_new: Tensor,
    statistics: Tensor,
    gain: Tensor,
    d_x: Tensor,
    d_update: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    with_shift: bool,
    with_bias: bool,
    rms: bool,
) -> Tensor:
    """Write d_x and, unless it is None, d_update: d_x in another dtype, or with dropout's mask and scale applied.

    Returns the gradients of gain, shift if with_shift and bias if with_bias: float32 (1 to 3, width). The gradient of
    bias sums d_update before it is rounded.
    """
    rows, width = statistics.numel() // statistics.shape[0], x_new.shape[-1]
    tile, block, warps, programs = _grid(BACKWARD, rows, width, x_new.device)
    partials = gain.new_empty((programs, 1 + with_shift + with_bias, width), dtype=torch.float32)
    # d_x_new may be None, so it is not first: `launch` takes the device from the first pointer.
    pointers = (d_normalised, x_new, statistics, gain, d_x, d_update, partials, d_x_new, seed)

    def prepare():
        numbers = (
            *(rows, width, block, _vector(x_new, d_normalised)),
            *(tile.rows, tile.stages, with_shift, with_bias, row_threshold(dropout_p), rms),
        )
        return add_norm_backward_kernel, (programs, 1, 1), numbers, {"num_warps": warps}

    if x_new.numel():
        key = ("add_norm_backward", rows, width, dropout_p, with_shift, with_bias, rms)
        launch(pointers, key, prepare)
    return partials.sum(0)


@functools.lru_cache(1024)  # Triton's cdiv costs 2 us a call
def _grid(tile: Tile, rows: int, width: int, device: torch.device) -> tuple[Tile, int, int, int]:
    """(the tile as it fits, columns in a block, warps per program, programs)."""
    block = block_of(width)
    tile = tile.fitted(block)
    warps = 32 if block >= WIDE else min(max(block // (32 * tile.columns), 1), 16)
    return (
        tile,
        block,
        warps,
        min(sm_count(device) * max(tile.warps // warps, 1), triton.cdiv(rows, tile.rows)),
    )


def _vector(x: Tensor, update: Tensor) -> int:
    """Adjacent columns per thread: 16 bytes of the wider dtype.

    By default Triton uses 16 bytes of each dtype, in two layouts, and converts between them through shared memory.
    """
    return 16 // max(x.element_size(), update.element_size())


@triton.jit
def add_norm_kernel(
    X,
    Update,
    Bias,
    Gain,
    Shift,
    XNew,
    Normalised,
    Statistics,
    Seed,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    RMS: tl.constexpr,
):
    """A grid-stride loop over blocks of ROWS rows. Grid (programs,)."""
    columns = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
    inside = columns < WIDTH
    gain = tl.load(Gain + columns, mask=inside, other=0.0).to(tl.float32)
    if Shift is not None:
        shift = tl.load(Shift + columns, mask=inside, other=0.0).to(tl.float32)
    if Bias is not None:
        bias = tl.load(Bias + columns, mask=inside, other=0.0).to(tl.float32)
    if Seed is not None:
        seed = tl.load(Seed)
    of_block = tl.arange(0, ROWS)
    offsets = of_block[:, None] * WIDTH + columns[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + of_block
        here = (row < rows)[:, None] & inside[None, :]
        begin = tl.cast(block, tl.int64) * (ROWS * WIDTH)
        x = tl.load(X + begin + offsets, mask=here, other=0.0).to(tl.float32)
        update = tl.load(Update + begin + offsets, mask=here, other=0.0).to(tl.float32)
        if Bias is not None:
            update += bias[None, :]
        if Seed is not None:
            update = kept(update, seed, row[:, None], columns[None, :], DROP_BELOW)
        x += update
        x_new = x.to(XNew.dtype.element_ty)
        tl.store(XNew + begin + offsets, x_new, mask=here)
        x = x_new.to(tl.float32)  # normalise the rounded values, which the next layer reads
        centred = x
        if not RMS:
            mean = tl.sum(x, 1) / WIDTH
            centred = tl.where(inside[None, :], x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
        normalised = centred * rstd[:, None] * gain[None, :]
        if Shift is not None:
            normalised += shift[None, :]
        tl.store(Normalised + begin + offsets, normalised.to(Normalised.dtype.element_ty), mask=here)
        if RMS:
            tl.store(Statistics + row, rstd, mask=row < rows)
        else:
            tl.store(Statistics + row, mean, mask=row < rows)
            tl.store(Statistics + rows + row, rstd, mask=row < rows)


@triton.jit
def add_norm_backward_kernel(
    DNormalised,
    XNew,
    Statistics,
    Gain,
    DX,
    DUpdate,
    Partials,
    DXNew,
    Seed,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    WITH_SHIFT: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    DROP_BELOW: tl.constexpr,
    RMS: tl.constexpr,
):
    """Loop and grid as in the forward. With n = (x_new - mean) * rstd and g = gain * d_normalised,
    d_x = d_x_new + rstd * (g - mean(g) - n * mean(g * n)), where RMSNorm has no means of x_new and of g, and d_update
    is d_x with dropout applied."""
    columns = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
    inside = columns < WIDTH
    gain = tl.load(Gain + columns, mask=inside, other=0.0).to(tl.float32)
    d_gain = tl.zeros([BLOCK], tl.float32)
    d_shift = tl.zeros([BLOCK], tl.float32)
    d_bias = tl.zeros([BLOCK], tl.float32)
    if Seed is not None:
        seed = tl.load(Seed)
    of_block = tl.arange(0, ROWS)
    offsets = of_block[:, None] * WIDTH + columns[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + of_block
        here = (row < rows)[:, None] & inside[None, :]
        begin = tl.cast(block, tl.int64) * (ROWS * WIDTH)
        x = tl.load(XNew + begin + offsets, mask=here, other=0.0).to(tl.float32)
        d = tl.load(DNormalised + begin + offsets, mask=here, other=0.0).to(tl.float32)
        if RMS:
            rstd = tl.load(Statistics + row, mask=row < rows, other=0.0)
        else:
            mean = tl.load(Statistics + row, mask=row < rows, other=0.0)
            rstd = tl.load(Statistics + rows + row, mask=row < rows, other=0.0)
        n = x * rstd[:, None] if RMS else (x - mean[:, None]) * rstd[:, None]
        g = d * gain[None, :]  # 0 outside, where n of a LayerNorm is not
        if not RMS:
            mean_g = tl.sum(g, 1) / WIDTH
        mean_gn = tl.sum(g * n, 1) / WIDTH
        centred = g if RMS else g - mean_g[:, None]
        d_x = (centred - n * mean_gn[:, None]) * rstd[:, None]
        if DXNew is not None:
            d_x += tl.load(DXNew + begin + offsets, mask=here, other=0.0).to(tl.float32)
        tl.store(DX + begin + offsets, d_x.to(DX.dtype.element_ty), mask=here)
        d_update = d_x
        if Seed is not None:
            d_update = kept(d_x, seed, row[:, None], columns[None, :], DROP_BELOW)
        if DUpdate is not None:
            tl.store(DUpdate + begin + offsets, d_update.to(DUpdate.dtype.element_ty), mask=here)
        d_gain += tl.sum(d * n, 0)
        if WITH_SHIFT:
            d_shift += tl.sum(d, 0)
        if WITH_BIAS:
            d_bias += tl.sum(d_update, 0)
    Partials += tl.program_id(0) * ((1 + WITH_SHIFT + WITH_BIAS) * WIDTH)
    tl.store(Partials + columns, d_gain, mask=inside)
    if WITH_SHIFT:
        tl.store(Partials + WIDTH + columns, d_shift, mask=inside)
    if WITH_BIAS:
        tl.store(Partials + (1 + WITH_SHIFT) * WIDTH + columns, d_bias, mask=inside)
