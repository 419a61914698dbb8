"""The forward's tiles of Q, K and V in shared memory: one array of tiles or, at some head_dims, two.

In tiles of 256 columns of which at most 192 are multiplied (columns.py), the last 64 are zeros that TMA writes and
nothing reads. So there are tiles of 128 columns and of 64 instead (`is_split`): 0.75 of the bytes that TMA writes, by
count, and of the memory. One descriptor fills both tiles of a stage, 64 columns at a time, and one barrier announces
them. The products are the same, in the same order.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .columns import columns_of, parts_of_tile, rest_of
from .descriptors import tile_width
from .pipeline import fetch, make_ring
from .primitives import reinterpret, tma_load

PIECE = gl.constexpr(64)  # columns: 128 bytes, all that one instruction of TMA moves of a swizzled row


class SplitRing(NamedTuple):
    """As a `Ring`, with two tiles for each stage: of 2 * PIECE columns in `tiles`, and of PIECE in `rests`."""

    tiles: gl.shared_memory_descriptor
    rests: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.constexpr_function
def is_split(head_dim):
    """Whether a stage is two tiles: 136 to 192."""
    return head_dim > 2 * PIECE.value and rest_of(head_dim) > 0


def box_width(head_dim: int) -> int:
    """Columns that a descriptor of Q, K or V moves at a time."""
    return PIECE.value if is_split(head_dim) else tile_width(head_dim)


@gluon.jit
def make_tiles(desc, STAGES: gl.constexpr, READERS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """A Ring or SplitRing of STAGES stages, each read by READERS warpgroups. desc: moves `box_width`."""
    ring = make_ring(desc, STAGES, READERS)
    if is_split(HEAD_DIM):
        ROWS: gl.constexpr = desc.block_type.shape[2]
        tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, 1, 1, ROWS, 2 * PIECE], desc.layout)
        return SplitRing(tiles, ring.tiles, ring.full, ring.empty)
    else:
        return ring


@gluon.jit
def halves_of(tile, layout: gl.constexpr):
    """A tile of 2 * PIECE columns as two of PIECE columns, which is how it lies in shared memory."""
    return reinterpret(tile, tile.dtype, [2, 1, 1, tile.shape[2], PIECE], layout)


@gluon.jit
def fetch_rows(desc, batch, head, row, ring, stage, phase, HEAD_DIM: gl.constexpr):
    """Wait until the stage is empty, then start the TMA loads of rows from `row` on into it."""
    if is_split(HEAD_DIM):
        mbarrier.wait(ring.empty.index(stage), phase ^ 1)
        full = ring.full.index(stage)
        mbarrier.expect(full, 3 * desc.block_type.nbytes)
        halves = halves_of(ring.tiles.index(stage), desc.layout)
        tma_load(desc, [batch, head, row, 0], full, halves.index(0))
        tma_load(desc, [batch, head, row, PIECE], full, halves.index(1))
        tma_load(desc, [batch, head, row, 2 * PIECE], full, ring.rests.index(stage))
    else:
        fetch(desc, [batch, head, row, 0], ring, stage, phase)


@gluon.jit
def first_rows(tile, ROWS: gl.constexpr):
    """The first rows of a tile (1, 1, rows, columns), as a tile (ROWS, columns)."""
    tile = tile.reshape([tile.shape[2], tile.shape[3]])
    if tile.shape[0] > ROWS:
        tile = tile.slice(0, ROWS)
    return tile


@gluon.jit
def tile_at(ring, stage, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The columns that are multiplied of a stage's first ROWS rows: a tuple of tiles, one for each product."""
    tile = first_rows(ring.tiles.index(stage), ROWS)
    if is_split(HEAD_DIM):
        rest = first_rows(ring.rests.index(stage), ROWS)
        return tile, columns_of(rest, 0, rest_of(HEAD_DIM))
    else:
        return parts_of_tile(tile, HEAD_DIM)
