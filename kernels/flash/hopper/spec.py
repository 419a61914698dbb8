"""The Hopper forward's compile-time parameters, and how shape and features decide them. wide_dq.py takes them too."""

import functools
from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from .columns import rest_of
from .descriptors import tile_width
from .dropout import Drop
from .forward_schedule import ROWS

DYNAMIC_FROM = 2048  # queries; with fewer, the dynamic schedule took up to 1.06 of the static one's time
MANY_FROM = {True: 4096, False: 2048}  # causal -> queries from which head_dim 64 has three consumers
FEW = 512  # queries: up to here, a head's tiles, if scheduled together, find K and V in the L2 cache
# Above head_dim 128 a causal call with fewer queries takes 0.92 to 0.99 of the time if dynamic, others 0.95 to 0.98
# if static; without a mask the static schedule, exponentials before the wait, takes 0.98 to 1.00 (LOG.md). Where not
# all of a tile's columns are multiplied, exponentials after the wait take 0.96 to 0.98.
WIDE_STATIC_FROM = 4096


@dataclass(frozen=True)
class ForwardSpec:
    """Compile-time parameters of the forward, and of dQ above head_dim 128, passed as one argument."""

    HEAD_DIM: gl.constexpr  # columns of out; tiles are filled up (split_tiles.py)
    BLOCK_N: gl.constexpr  # keys in a tile
    GROUP: gl.constexpr  # query heads per key head
    CAUSAL: gl.constexpr
    ALIGNED: gl.constexpr  # the causal mask cuts no block of keys but the last that a consumer sees
    # The first of two consumers sees only half of that block, and computes only that: 0.93 of the time at 1024.
    HALVED: gl.constexpr
    BOUNDED: gl.constexpr  # window or documents (bounds.py)
    BY_QUERY: gl.constexpr  # BOUNDED, by the keys of each query and no causal mask (`masks.by_query`)
    LISTED: gl.constexpr  # block mask (block_masks.py)
    DYNAMIC: gl.constexpr  # dynamic tile scheduling (scheduler.py); else static
    CLAIMS_LATE: gl.constexpr  # DYNAMIC, but a tile is claimed only after all loads of the one before
    EXP_BEFORE_WAIT: gl.constexpr  # exponentials before the wait for P V, not after it (`pipelined_step`)
    CONSUMERS: gl.constexpr
    Q_SLOTS: gl.constexpr  # tiles of Q in shared memory, each for one consumer, and if OUT_BY_TMA its out
    STAGES: gl.constexpr  # tiles in shared memory of each of K and V
    REGISTERS: gl.constexpr  # per consumer thread
    DROP: Drop | None  # parameters of dropout (dropout.py)
    SOFTCAP: gl.constexpr  # 0: off (score_mods.py)
    OUT_BY_TMA: gl.constexpr  # out is stored by TMA, from the slot of its Q; else by the consumer's threads


def _is_dynamic(head_dim: int, causal: bool, q_len: int, uneven: bool, window: bool) -> bool:
    """Whether tiles are scheduled dynamically. uneven: what a tile costs depends on data that only the device has.
    window: a window, but no documents and no key padding."""
    if window:  # static 0.835 to 1.00 of the time, 1.02 at 192; with more queries 0.96 to 1.10
        spills = head_dim > 64 if causal else 192 < head_dim < 256  # 4 to 36 B, if static
        return spills or q_len > (2048 if head_dim <= 128 and not causal else 1024)
    if uneven:
        return True
    return causal and q_len < WIDE_STATIC_FROM if head_dim > 128 else q_len >= DYNAMIC_FROM


def has_few_tiles(head_dim: int, q_len: int, group: int, *features: object) -> bool:
    """Whether a head has so few tiles, up to four, that they are scheduled together. features: `bounded` to `precise`
    of `specify`; none may be in use. Not at 136 to 192, where part of 256 columns is multiplied: not timed."""
    timed = head_dim <= 128 or not rest_of(head_dim)
    return timed and q_len <= FEW and group == 1 and not any(features)


