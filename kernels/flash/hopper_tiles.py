"""Which tiles of queries the programs of the Hopper forward do, which keys those see, and how each shape is compiled.

As many programs run as the GPU has processors, and each takes one tile after another: dealt beforehand where there
are few queries, else claimed (hopper_claims.py).
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_blocks import Blocks
from .hopper_bounds import Bounds, first_keys

ROWS = gl.constexpr(64)  # of a consumer: what one wgmma multiplies
BLOCK_N = gl.constexpr(128)  # keys
CLAIMED_FROM = 2048  # queries; with fewer, claimed tiles took up to 1.06 of the time of dealt ones


@dataclass(frozen=True)
class Spec:
    """All that is known at compile time."""

    GROUP: gl.constexpr  # query heads to a key head
    CAUSAL: gl.constexpr
    ALIGNED: gl.constexpr  # a consumer's last block of keys is the only one that needs a mask
    # Of that block the first of two consumers sees no more than half, and computes no more: 0.93 of the time at 1024.
    HALVED: gl.constexpr
    BOUNDED: gl.constexpr  # by a window or documents (hopper_bounds.py)
    LISTED: gl.constexpr  # by a block mask (hopper_blocks.py)
    CLAIMED: gl.constexpr  # programs claim their tiles (hopper_claims.py); else they are dealt beforehand
    EARLY: gl.constexpr  # a tile's exponentials come before the wait for P V, not after it (`advance`)
    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr  # tiles of K, and of V, in shared memory
    REGISTERS: gl.constexpr  # of a consumer's thread


def claims(q_len: int, uneven: bool) -> bool:
    """Whether programs claim their tiles. uneven: a tile's work depends on what only the device knows."""
    return q_len >= CLAIMED_FROM or uneven


@functools.lru_cache(4096)
def specify(
    head_dim: int,
    causal: bool,
    q_len: int,
    kv_len: int,
    group: int = 1,
    bounded: bool = False,
    listed: bool = False,
) -> Spec:
    """What the kernel is compiled with for a shape. LOG.md has the times.

    Args:
        group: query heads to a key head.
        bounded: by a window or documents; causal, and q_len == kv_len.
        listed: by a block mask, instead; if causal, kv_len - q_len is a multiple of its blocks.
    """
    # With head_dim 64 the exponentials take as long as the products, and three consumers overlap them better than
    # two where tiles of 192 rows fit: 16 k tokens took 0.95 of the time at 4096 (full) and 0.86 at 16,384, but 1.22
    # at 1024 (causal). Bounded rows are as short as in a short sequence, and a block mask has blocks of two.
    many = head_dim == 64 and q_len >= (4096 if causal else 2048) and not (bounded or listed)
    consumers, stages, registers = (3, 3, 160) if many else (2, 256 // head_dim, 240)
    claimed = claims(q_len, bounded or listed)
    return Spec(
        GROUP=gl.constexpr(group),
        CAUSAL=gl.constexpr(causal),
        ALIGNED=gl.constexpr(not causal or (kv_len - q_len) % ROWS.value == 0),
        HALVED=gl.constexpr(
            causal and consumers == 2 and (kv_len - q_len) % BLOCK_N.value == 0 and not listed
        ),
        BOUNDED=gl.constexpr(bounded),
        LISTED=gl.constexpr(listed),
        CLAIMED=gl.constexpr(claimed),
        EARLY=gl.constexpr(claimed and causal and (many or head_dim == 128)),
        CONSUMERS=gl.constexpr(consumers),
        STAGES=gl.constexpr(stages),
        REGISTERS=gl.constexpr(registers),
    )


class Sizes(NamedTuple):
    """What a launch is about, at run time."""

    q_len: gl.tensor
    kv_len: gl.tensor
    heads: gl.tensor
    batches: gl.tensor
    together: gl.tensor  # heads in a group
    tiles: gl.tensor  # of queries, in all heads
    bounds: Bounds  # if SPEC.BOUNDED
    blocks: Blocks  # of keys, if SPEC.LISTED


@gluon.jit
def tile_at(index, sizes, SPEC: gl.constexpr):
    """First row, head and batch of the index-th tile of queries.

    Heads come in groups, and in a group the tiles with most keys first.
    """
    blocks = gl.cdiv(sizes.q_len, ROWS * SPEC.CONSUMERS)
    first_head = index // (sizes.together * blocks) * sizes.together
    index -= first_head * blocks
    together = gl.minimum(sizes.together, sizes.heads * sizes.batches - first_head)
    head = first_head + index % together
    block = blocks - 1 - index // together
    return block * ROWS * SPEC.CONSUMERS, head % sizes.heads, head // sizes.heads


@gluon.jit
def dealt(place, sizes):
    """The place-th tile of this program where none are claimed: in turn, and every other round in reverse order."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    return place * programs + gl.where(place % 2 == 1, programs - 1 - own, own)


@gluon.jit
def count_dealt(sizes):
    """How many tiles `dealt` has for this program."""
    rounds = sizes.tiles // gl.num_programs(0)
    return rounds + (dealt(rounds, sizes) < sizes.tiles).to(gl.int32)


@gluon.jit
def key_blocks(rows, sizes, SPEC: gl.constexpr):
    """How many blocks of keys the first `rows` rows see; at least one, whose mask may hide all of it."""
    end = sizes.kv_len
    if SPEC.CAUSAL:
        end = gl.minimum(end, rows + sizes.kv_len - sizes.q_len)
    return gl.maximum(gl.cdiv(end, BLOCK_N), 1)


@gluon.jit
def first_block(row, batch, sizes, SPEC: gl.constexpr):
    """The block with the first key that a row sees, or where there is no such row, the last one."""
    first = 0
    if SPEC.BOUNDED:
        first = first_keys(gl.minimum(row, sizes.q_len - 1), batch, sizes.bounds) // BLOCK_N
    return first
