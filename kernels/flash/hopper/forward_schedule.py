"""Tile scheduling of the Hopper forward, and the keys that a tile sees.

The kernel is persistent: one program for each SM takes one tile of queries after another. They are scheduled
statically or dynamically (scheduler.py), as spec.py says.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .block_masks import Blocks
from .bounds import Bounds, end_keys, first_keys

ROWS = gl.constexpr(64)  # of a consumer warpgroup: M of one wgmma


class ForwardSizes(NamedTuple):
    """The problem sizes of a launch, as runtime values."""

    q_len: gl.tensor
    kv_len: gl.tensor
    heads: gl.tensor
    batches: gl.tensor
    heads_per_group: gl.tensor  # heads in a scheduling group
    tiles: gl.tensor  # of queries, over all heads and batches
    bounds: Bounds  # if SPEC.BOUNDED
    blocks: Blocks  # of keys, if SPEC.LISTED
    KvLengths: gl.tensor  # of key padding (padding.py), or None
    Seed: gl.tensor  # of dropout, or None
    Slopes: gl.tensor  # of ALiBi, or None


@gluon.jit
def decode_tile(index, sizes, SPEC: gl.constexpr):
    """First row, head and batch of the index-th tile of queries.

    Heads come in groups; within a group, tiles with the most keys come first.
    """
    blocks = gl.cdiv(sizes.q_len, ROWS * SPEC.CONSUMERS)
    first_flat_head = index // (sizes.heads_per_group * blocks) * sizes.heads_per_group
    index -= first_flat_head * blocks
    heads_per_group = gl.minimum(sizes.heads_per_group, sizes.heads * sizes.batches - first_flat_head)
    flat_head = first_flat_head + index % heads_per_group
    block = blocks - 1 - index // heads_per_group
    return block * ROWS * SPEC.CONSUMERS, flat_head % sizes.heads, flat_head // sizes.heads


@gluon.jit
def q_slot(ordinal, WHICH: gl.constexpr, SPEC: gl.constexpr):
    """The slot in shared memory of a consumer's Q, for this program's ordinal-th tile."""
    TWO_EACH: gl.constexpr = SPEC.Q_SLOTS == 2 * SPEC.CONSUMERS
    number = ordinal * SPEC.CONSUMERS + WHICH
    return ordinal % 2 * SPEC.CONSUMERS + WHICH if TWO_EACH else number % SPEC.Q_SLOTS


@gluon.jit
def q_phase(ordinal, WHICH: gl.constexpr, SPEC: gl.constexpr):
    """The phase parity of that slot's barriers."""
    TWO_EACH: gl.constexpr = SPEC.Q_SLOTS == 2 * SPEC.CONSUMERS
    number = ordinal * SPEC.CONSUMERS + WHICH
    return (ordinal // 2 if TWO_EACH else number // SPEC.Q_SLOTS) & 1


@gluon.jit
def static_tile(ordinal, sizes):
    """Static schedule: the ordinal-th tile of this program. Round-robin, with every other round in reverse order."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    return ordinal * programs + gl.where(ordinal % 2 == 1, programs - 1 - own, own)


@gluon.jit
def count_static_tiles(sizes):
    """How many tiles the static schedule gives this program."""
    rounds = sizes.tiles // gl.num_programs(0)
    return rounds + (static_tile(rounds, sizes) < sizes.tiles).to(gl.int32)


@gluon.jit
def count_key_blocks(rows, batch, end, sizes, SPEC: gl.constexpr):
    """How many blocks of the keys before `end` the first `rows` rows see; at least 1, which may be fully masked. With
    bounds by query, which end before `end`, at least one from the first that the last ROWS of the rows see."""
    if SPEC.BY_QUERY:
        seen = end_keys(gl.minimum(rows, sizes.q_len) - 1, batch, sizes.bounds)
        return gl.maximum(gl.cdiv(seen, SPEC.BLOCK_N), first_key_block(rows - ROWS, batch, sizes, SPEC) + 1)
    if SPEC.CAUSAL:
        end = gl.minimum(end, rows + sizes.kv_len - sizes.q_len)
    return gl.maximum(gl.cdiv(end, SPEC.BLOCK_N), 1)


@gluon.jit
def first_key_block(row, batch, sizes, SPEC: gl.constexpr):
    """The block that holds the first visible key of a row, or of the last row if `row` lies beyond it."""
    first = 0
    if SPEC.BOUNDED:
        first = first_keys(gl.minimum(row, sizes.q_len - 1), batch, sizes.bounds) // SPEC.BLOCK_N
    return first
