"""Loads and stores of a tile of rows: (rows, HEAD_DIM) in memory, (rows, BLOCK_D) in registers, the rest zeros."""

import triton
import triton.language as tl


@triton.jit
def load_rows(
    base,
    first,
    length,
    stride,
    SPEC: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rows [first, first + ROWS) of a (length, HEAD_DIM) matrix; zeros beyond `length` if MASKED."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, SPEC.BLOCK_D)
    pointers = tile_of(base, first, rows, dims, stride)
    if MASKED and SPEC.HEAD_DIM != SPEC.BLOCK_D:
        return tl.load(
            pointers, mask=(first + rows < length)[:, None] & (dims < SPEC.HEAD_DIM)[None, :], other=0.0
        )
    if MASKED:
        return tl.load(pointers, mask=(first + rows < length)[:, None], other=0.0)
    if SPEC.HEAD_DIM != SPEC.BLOCK_D:
        return tl.load(pointers, mask=(dims < SPEC.HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_rows(base, values, first, length, stride, SPEC: tl.constexpr, ROWS: tl.constexpr):
    """Write (ROWS, BLOCK_D) values to rows [first, first + ROWS) below `length`, in the type of `base`."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, SPEC.BLOCK_D)
    pointers = tile_of(base, first, rows, dims, stride)
    mask = (first + rows < length)[:, None]
    if SPEC.HEAD_DIM != SPEC.BLOCK_D:
        mask = mask & (dims < SPEC.HEAD_DIM)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def tile_of(base, first, rows, dims, stride):
    """Pointers to the elements of a tile, of which rows and dims are the indices."""
    # The tile's start in 64 bits, once. Offsets inside a tile, of 128 rows at most, fit 32 until tokens lie some 2^24
    # elements apart. Strides are known at compile time, but for those of kernels/history.
    if not isinstance(stride, tl.tensor) and stride >= 2**24:
        rows = rows.to(tl.int64)
    return base + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + dims[None, :]


@triton.jit
def load_vector(base, first, length, SIZE: tl.constexpr, BEYOND: tl.constexpr = 0.0):
    """Elements [first, first + SIZE) of a contiguous vector, BEYOND from `length` on."""
    index = first + tl.arange(0, SIZE)
    return tl.load(base + index, mask=index < length, other=BEYOND)
