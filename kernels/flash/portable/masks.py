"""Masks: which keys a tile of queries visits, which queries a tile of keys visits, and which visits need masking.

All three portable kernels call these functions, on tiles with queries along either axis: `rows` and `keys` are index
tensors that broadcast against the tile. A mask that is off is None or -1 at compile time and generates no code.

Except for block masks, a query sees an interval of keys, and a key is seen by an interval of queries. Both ends are
non-decreasing in the query, so the first and last row of a tile bound what the whole tile sees. A block mask comes as
lists: for each block of 128 queries (or keys), how many blocks of 128 keys (or queries) to visit, and which.
"""

import triton
import triton.language as tl

BLOCK_MASK_SIZE = tl.constexpr(128)


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
    """The interval [first, last) of the queries that see a key, or each of a tensor of keys; ignores key padding.
    rows: how many queries there are."""
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
    """Split what a tile sees into ranges of BLOCKs: [begin, full) masked, [full, tail) unmasked, [tail, end) masked.

    Of `length` positions, the tile's first row sees [first_0, last_0), its last row [first_1, last_1)."""
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
    """The first index of the tile at loop position `step`: `step`, or with a list, that far along its blocks."""
    first = step
    if BlockList is not None:
        index = step // BLOCK_MASK_SIZE
        first = step + (tl.load(BlockList + 1 + index) - index) * BLOCK_MASK_SIZE
    return first
