"""Tiles of Q, K, V and dO in the forward and the wide backward: one array or, at some head_dims, two.

In tiles of 256 columns of which at most 192 are multiplied (columns.py), the last 64 are zeros that TMA writes and
nothing reads. So there are tiles of 128 columns and of 64 instead (`is_split`): 0.75 of the bytes that TMA writes, by
count, and of the memory. One descriptor fills both tiles of a stage, 64 columns at a time, and one barrier announces
them. The products are the same, in the same order.

Here `tiles` is a tuple of the arrays, one or two, in a Ring too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .columns import columns_of, parts_of_tile, rest_of
from .descriptors import tile_width
from .padding import clear_padding
from .pipeline import Ring, make_barriers
from .primitives import reinterpret, tma_load

PIECE = gl.constexpr(64)  # columns: 128 bytes, all that one instruction of TMA moves of a swizzled row


@gluon.constexpr_function
def is_split(head_dim):
    """Whether a stage is two tiles: 136 to 192."""
    return head_dim > 2 * PIECE.value and rest_of(head_dim) > 0


def box_width(head_dim: int) -> int:
    """Columns that a descriptor of Q, K, V or dO moves at a time."""
    return PIECE.value if is_split(head_dim) else tile_width(head_dim)


@gluon.jit
def allocate_tiles(desc, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Tiles of STAGES stages. desc: moves `box_width`."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    last = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)  # noqa: RUF005
    if is_split(HEAD_DIM):
        return gl.allocate_shared_memory(desc.dtype, [STAGES, 1, 1, ROWS, 2 * PIECE], desc.layout), last
    else:
        return (last,)


@gluon.jit
def make_tiles(desc, STAGES: gl.constexpr, READERS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """A Ring of STAGES stages, each read by READERS warpgroups. desc: moves `box_width`."""
    tiles = allocate_tiles(desc, STAGES, HEAD_DIM)
    return Ring(tiles, make_barriers(STAGES, 1), make_barriers(STAGES, READERS))


@gluon.jit
def stage_of(ring, number):
    """The stage of a ring's number-th tile."""
    return number % ring.tiles[0].shape[0]


@gluon.jit
def phase_of(ring, number):
    """The phase parity of that stage's barriers."""
    return number // ring.tiles[0].shape[0] & 1


@gluon.jit
def bytes_of(desc, tiles):
    """How many bytes `load_rows` loads."""
    PIECES: gl.constexpr = 3 if len(tiles) == 2 else 1
    return PIECES * desc.block_type.nbytes


@gluon.jit
def halves_of(tile, layout: gl.constexpr):
    """A tile of 2 * PIECE columns as two of PIECE columns, which is how it lies in shared memory."""
    return reinterpret(tile, tile.dtype, [2, 1, 1, tile.shape[2], PIECE], layout)


@gluon.jit
def load_rows(desc, batch, head, row, tiles, stage, full):
    """Start the TMA loads of rows from `row` on into a stage, which `full` announces."""
    if len(tiles) == 2:
        halves = halves_of(tiles[0].index(stage), desc.layout)
        tma_load(desc, [batch, head, row, 0], full, halves.index(0))
        tma_load(desc, [batch, head, row, PIECE], full, halves.index(1))
        tma_load(desc, [batch, head, row, 2 * PIECE], full, tiles[1].index(stage))
    else:
        tma_load(desc, [batch, head, row, 0], full, tiles[0].index(stage))


@gluon.jit
def fetch_rows(desc, batch, head, row, ring, stage, phase):
    """Wait until the stage is empty, then `load_rows`."""
    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    full = ring.full.index(stage)
    mbarrier.expect(full, bytes_of(desc, ring.tiles))
    load_rows(desc, batch, head, row, ring.tiles, stage, full)


@gluon.jit
def rows_at(tiles, stage, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """ROWS rows of a stage's tile from FIRST on, as a tile (ROWS, columns). tiles: one array."""
    tile = tiles.index(stage)
    tile = tile.reshape([tile.shape[2], tile.shape[3]])
    if tile.shape[0] > ROWS:
        tile = tile.slice(FIRST, ROWS)
    return tile


@gluon.jit
def tile_at(tiles, stage, FIRST: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The columns that are multiplied of those rows: a tuple of tiles, one for each product."""
    tile = rows_at(tiles[0], stage, FIRST, ROWS)
    if len(tiles) == 2:
        return tile, columns_of(rows_at(tiles[1], stage, FIRST, ROWS), 0, rest_of(HEAD_DIM))
    else:
        return parts_of_tile(tile, HEAD_DIM)


@gluon.jit
def half_at(
    tiles, stage, FIRST: gl.constexpr, ROWS: gl.constexpr, SECOND: gl.constexpr, COLUMNS: gl.constexpr
):
    """The first COLUMNS columns of half of those rows' columns: of the first 128, or the others if SECOND."""
    if len(tiles) == 2:
        return columns_of(rows_at(tiles[SECOND], stage, FIRST, ROWS), 0, COLUMNS)
    else:
        tile = rows_at(tiles[0], stage, FIRST, ROWS)
        return columns_of(tile, SECOND * (tile.shape[1] // 2), COLUMNS)


@gluon.jit
def clear_rows(tiles, stage, keys_left, ROWS: gl.constexpr):
    """Set a stage's rows from `keys_left` on to 0, as `clear_padding` does. ROWS: of a stage."""
    for part in gl.static_range(len(tiles)):
        clear_padding(rows_at(tiles[part], stage, 0, ROWS), keys_left)
