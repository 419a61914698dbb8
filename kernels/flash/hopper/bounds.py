"""Sliding windows and packed documents in the Hopper kernels, under the causal mask.

Each query has a first visible key, and each key a last query that sees it. Both are non-decreasing, so the first and
the last row of a tile bound what the whole tile sees.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Bounds(NamedTuple):
    """The bounds, as runtime values."""

    # Begin and end (exclusive) of each token's document: int32 (batch, length), or None.
    DocumentStart: gl.tensor
    DocumentEnd: gl.tensor
    # A query's index minus that of its first key: the window's left side minus (kv_len - q_len). May be negative.
    left: gl.tensor
    length: gl.tensor  # queries; with documents, keys too


@gluon.jit
def first_keys(rows, batch, bounds):
    """The first visible key of a query, or of each of a vector of queries; arbitrary for rows beyond the last."""
    first = gl.maximum(rows - bounds.left, 0)
    if bounds.DocumentStart is not None:
        Starts = bounds.DocumentStart + batch.to(gl.int64) * bounds.length
        first = gl.maximum(first, gl.load(Starts + gl.minimum(rows, bounds.length - 1)))
    return first


@gluon.jit
def end_rows(keys, batch, bounds):
    """One past the last query that sees a key, or each of a vector of keys; with documents, 0 beyond the last key."""
    end = gl.minimum(keys + bounds.left + 1, bounds.length)
    if bounds.DocumentEnd is not None:
        Ends = bounds.DocumentEnd + batch.to(gl.int64) * bounds.length
        end = gl.minimum(end, gl.load(Ends + keys, mask=keys < bounds.length, other=0))
    return end
