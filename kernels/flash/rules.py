"""What a score goes through between q k^T and the softmax: softcap, ALiBi, masks.

All three kernels call these functions, on tiles with queries along either axis: `rows` and `keys` are index tensors
that broadcast against the tile. A rule that is off is None, 0 or -1 at compile time and leaves no code.

Every mask but the block mask is an interval of keys for each query, and of queries for each key. Neither end of it
decreases from one query to the next, so the first and last row of a tile say what all of the tile sees. A block mask
comes as lists: for each 128 queries (or keys), how many blocks of 128 keys (or queries) to visit, and which.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
BLOCK_MASK_SIZE = tl.constexpr(128)


@dataclass(frozen=True)
class Spec:
    """All that is known at compile time. Passed to a kernel as one argument, whose fields are then constants too."""

    HEAD_DIM: tl.constexpr
    BLOCK_D: tl.constexpr  # HEAD_DIM rounded up to a power of two
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    GROUP: tl.constexpr  # query heads to a key head
    CAUSAL: tl.constexpr
    LEFT: tl.constexpr  # keys a query sees before its position; -1 for all
    RIGHT: tl.constexpr
    SOFTCAP: tl.constexpr  # 0 for none
    ALIBI: tl.constexpr
    DOCUMENTS: tl.constexpr
    PADDED: tl.constexpr
    DROPOUT_P: tl.constexpr  # the share that is dropped
    DROP_BELOW: tl.constexpr  # half a Philox word below this drops


class Rules(NamedTuple):
    """What one batch and query head asks of its scores, at run time. What SPEC says is off holds any number."""

    q_len: tl.tensor
    kv_len: tl.tensor
    kv_end: tl.tensor  # keys from here on are padding
    scale: tl.tensor
    slope: tl.tensor  # ALiBi's
    seed: tl.tensor  # dropout's
    batch: tl.tensor
    head: tl.tensor
    DocumentStart: (
        tl.tensor
    )  # pointers to the first and last + 1 token of the document of each of this batch's
    DocumentEnd: tl.tensor  # tokens


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
    """The rules of a batch and query head, from the kernels' arguments."""
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
    """[first, last) of the keys that a query, or each of a vector of queries, sees; empty if last <= first."""
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
    """[first, last) of the `rows` queries that see a key, or each of a vector of keys; padding is the caller's."""
    own = key - (rules.kv_len - rules.q_len)  # the query that stands at the key
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
def parts(first_0, last_0, first_1, last_1, length, BLOCK: tl.constexpr):
    """Cut what a tile sees into whole BLOCKs: [begin, full) masked, [full, tail) not, [tail, end) masked.

    [first_0, last_0) is what the tile's first row sees and [first_1, last_1) what its last one sees, of `length`.
    """
    begin = tl.maximum(first_0, 0) // BLOCK * BLOCK
    end = tl.minimum(last_1, length)
    full = tl.cdiv(tl.maximum(first_1, 0), BLOCK) * BLOCK
    tail = tl.maximum(tl.minimum(last_0, length), 0) // BLOCK * BLOCK
    if tail < full:  # no BLOCK is seen by all: everything is tail
        full = begin
        tail = begin
    return begin, full, tail, end


@triton.jit
def block_list(Blocks, stride_blocks_b, stride_blocks_h, batch, head, first, others, PARTS: tl.constexpr):
    """The list of the block that begins at or before `first`; `others` is the length of the other axis.

    PARTS: numbers a list has for each of its blocks, 1 or 2 (see `masks.block_lists`).
    """
    width = 1 + PARTS * tl.cdiv(others, BLOCK_MASK_SIZE)
    Blocks += batch.to(tl.int64) * stride_blocks_b + head.to(tl.int64) * stride_blocks_h
    return Blocks + first // BLOCK_MASK_SIZE * width


@triton.jit
def listed(step, BlockList):
    """Where the tile at `step` of a walk begins: there, or in the block of the list that `step` has come to."""
    first = step
    if BlockList is not None:
        index = step // BLOCK_MASK_SIZE
        first = step + (tl.load(BlockList + 1 + index) - index) * BLOCK_MASK_SIZE
    return first


@triton.jit
def modify(products, rows, keys, rules, SPEC: tl.constexpr):
    """q k^T to scores, and d scores / d (scale * q k^T) where it is not 1. Scores are in units of `score_unit`."""
    gain = 1.0
    if SPEC.SOFTCAP > 0:
        tanh = 1 - 2 / (tl.exp2(products * (2 * LOG2_E / SPEC.SOFTCAP * rules.scale)) + 1)
        if SPEC.SOFTCAP > 64:
            # That is up to 2.4 * 2^-24 off, however small tanh is, and the cap multiplies it: out was off by 0.06 at
            # 1e6. Below 0.2 the series is as exact as float32. Caps to 64 lose less than 16 bits do.
            x = products * (rules.scale / SPEC.SOFTCAP)
            square = x * x
            series = x - x * square * (1 / 3 - square * (2 / 15 - square * (17 / 315)))
            tanh = tl.where(square < 0.04, series, tanh)
        products = tanh * (SPEC.SOFTCAP * LOG2_E)
        gain = 1 - tanh * tanh
    elif SPEC.ALIBI:
        products = products * (rules.scale * LOG2_E)
    if SPEC.ALIBI:
        products -= rules.slope * LOG2_E * tl.abs(keys - rows - (rules.kv_len - rules.q_len))
    return products, gain


@triton.jit
def score_unit(rules, SPEC: tl.constexpr):
    """What turns scores into exponents of 2: left out of plain scores, where exp2 takes it in a multiply-add."""
    unit = rules.scale * LOG2_E
    if SPEC.SOFTCAP > 0 or SPEC.ALIBI:
        unit = 1.0
    return unit
