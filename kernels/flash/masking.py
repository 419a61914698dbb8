"""Which keys a query sees. Every mask here is an interval of keys for a query, and of queries for a key.

Positions are aligned bottom-right: query `row` stands at key position row + kv_len - q_len. Both ends of the
interval never decrease from one query to the next, so its first and last row say what a whole tile sees.
"""

import triton
import triton.language as tl


@triton.jit
def visible_keys(row, q_len, kv_len, CAUSAL: tl.constexpr):
    """[first, last) of the keys that a query, or each of a vector of queries, sees; empty if last <= first."""
    first = row * 0
    last = first + kv_len
    if CAUSAL:
        last = row + (kv_len - q_len) + 1
    return first, last


@triton.jit
def visible_rows(key, q_len, kv_len, CAUSAL: tl.constexpr):
    """[first, last) of the queries that see a key, or each of a vector of keys."""
    first = key * 0
    last = first + q_len
    if CAUSAL:
        first = key - (kv_len - q_len)
    return first, last


@triton.jit
def tiles_to_visit(first_0, last_0, first_1, last_1, length, BLOCK: tl.constexpr):
    """Split what a tile sees into parts of whole BLOCKs: [begin, full) masked, [full, tail) not, [tail, end) masked.

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
