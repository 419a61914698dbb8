"""Which columns of a tile are multiplied, and results that have head_dim columns.

Tiles have 64, 128 or 256 columns (`tile_width`), as Gluon's shapes are powers of two; TMA fills them up with zeros.
In place of 256 there are tiles of 128 and 64, where that is enough (split_tiles.py).
If at least half of the second half is zeros, only the columns there that head_dim needs are multiplied, up to the
next power of two: at 32 and below, 32 in place of 64; at 96, 64 + 32 in place of 128; at 160, 128 + 32 in place of
256. So a sum over columns is issued as one product or two, and out, dK, dV and, above head_dim 128, dQ are tuples of
one tensor or two. Up to 128, each of two warpgroups has a part of a dQ tile (dq.py).
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def rest_of(head_dim):
    """The columns of a second product, at least 16; 0: there is none. In a tile of 64 it would begin in the middle of
    the 128 bytes of a swizzle: not tried."""
    half = triton.next_power_of_2(head_dim) // 2  # of `tile_width`, above 64
    rest = max(16, triton.next_power_of_2(head_dim - half))
    return rest if half > 32 and rest < half else 0


@gluon.constexpr_function
def first_of(head_dim):
    """The columns of the first product: all of the tile's, or half of them. Less than 32 was not tried."""
    width = max(32, triton.next_power_of_2(head_dim))
    return width // 2 if rest_of(head_dim) else width


def multiplied(head_dim: int) -> int:
    """How many of a tile's columns are multiplied. `first_of` and `rest_of` accept it as head_dim, and it is the
    same for all head_dims that share a compiled kernel."""
    return first_of(head_dim) + rest_of(head_dim)


@gluon.constexpr_function
def parts_of(head_dim):
    """How many products the columns take, and so how many a wait counts."""
    return 2 if rest_of(head_dim) else 1


@gluon.constexpr_function
def accumulator_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def rows_layout(columns):
    """Layout in which 64 x columns results are stored where shared memory has no room for them. Each warp keeps the
    rows that it has after wgmma, so that one shuffle for four elements is enough. A thread stores 8 bytes, its
    neighbours the rest of 32."""
    further = [[0, 16 << each] for each in range(columns.bit_length() - 5)]
    lanes, warps = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    bases = [[0, 1], [0, 2], [8, 0], *further]
    return gl.DistributedLinearLayout(bases, lanes, warps, [], [64, columns])


@gluon.jit
def columns_of(tile, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """COLUMNS columns of a tile (rows, width), from FIRST on."""
    if tile.shape[1] > COLUMNS:
        tile = tile.slice(FIRST, COLUMNS, dim=1)
    return tile


@gluon.jit
def parts_of_tile(tile, HEAD_DIM: gl.constexpr):
    """The columns of a tile (rows, width) that are multiplied, as a tuple of tiles, one for each product."""
    FIRST: gl.constexpr = first_of(HEAD_DIM)
    REST: gl.constexpr = rest_of(HEAD_DIM)
    first = columns_of(tile, 0, FIRST)
    if REST > 0:
        return first, columns_of(tile, FIRST, REST)
    else:
        return (first,)


@gluon.jit
def multiply_columns(a, b, acc, USE_ACC: gl.constexpr, HEAD_DIM: gl.constexpr):
    """`multiply_parts` of tiles of (rows, width)."""
    return multiply_parts(parts_of_tile(a, HEAD_DIM), parts_of_tile(b, HEAD_DIM), acc, USE_ACC)


@gluon.jit
def multiply_parts(a, b, acc, USE_ACC: gl.constexpr):
    """Issue a b^T, plus acc if USE_ACC, asynchronously. a, b: as `parts_of_tile` returns them."""
    acc = warpgroup_mma(a[0], b[0].permute((1, 0)), acc, use_acc=USE_ACC, is_async=True)
    if len(a) == 2:
        acc = warpgroup_mma(a[1], b[1].permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def no_sums(ROWS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zeros of (ROWS, head_dim), in one tensor or two."""
    FIRST: gl.constexpr = first_of(HEAD_DIM)
    REST: gl.constexpr = rest_of(HEAD_DIM)
    first = gl.zeros([ROWS, FIRST], gl.float32, accumulator_layout(FIRST))
    if REST > 0:
        return first, gl.zeros([ROWS, REST], gl.float32, accumulator_layout(REST))
    else:
        return (first,)


@gluon.jit
def multiply_into(a, b, sums, HEAD_DIM: gl.constexpr):
    """`multiply_parts_into` of b, a tile of (.., width)."""
    return multiply_parts_into(a, parts_of_tile(b, HEAD_DIM), sums)


@gluon.jit
def multiply_parts_into(a, b, sums):
    """Issue sums + a b, asynchronously. a: a register operand for the first of the sums. b: a tuple of tiles."""
    first = warpgroup_mma(a, b[0], sums[0], is_async=True)
    if len(b) == 2:
        return first, warpgroup_mma(a, b[1], sums[1], is_async=True)
    else:
        return (first,)


@gluon.jit
def wait_for_sums(issued):
    """The sums, after a wait for all products."""
    if len(issued) == 2:
        return warpgroup_mma_wait(0, [issued[0], issued[1]])
    else:
        return (warpgroup_mma_wait(0, [issued[0]]),)


@gluon.jit
def wait_keeping(issued, kept, OUTSTANDING: gl.constexpr):
    """The sums and `kept`, after a wait for all but OUTSTANDING products. kept: tensors that stay live until then."""
    ready = warpgroup_mma_wait(OUTSTANDING, issued + kept)
    return ready[: len(issued)], ready[len(issued) :]


@gluon.jit
def scale_sums(sums, factor):
    """The sums times a number."""
    if len(sums) == 2:
        return sums[0] * factor, sums[1] * factor
    else:
        return (sums[0] * factor,)


@gluon.jit
def store_sums(tile, sums):
    """Store the sums to the columns of a tile in shared memory, rounded; without those that were not multiplied."""
    FIRST: gl.constexpr = sums[0].shape[1]
    columns_of(tile, 0, FIRST).store(sums[0].to(tile.dtype))
    if len(sums) == 2:
        columns_of(tile, FIRST, sums[1].shape[1]).store(sums[1].to(tile.dtype))


@gluon.jit
def rescale_sums(sums, factors):
    """The sums, each row times its factor."""
    first = sums[0] * gl.convert_layout(factors, gl.SliceLayout(1, sums[0].type.layout))[:, None]
    if len(sums) == 2:
        return first, sums[1] * gl.convert_layout(factors, gl.SliceLayout(1, sums[1].type.layout))[:, None]
    else:
        return (first,)
