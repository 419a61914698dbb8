"""Tile scheduling of the Hopper forward, the keys that a tile sees, and the compile-time choices for each shape.

The kernel is persistent: one program for each SM takes one tile of queries after another. Few queries are scheduled
statically, more of them dynamically (scheduler.py).
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .block_masks import Blocks
from .bounds import Bounds, first_keys
from .descriptors import tile_width
from .dropout import Drop

ROWS = gl.constexpr(64)  # of a consumer warpgroup: M of one wgmma


def _rows_layout(columns: int) -> gl.constexpr:
    """Layout in which 64 x columns results are stored where shared memory has no room for them. Each warp has the
    rows that it has after wgmma, so that one shuffle for four elements gets there. A thread stores 8 bytes, its
    neighbours the rest of 32."""
    further = [[0, 16 << each] for each in range(columns.bit_length() - 5)]
    lanes, warps = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    bases = [[0, 1], [0, 2], [8, 0], *further]
    return gl.constexpr(gl.DistributedLinearLayout(bases, lanes, warps, [], [64, columns]))


WIDE_ROWS, HALF_ROWS = _rows_layout(256), _rows_layout(128)
DYNAMIC_FROM = 2048  # queries; with fewer, the dynamic schedule took up to 1.06 of the static one's time


@dataclass(frozen=True)
class ForwardSpec:
    """Compile-time parameters of the forward, passed as one argument."""

    HEAD_DIM: gl.constexpr  # columns of out; tiles have `tile_width` columns
    BLOCK_N: gl.constexpr  # keys in a tile
    GROUP: gl.constexpr  # query heads per key head
    CAUSAL: gl.constexpr
    ALIGNED: gl.constexpr  # only a consumer's last block of keys needs a mask
    # The first of two consumers sees only half of that block, and computes only that: 0.93 of the time at 1024.
    HALVED: gl.constexpr
    BOUNDED: gl.constexpr  # window or documents (bounds.py)
    LISTED: gl.constexpr  # block mask (block_masks.py)
    DYNAMIC: gl.constexpr  # dynamic tile scheduling (scheduler.py); else static
    EXP_BEFORE_WAIT: gl.constexpr  # exponentials before the wait for P V, not after it (`pipelined_step`)
    CONSUMERS: gl.constexpr
    Q_SLOTS: gl.constexpr  # tiles of Q in shared memory, each for one consumer
    STAGES: gl.constexpr  # tiles in shared memory of each of K and V
    REGISTERS: gl.constexpr  # per consumer thread
    DROP: Drop | None  # parameters of dropout (dropout.py)
    SOFTCAP: gl.constexpr  # 0: off (score_mods.py)


def is_dynamic(q_len: int, uneven: bool) -> bool:
    """Whether tiles are scheduled dynamically. uneven: the cost of a tile depends on data only the device knows."""
    return q_len >= DYNAMIC_FROM or uneven


def block_n(head_dim: int) -> int:
    """Keys in a tile. Above head_dim 128 out fills half of a consumer's registers, and 64 keys' scores the rest."""
    return 128 if head_dim <= 128 else 64


@functools.lru_cache(4096)
def specify(
    head_dim: int,
    causal: bool,
    q_len: int,
    kv_len: int,
    group: int = 1,
    bounded: bool = False,
    listed: bool = False,
    padded: bool = False,
    drop: Drop | None = None,
    softcap: float = 0.0,
) -> ForwardSpec:
    """The compile-time parameters for a shape. LOG.md has the times.

    Args:
        group: query heads per key head.
        bounded: a window or documents are used; needs causal, and documents q_len == kv_len.
        listed: a block mask is used, without either of those; if causal, kv_len - q_len is a multiple of 128.
        padded: key padding is used, without any of those.
        drop: parameters of dropout, if it is used, without windows, documents and block masks.
    """
    # At head_dim 64 the exponentials take as long as the products, and three consumers overlap them better than two
    # if the sequence suits tiles of 192 rows: 16 k tokens took 0.95 of the time at 4096 (full) and 0.86 at 16,384,
    # but 1.22 at 1024 (causal). Bounded rows see as few keys as short sequences; a block mask has blocks of 128 rows;
    # dropout's random words need registers.
    width, keys = tile_width(head_dim), block_n(head_dim)
    many = width == 64 and q_len >= (4096 if causal else 2048) and not (bounded or listed or drop)
    consumers, stages, registers = (3, 3, 160) if many else (2, max(256 // width, 2), 240)
    dynamic = is_dynamic(q_len, bounded or listed or padded or drop is not None)  # dropout: or it spills
    halved = causal and consumers == 2 and keys == 128 and (kv_len - q_len) % keys == 0
    return ForwardSpec(
        HEAD_DIM=gl.constexpr(head_dim),
        BLOCK_N=gl.constexpr(keys),
        GROUP=gl.constexpr(group),
        CAUSAL=gl.constexpr(causal),
        ALIGNED=gl.constexpr(not causal or (kv_len - q_len) % ROWS.value == 0),
        HALVED=gl.constexpr(halved and not (listed or padded)),
        BOUNDED=gl.constexpr(bounded),
        LISTED=gl.constexpr(listed),
        DYNAMIC=gl.constexpr(dynamic),
        EXP_BEFORE_WAIT=gl.constexpr(dynamic and causal and (many or width > 64) and not drop),
        CONSUMERS=gl.constexpr(consumers),
        # Two for each consumer; at width 256 there is room for three, so one consumer's next Q is fetched early.
        Q_SLOTS=gl.constexpr(2 * consumers if width < 256 else 3),
        STAGES=gl.constexpr(stages),
        REGISTERS=gl.constexpr(registers),
        DROP=drop,
        SOFTCAP=gl.constexpr(softcap),
    )


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
def count_key_blocks(rows, end, sizes, SPEC: gl.constexpr):
    """How many of the keys before `end`, in blocks, the first `rows` rows see; at least 1, maybe fully masked."""
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
