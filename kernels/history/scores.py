"""What both attentions do between q k^T and the softmax."""

import triton
import triton.language as tl

from ..flash.rules import LOG2_E

LOWEST = tl.constexpr(
    -3.0e38
)  # where a running maximum starts: below every score, and -inf - LOWEST is no NaN


@triton.jit
def last_key(row, q_len, kv_len, SPEC: tl.constexpr):
    """Behind the last key that a query sees, or each of a tensor of queries."""
    last = row * 0 + kv_len
    if SPEC.CAUSAL:
        last = tl.minimum(kv_len - q_len + row + 1, kv_len)
    return last


@triton.jit
def scores_of(q, k, first_row, first_key, q_len, kv_len, scale, SPEC: tl.constexpr):
    """q k^T * scale in base 2, -inf for the keys that a query does not see."""
    rows = first_row + tl.arange(0, SPEC.BLOCK_M)[:, None]
    keys = first_key + tl.arange(0, SPEC.BLOCK_N)[None, :]
    scores = tl.dot(q, k.T, input_precision="ieee") * (scale * LOG2_E)
    return tl.where(keys < last_key(rows, q_len, kv_len, SPEC), scores, float("-inf"))
