"""Masks of the Hopper backward, on (keys, queries) score tiles: the initial accumulator of S^T, -inf where masked.

A key is seen by an interval of rows. Its two ends are computed once for a work item, relative to the first row of
`last_block`, and compared with the rows of a tile in every masked step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_bounds import end_rows
from .hopper_work import HALF, KEYS

NEVER = gl.constexpr(1 << 24)  # more rows than a work item has


@gluon.jit
def first_visible_rows(WHICH: gl.constexpr, item, CAUSAL: gl.constexpr, scores_layout: gl.constexpr):
    """The first row that sees each key of a warpgroup; NEVER beyond kv_len."""
    keys = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, scores_layout))
    first = keys * 0
    if CAUSAL:
        first = keys + item.diagonal_row
    return gl.where(keys < item.keys_left, first, NEVER)


@gluon.jit
def end_visible_rows(WHICH: gl.constexpr, item, bounds, BLOCK_M: gl.constexpr, scores_layout: gl.constexpr):
    """One past the last row that sees each key of a warpgroup."""
    keys = item.key_block * KEYS + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, scores_layout))
    return end_rows(keys, item.batch, bounds) - item.last_block * BLOCK_M


@gluon.jit
def masked_bias(zeros, first_visible, rows_passed, CAUSAL: gl.constexpr):
    """zeros, with -inf where the causal mask or kv_len hides a key. rows_passed: from this block to `last_block`."""
    if CAUSAL:
        rows = gl.arange(0, zeros.shape[1], gl.SliceLayout(0, zeros.type.layout))[None, :]
        own = rows & 6  # subtracted, a thread's columns are constants and take no registers
        return gl.where(rows - own >= (first_visible + rows_passed)[:, None] - own, zeros, float("-inf"))
    return gl.where(first_visible[:, None] == 0, zeros, float("-inf"))


@gluon.jit
def mask_from_end(bias, end_visible, rows_passed):
    """bias, with -inf where a window or document of the key ends before the query."""
    rows = gl.arange(0, bias.shape[1], gl.SliceLayout(0, bias.type.layout))[None, :]
    own = rows & 6  # as in `masked_bias`: without it 464 B are spilled
    return gl.where(rows - own < (end_visible + rows_passed)[:, None] - own, bias, float("-inf"))
