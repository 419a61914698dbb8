"""Scaling and masking of scores, shared by `two_pass` and `flash1`."""

import triton
import triton.language as tl

from ..flash.portable.score_mods import LOG2_E


@triton.jit
def last_key(row, q_len, kv_len, SPEC: tl.constexpr):
    """One past the last key that a query sees, or each of a tensor of queries."""
    last = row * 0 + kv_len
    if SPEC.CAUSAL:
        last = tl.minimum(kv_len - q_len + row + 1, kv_len)
    return last


@triton.jit
def seen(products, rows, keys, q_len, kv_len, scale, SPEC: tl.constexpr):
    """Scores in base 2 from q k^T or its transpose, against which rows and keys broadcast; -inf where a query does
    not see the key."""
    scores = products * (scale * LOG2_E)
    return tl.where(keys < last_key(rows, q_len, kv_len, SPEC), scores, float("-inf"))