def _is_out_by_tma(head_dim: int, causal: bool, q_len: int, group: int, *features: object) -> bool:
    """Whether TMA stores out, from its Q's slot; above head_dim 128 consumers have none each. features: as above."""
    bounded, listed, padded, drop, softcap, precise = features
    if head_dim > 128 or listed or softcap or precise:
        return False
    if bounded or padded or drop:
        return True
    if q_len <= FEW:
        return group == 1 and (head_dim > 64 or 128 < q_len <= 256)
    return head_dim > 64 or q_len >= MANY_FROM[causal]


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
    precise: bool = False,
    full: bool = False,
    window: bool = False,
    late: bool = False,
) -> ForwardSpec:
    """The compile-time parameters for a shape. LOG.md has the times.

    Args:
        group: query heads per key head.
        bounded: a window or documents are used, for documents q_len == kv_len; if not causal, bounds by query.
        listed: a block mask is used, without either of those; if causal, kv_len - q_len is a multiple of 128.
        padded: key padding is used, without any of those but bounds by query.
        drop: parameters of dropout, if it is used, without windows, documents and block masks.
        precise: out's rounding error is stored too (precise_delta).
        full: with bounds by query: the call itself had no causal mask. (Bounds include one, and `causal` is False.)
        window: nothing but a window's two sides bounds the tiles. Like `late`, of no use to dQ above 128.
        late: there are few tiles, whose cost depends on data: each is claimed late.
    """
    # At head_dim 64 the exponentials take as long as the products, and three consumers overlap them better than two
    # if the sequence suits tiles of 192 rows: 16 k tokens took 0.95 of the time at 4096 (full) and 0.86 at 16,384,
    # but 1.22 at 1024 (causal). A block mask has blocks of 128 rows; dropout's random words need registers. Bounded
    # rows see as few keys as short sequences, but without a causal mask take 0.89 to 0.97 from 4096 on (2048: 0.91 to
    # 1.01, 1024: 1.00 to 1.17); with precise_delta these spill 8 B.
    width, keys = tile_width(head_dim), block_n(head_dim)
    suited = full and not precise if bounded else not (listed or drop)
    many = width == 64 and q_len >= MANY_FROM[causal or bounded] and suited
    consumers, stages, registers = (3, 3, 160) if many else (2, max(256 // width, 2), 240)
    uneven = bounded or listed or padded or drop is not None  # dropout: or it spills
    features = (bounded, listed, padded, drop, softcap, precise)
    few = has_few_tiles(head_dim, q_len, group, *features)
    # At 256, causal, few tiles that are dealt and not claimed take 0.93 of the time at 256 queries, 0.96 at 512, 1.00
    # at 128, of 16k tokens; claimed, with heads one by one, 0.975, 1.04 and 0.99.
    dynamic = _is_dynamic(head_dim, causal, q_len, uneven, window) and not few
    # Out by TMA took 0.96 to 1.01 of the time with three consumers, whose exponentials then come before the wait, and
    # 0.92 to 1.00 at head_dim 128, where they do if a causal call has few tiles and else come after. Two consumers at
    # head_dim 64 take 1.03 to 1.09 with it, but 0.94 to 0.97 at 256 queries. Windows, documents, key padding and
    # dropout take 0.88 to 1.01, bounds by query at 128 tiles in all up to 1.11. With other features, and with grouped
    # heads of few tiles, it gains at one length and loses at another, 0.87 to 1.12; these go without (LOG.md). By
    # query, exponentials before the wait take 0.94 to 1.01 at 256, 0.98 to 1.03 at 192.
    before_wait = dynamic and causal and (many or width > 64) and not drop
    if bounded and not causal:
        # With precise_delta, or where 16 does not divide head_dim, 28 B are spilled.
        before_wait = many or (head_dim > 192 and head_dim % 16 == 0 and not precise)
    elif width > 128 and not uneven:
        before_wait = not dynamic and not rest_of(head_dim)
    elif not any(features):
        before_wait = many or (causal and few and width == 128)
    halved = causal and consumers == 2 and keys == 128 and (kv_len - q_len) % keys == 0
    return ForwardSpec(
        HEAD_DIM=gl.constexpr(head_dim),
        BLOCK_N=gl.constexpr(keys),
        GROUP=gl.constexpr(group),
        CAUSAL=gl.constexpr(causal),
        ALIGNED=gl.constexpr(not causal or (kv_len - q_len) % ROWS.value == 0),
        HALVED=gl.constexpr(halved and not (listed or padded)),
        BOUNDED=gl.constexpr(bounded),
        BY_QUERY=gl.constexpr(bounded and not causal),
        LISTED=gl.constexpr(listed),
        DYNAMIC=gl.constexpr(dynamic),
        CLAIMS_LATE=gl.constexpr(dynamic and late),
        EXP_BEFORE_WAIT=gl.constexpr(before_wait),
        CONSUMERS=gl.constexpr(consumers),
        # Two for each consumer; at width 256 there is room for three, so one consumer's next Q is fetched early.
        Q_SLOTS=gl.constexpr(2 * consumers if width < 256 else 3),
        STAGES=gl.constexpr(stages),
        REGISTERS=gl.constexpr(registers),
        DROP=drop,
        SOFTCAP=gl.constexpr(softcap),
        OUT_BY_TMA=gl.constexpr(_is_out_by_tma(head_dim, causal, q_len, group, *features)),
    )
