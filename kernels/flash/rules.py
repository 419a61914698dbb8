"""Score modifiers and masks, applied between q k^T and the softmax: softcap, ALiBi, and all masks.

All three portable kernels call these functions, on tiles with queries along either axis: `rows` and `keys` are index
tensors that broadcast against the tile. A rule that is off is None, 0 or -1 at compile time and generates no code.

Except for block masks, a query sees an interval of keys, and a key is seen by an interval of queries. Both ends are
non-decreasing in the query, so the first and last row of a tile bound what the whole tile sees. A block mask comes as
lists: for each block of 128 queries (or keys), how many blocks of 128 keys (or queries) to visit, and which.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
BLOCK_MASK_SIZE = tl.constexpr(128)


@dataclass(frozen=True)
class Spec:
    """Compile-time parameters, passed to a kernel as one argument; its fields are constants there."""

    HEAD_DIM: tl.constexpr
    BLOCK_D: tl.constexpr  # HEAD_DIM rounded up to a power of two
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    GROUP: tl.constexpr  # query heads per key head
    CAUSAL: tl.constexpr
    LEFT: tl.constexpr  # window: keys visible before a query's position; -1 for all
    RIGHT: tl.constexpr  # likewise after it
    SOFTCAP: tl.constexpr  # 0: off
    ALIBI: tl.constexpr
    DOCUMENTS: tl.constexpr
    PADDED: tl.constexpr
    DROPOUT_P: tl.constexpr  # dropped share, a multiple of 2^-16
    DROP_BELOW: tl.constexpr  # a 16-bit half of a Philox word below this drops


class Rules(NamedTuple):
    """Runtime parameters of one batch and query head. Those of rules that SPEC turns off are arbitrary."""

    q_len: tl.tensor
    kv_len: tl.tensor
    kv_end: tl.tensor  # keys from here on are padding
    scale: tl.tensor
    slope: tl.tensor  # ALiBi's
    seed: tl.tensor  # dropout's
    batch: tl.tensor
    head: tl.tensor
    DocumentStart: tl.tensor  # pointers to begin and end (exclusive) of the document of each token
    DocumentEnd: tl.tensor  # of this batch


@triton.jit
def rules_of(
    batch,
    head,
    Seed,
    Slopes,
    DocumentStart,
    DocumentEnd,
    KvLengths,
    q_len,
    kv_len,
    scale,
):
    """The Rules of a batch and query head, from the kernel's arguments."""
    kv_end, slope, seed, starts, ends = kv_len, scale, batch, batch, batch
    if KvLengths is not None:
        kv_end = tl.minimum(tl.load(KvLengths + batch), kv_len)
    if Slopes is not None:
        slope = tl.load(Slopes + head).to(tl.float32)
    if Seed is not None:
        seed = tl.load(Seed)
    if DocumentStart is not None:
        starts = DocumentStart + batch.to(tl.int64) * q_len
        ends = DocumentEnd + batch.to(tl.int64) * q_len
    return Rules(q_len, kv_len, kv_end, scale, slope, seed, batch, head, starts, ends)


@triton.jit
def visible_keys(row, rules, SPEC: tl.constexpr):
    """The interval [first, last) of keys that a query, or each of a tensor, sees; empty if last <= first."""
    position = row + (rules.kv_len - rules.q_len)
    first = row * 0
    last = first + rules.kv_len
    if SPEC.CAUSAL:
        last = position + 1
    elif SPEC.RIGHT >= 0:
        last = tl.minimum(last, position + SPEC.RIGHT + 1)
    if SPEC.PADDED:
        last = tl.minimum(last, rules.kv_end)
    if SPEC.LEFT >= 0:
        first = tl.maximum(first, position - SPEC.LEFT)
    if SPEC.DOCUMENTS:
        first = tl.maximum(first, tl.load(rules.DocumentStart + row, mask=row < rules.q_len, other=0))
        last = tl.minimum(last, tl.load(rules.DocumentEnd + row, mask=row < rules.q_len, other=0))
    return first, last


