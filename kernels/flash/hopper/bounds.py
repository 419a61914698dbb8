"""Sliding windows and packed documents in the Hopper kernels, under the causal mask or with bounds by query.

Beside the causal mask there are two bounds: each query's first visible key, and the last query that sees each key. By
query (`masks.by_query`) there is no causal mask, and two more: each query's last visible key, and the first query
that sees each key. All are non-decreasing, so the first and the last row of a tile bound what the whole tile sees. By
query, those of a window without documents, over at least as many keys as queries, are computed from its sides; others
are read from memory, and may be any that are non-decreasing. A query may then see no key, and no query a key.

Computed bounds equal what `masks.by_query` and `masks.queries_of_keys` would write (test_hopper_orders.py), but for
keys that are padding. Those decide nothing that is kept: no block's steps (`padding.last_key_before`), and what such
keys get is masked or not stored. Without padding a query's first key is before its end, as no side is negative and no
query lies before the first key. With padding neither is beyond the keys in use; so both are 0 where there are none.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Bounds(NamedTuple):
    """The bounds, as runtime values."""

    # Begin and end (exclusive) of each token's document: int32 (batch, length), or None. By query: the first key that
    # a query sees, and (batch, keys) one past the last query that sees a key.
    DocumentStart: gl.tensor
    DocumentEnd: gl.tensor
    # A query's index minus that of its first key: the window's left side minus (kv_len - q_len). May be negative.
    left: gl.tensor
    length: gl.tensor  # queries; with documents, keys too, unless there are bounds by query
    # By query, or None: one past the last key that a query sees, (batch, length), and the first query that sees a
    # key, (batch, keys). The forward and dQ have the one, dK and dV the other.
    KeyEnd: gl.tensor
    RowStart: gl.tensor
    # In their place, or None: the index of a query's last visible key minus the query's.
    right: gl.tensor
    keys: gl.tensor  # None unless by query
    Lengths: gl.tensor  # with `right` and key padding, kv_lengths; else None


@gluon.jit
def keys_in_use(batch, bounds):
    """Keys before a batch's padding; may be more than there are."""
    return gl.maximum(gl.load(bounds.Lengths + batch), 0)


@gluon.jit
def first_keys(rows, batch, bounds):
    """The first visible key of a query, or of each of a vector of queries; arbitrary for rows beyond the last."""
    first = gl.maximum(rows - bounds.left, 0)
    if bounds.DocumentStart is not None:
        Starts = bounds.DocumentStart + batch.to(gl.int64) * bounds.length
        first = gl.maximum(first, gl.load(Starts + gl.minimum(rows, bounds.length - 1)))
    if bounds.Lengths is not None:
        first = gl.minimum(first, keys_in_use(batch, bounds))
    return first


@gluon.jit
def end_rows(keys, batch, bounds):
    """One past the last query that sees a key, or each of a vector of keys; with documents, 0 beyond the last key."""
    if bounds.RowStart is not None:
        Ends = bounds.DocumentEnd + batch.to(gl.int64) * bounds.keys
        return gl.load(Ends + keys, mask=keys < bounds.keys, other=0)
    end = gl.minimum(keys + bounds.left + 1, bounds.length)
    if bounds.DocumentEnd is not None:
        Ends = bounds.DocumentEnd + batch.to(gl.int64) * bounds.length
        end = gl.minimum(end, gl.load(Ends + keys, mask=keys < bounds.length, other=0))
    if bounds.Lengths is not None:
        end = gl.maximum(end, 0)  # no query sees a key that the window hides
    return end


@gluon.jit
def end_keys(rows, batch, bounds):
    """By query: one past the last key that a query sees, or each of a vector of queries; as `first_keys`."""
    if bounds.right is not None:
        end = gl.minimum(rows + bounds.right + 1, bounds.keys)
        if bounds.Lengths is not None:
            end = gl.minimum(end, keys_in_use(batch, bounds))
    else:
        Ends = bounds.KeyEnd + batch.to(gl.int64) * bounds.length
        end = gl.load(Ends + gl.minimum(rows, bounds.length - 1))
    return end


@gluon.jit
def start_rows(keys, batch, bounds):
    """By query: the first query that sees a key, or each of a vector of keys; arbitrary beyond the last key."""
    if bounds.right is not None:
        start = gl.maximum(keys - bounds.right, 0)
    else:
        Starts = bounds.RowStart + batch.to(gl.int64) * bounds.keys
        start = gl.load(Starts + gl.minimum(keys, bounds.keys - 1))
    return start
