"""Sliding windows and packed documents in the Hopper kernels, under the causal mask and with as many keys as queries.

A query sees no key before its first, and a key is seen by no query after its last. Neither decreases from one to the
next, so the first and the last row of a tile say what all of it sees; and every query sees its own key at least.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Bounds(NamedTuple):
    """What says so, at run time."""

    # First and last + 1 token of each token's document: int32 (batch, length), or None.
    DocumentStart: gl.tensor
    DocumentEnd: gl.tensor
    left: gl.tensor  # keys that a query sees before its own
    length: gl.tensor


@gluon.jit
def first_keys(rows, batch, bounds):
    """The first key that a query sees, or each of a vector of queries; of one beyond the last, any."""
    first = gl.maximum(rows - bounds.left, 0)
    if bounds.DocumentStart is not None:
        Starts = bounds.DocumentStart + batch.to(gl.int64) * bounds.length
        first = gl.maximum(first, gl.load(Starts + gl.minimum(rows, bounds.length - 1)))
    return first


@gluon.jit
def end_rows(keys, batch, bounds):
    """The last query that sees a key, or each of a vector of keys, and 1; of documents 0 for one beyond the last."""
    end = gl.minimum(keys + bounds.left + 1, bounds.length)
    if bounds.DocumentEnd is not None:
        Ends = bounds.DocumentEnd + batch.to(gl.int64) * bounds.length
        end = gl.minimum(end, gl.load(Ends + keys, mask=keys < bounds.length, other=0))
    return end
