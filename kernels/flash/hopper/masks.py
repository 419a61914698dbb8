"""Masks of score tiles in registers: -inf where a query may not see a key.

The forward masks scores, (queries, keys). The backward masks the initial accumulator of S^T, (keys, queries): a key
is seen by an interval of rows, whose two ends are computed once for a work item, relative to the first row of
`last_block`, and compared with the rows of a tile in every masked step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_schedule import HALF, KEYS
from .bounds import end_rows, start_rows
from .forward_schedule import ROWS
from .pipeline import opaque

NEVER = gl.constexpr(1 << 24)  # more rows than a work item has


@gluon.jit
def mask_scores(scores, first_row, first_key, sizes, SPEC: gl.constexpr):
    """Apply the causal mask and the end of the keys: -inf where a row may not see a key."""
    layout: gl.constexpr = scores.type.layout
    end = sizes.kv_len - first_key
    keys = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    # Three consumers, and those with 256 columns of out, have few registers: subtracting the thread-dependent part of
    # the column (`own`) from both sides leaves compile-time constants. With more registers that is slower (LOG.md,
    # "What the Hopper kernels spilled"). ALiBi, and a window in the same step, subtract it anyway.
    FEW: gl.constexpr = SPEC.CONSUMERS == 3 or SPEC.BLOCK_N == 64
    BESIDE: gl.constexpr = sizes.Slopes is not None or (SPEC.BOUNDED and not SPEC.ALIGNED)
    own = keys & (6 if FEW or BESIDE else 0)
    if SPEC.CAUSAL:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
        # Opaque; otherwise ptxas folds the launch-invariant part into the rows, and spills the result.
        last = opaque(first_row + end - sizes.q_len)
        return gl.where(keys - own <= rows + last - own, scores, float("-inf"))
    return gl.where(keys - own < end - own, scores, float("-inf"))


@gluon.jit
def mask_before(scores, first_seen, first_key):
    """Apply a window's or a document's start: -inf before first_seen, the first visible key of each row."""
    layout: gl.constexpr = scores.type.layout
    # Opaque; otherwise ptxas precomputes this for a later block, and spills with head_dim 128.
    first = gl.convert_layout(first_seen, gl.SliceLayout(1, layout))[:, None] - opaque(first_key)
    keys = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    # As in `mask_scores`, but for two consumers too: a masked step takes 535 instructions instead of 574 to 639.
    own = keys & 6
    return gl.where(keys - own >= first - own, scores, float("-inf"))


@gluon.jit
def mask_after(scores, end_seen, first_key):
    """-inf from end_seen on, one past the last visible key of each row; as `mask_before`."""
    layout: gl.constexpr = scores.type.layout
    end = gl.convert_layout(end_seen, gl.SliceLayout(1, layout))[:, None] - opaque(first_key)
    keys = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    own = keys & 6
    return gl.where(keys - own < end - own, scores, float("-inf"))


@gluon.jit
def first_visible_rows(WHICH: gl.constexpr, item, CAUSAL: gl.constexpr, scores_layout: gl.constexpr):
    """The first row that sees each key of a warpgroup; NEVER beyond kv_len."""
    keys = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, scores_layout))
    first = keys * 0
    if CAUSAL:
        first = keys + item.diagonal_row
    return gl.where(keys < item.keys_left, first, NEVER)


@gluon.jit
def start_visible_rows(WHICH: gl.constexpr, item, bounds, BLOCK_M: gl.constexpr, scores_layout: gl.constexpr):
    """`first_visible_rows` with bounds by query."""
    keys = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, scores_layout))
    first = start_rows(item.key_block * KEYS + keys, item.batch, bounds) - item.last_block * BLOCK_M
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