@triton.jit
def visible_rows(key, rows, rules, SPEC: tl.constexpr):
    """The interval [first, last) of the `rows` queries that see a key, or each of a tensor; ignores padding."""
    own = key - (rules.kv_len - rules.q_len)  # the query at the key's position
    first = key * 0
    last = first + rows
    if SPEC.CAUSAL:
        first = own
    elif SPEC.RIGHT >= 0:
        first = own - SPEC.RIGHT
    if SPEC.LEFT >= 0:
        last = tl.minimum(last, own + SPEC.LEFT + 1)
    if SPEC.DOCUMENTS:
        first = tl.maximum(first, tl.load(rules.DocumentStart + key, mask=key < rules.kv_len, other=0))
        last = tl.minimum(last, tl.load(rules.DocumentEnd + key, mask=key < rules.kv_len, other=0))
    return first, last


@triton.jit
def split_by_mask(first_0, last_0, first_1, last_1, length, BLOCK: tl.constexpr):
    """Split what a tile sees into ranges of whole BLOCKs: [begin, full) masked, [full, tail) unmasked, [tail, end)
    masked.

    [first_0, last_0) is the interval of the tile's first row and [first_1, last_1) that of its last one, of `length`.
    """
    begin = tl.maximum(first_0, 0) // BLOCK * BLOCK
    end = tl.minimum(last_1, length)
    full = tl.cdiv(tl.maximum(first_1, 0), BLOCK) * BLOCK
    tail = tl.maximum(tl.minimum(last_0, length), 0) // BLOCK * BLOCK
    if tail < full:  # no BLOCK is visible to all rows: everything is masked, as tail
        full = begin
        tail = begin
    return begin, full, tail, end


@triton.jit
def block_list(Blocks, stride_blocks_b, stride_blocks_h, batch, head, first, others, PARTS: tl.constexpr):
    """Pointer to the list of the block that contains `first`. others: length of the other axis.

    PARTS: entries of a list per block of the other axis, 1 or 2 (see `masks.block_lists`).
    """
    width = 1 + PARTS * tl.cdiv(others, BLOCK_MASK_SIZE)
    Blocks += batch.to(tl.int64) * stride_blocks_b + head.to(tl.int64) * stride_blocks_h
    return Blocks + first // BLOCK_MASK_SIZE * width


@triton.jit
def listed(step, BlockList):
    """The first index of the tile at loop position `step`: `step` itself, or its place within the listed blocks."""
    first = step
    if BlockList is not None:
        index = step // BLOCK_MASK_SIZE
        first = step + (tl.load(BlockList + 1 + index) - index) * BLOCK_MASK_SIZE
    return first


@triton.jit
def modify_scores(products, rows, keys, rules, SPEC: tl.constexpr):
    """Map q k^T to scores, in units of `score_exp2_scale`; also d score / d (scale * q k^T), 1 without softcap."""
    derivative = 1.0
    if SPEC.SOFTCAP > 0:
        tanh = 1 - 2 / (tl.exp2(products * (2 * LOG2_E / SPEC.SOFTCAP * rules.scale)) + 1)
        if SPEC.SOFTCAP > 64:
            # The line above has an absolute error of up to 2.4 * 2^-24, however small tanh is, and the cap multiplies
            # it: out was off by 0.06 at a cap of 1e6. Below 0.2 the series is accurate to float32. Caps up to 64 lose
            # less than 16-bit rounding does.
            x = products * (rules.scale / SPEC.SOFTCAP)
            square = x * x
            series = x - x * square * (1 / 3 - square * (2 / 15 - square * (17 / 315)))
            tanh = tl.where(square < 0.04, series, tanh)
        products = tanh * (SPEC.SOFTCAP * LOG2_E)
        derivative = 1 - tanh * tanh
    elif SPEC.ALIBI:
        products = products * (rules.scale * LOG2_E)
    if SPEC.ALIBI:
        products -= rules.slope * LOG2_E * tl.abs(keys - rows - (rules.kv_len - rules.q_len))
    return products, derivative


@triton.jit
def score_exp2_scale(rules, SPEC: tl.constexpr):
    """The factor from scores to exponents of 2. Plain scores stay unscaled, since exp2's multiply-add applies it."""
    exp2_scale = rules.scale * LOG2_E
    if SPEC.SOFTCAP > 0 or SPEC.ALIBI:
        exp2_scale = 1.0
    return exp2_scale
