"""Loads and stores of row tiles: (rows, HEAD_DIM) in memory, zero-padded to (rows, BLOCK_D) in registers."""

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
    """Load rows [first, first + ROWS) of a (length, HEAD_DIM) matrix. Rows beyond `length`: zeros if MASKED, else not
    allowed."""
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
    """Store (ROWS, BLOCK_D) values to rows [first, first + ROWS), below `length` only, in the dtype of `base`."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, SPEC.BLOCK_D)
    pointers = tile_of(base, first, rows, dims, stride)
    mask = (first + rows < length)[:, None]
    if SPEC.HEAD_DIM != SPEC.BLOCK_D:
        mask = mask & (dims < SPEC.HEAD_DIM)[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def tile_of(base, first, rows, dims, stride):
    """Pointers to the elements of a tile; rows and dims are indices within it."""
    # The tile's start is a 64-bit offset, computed once. Offsets within a tile, of at most 128 rows, fit 32 bits for
    # row strides below 2^24. Strides are compile-time constants, except in kernels/history.
    if not isinstance(stride, tl.tensor) and stride >= 2**24:
        rows = rows.to(tl.int64)
    return base + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + dims[None, :]


@triton.jit
def load_vector(base, first, length, SIZE: tl.constexpr, BEYOND: tl.constexpr = 0.0):
    """Load elements [first, first + SIZE) of a contiguous vector; BEYOND from `length` on."""
    index = first + tl.arange(0, SIZE)
    return tl.load(base + index, mask=index < length, other=BEYOND)
