"""How the Hopper forward's output leaves: by TMA from the slot of its Q, or stored by its threads (spec.py).

With TMA, the slot is released a tile later, when the store has read it, so that no warp waits for the store.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .columns import columns_of, rows_layout
from .forward_schedule import ROWS, q_slot
from .pipeline import arrive, opaque
from .primitives import tma_store
from .softmax import add_sink

LN_2 = gl.constexpr(0.6931471805599453)


class Output(NamedTuple):
    """Destinations: Out and OutLow with their strides, Lse contiguous; and Sinks (heads,). Pointers, but Out is a
    TMA descriptor if SPEC.OUT_BY_TMA. OutLow and Sinks may be None."""

    Out: gl.tensor
    OutLow: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_m: gl.tensor
    Lse: gl.tensor
    Sinks: gl.tensor


@gluon.constexpr_function
def recomputes_tile(spec):
    """Whether a consumer computes its tile's place again before it stores out: else 4 to 28 B are spilled."""
    return bool(spec.OUT_BY_TMA and spec.BOUNDED and spec.CAUSAL and spec.HEAD_DIM > 64)


@gluon.jit
def store_output(tile, accs, row_max, row_sum, output, first_row, head, batch, sizes, SPEC: gl.constexpr):
    """Divide by the softmax sums, store out and lse, and with OutLow what rounding took from out. A fully masked row
    has sum 0: out 0, lse -inf. tile: this consumer's Q, from where TMA stores out if SPEC.OUT_BY_TMA."""
    row_layout: gl.constexpr = row_max.type.layout
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
    share = 1.0
    if output.Sinks is not None:
        row_max, row_sum, share = add_sink(row_max, row_sum, output.Sinks + head)
    fully_masked = row_sum == 0
    row_sum = gl.where(fully_masked, 1.0, row_sum)
    lse = gl.where(fully_masked, float("-inf"), (row_max + gl.log2(row_sum)) * LN_2)
    rows = first_row + gl.arange(0, ROWS, layout=row_layout)
    heads, q_len = sizes.heads, sizes.q_len
    WINDOW: gl.constexpr = SPEC.BOUNDED and sizes.bounds.right is not None
    WIDE: gl.constexpr = SPEC.HEAD_DIM > 128 and SPEC.BY_QUERY and (sizes.KvLengths is not None or WINDOW)
    # Opaque: else what the address needs is kept from before all tiles, and up to 36 B are spilled.
    if WIDE or recomputes_tile(SPEC):
        heads, q_len = opaque(heads), opaque(q_len)
    Lse = output.Lse + (batch.to(gl.int64) * heads + head) * q_len
    gl.store(Lse + rows, lse, mask=rows < sizes.q_len)
    share = share / row_sum
    if SPEC.DROP is not None:
        share *= SPEC.DROP.SCALE
    for part in gl.static_range(len(accs)):
        store_columns(
            tile, accs[part], share, output, first_row, head, batch, sizes, part * accs[0].shape[1], SPEC
        )
    if SPEC.OUT_BY_TMA:
        fence_async_shared()
        gl.barrier()
        tma_store(output.Out, [batch, head, first_row, 0], tile)


@gluon.jit
def store_columns(
    tile, acc, share, output, first_row, head, batch, sizes, FIRST: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """Store acc times the rows' share as columns of out from FIRST on; if SPEC.OUT_BY_TMA, into `tile`."""
    out = acc * gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout))[:, None]
    rounded = out.to(tile.dtype)
    if SPEC.OUT_BY_TMA:
        columns_of(tile.reshape([ROWS, tile.shape[3]]), FIRST, acc.shape[1]).store(rounded)
    else:
        store_rows(output.Out, rounded, output, first_row, head, batch, sizes, FIRST, SPEC)
    if output.OutLow is not None:
        low = (out - rounded.to(gl.float32)).to(rounded.dtype)
        if SPEC.DROP is not None:
            first_row = opaque(first_row)  # or addresses are shared, and 12 B spilled at width 128
        store_rows(output.OutLow, low, output, first_row, head, batch, sizes, FIRST, SPEC)


@gluon.jit
def store_rows(
    Out, tile, output, first_row, head, batch, sizes, FIRST: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """Store columns of a consumer's rows, from FIRST on, to Out, which has the strides of `output`."""
    WIDTH: gl.constexpr = tile.shape[1]
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    layout: gl.constexpr = rows_layout(WIDTH) if SPEC.HEAD_DIM > 128 else narrow
    tile = gl.convert_layout(tile, layout)
    if SPEC.HEAD_DIM > 128 and SPEC.BY_QUERY and sizes.KvLengths is not None:
        # Opaque; else the strides' upper halves are kept from before all tiles, and 24 B spilled at width 256.
        of_head = batch.to(gl.int64) * opaque(output.stride_b) + head.to(gl.int64) * opaque(output.stride_h)
        Out += (of_head + first_row.to(gl.int64) * opaque(output.stride_m)) // 8 * 8
    else:
        Out = Out + batch.to(gl.int64) * output.stride_b + head.to(gl.int64) * output.stride_h
        Out += first_row.to(gl.int64) * output.stride_m
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
    mask = first_row + rows < sizes.q_len
    if FIRST > 0:
        dims += FIRST
    if FIRST + WIDTH > SPEC.HEAD_DIM:
        mask = mask & (dims < SPEC.HEAD_DIM)
    TWICE: gl.constexpr = SPEC.SOFTCAP > 0 and output.OutLow is not None
    if SPEC.DROP is not None or sizes.Slopes is not None or TWICE:
        # Adds 0, but the compilers cannot tell; else they compute addresses before all tiles, and spill them.
        rows += opaque(first_row) - first_row
    gl.store(Out + rows * output.stride_m + dims, tile, mask=mask)


@gluon.jit
def release_stored(ordinal, rings, WHICH: gl.constexpr, SPEC: gl.constexpr):
    """If SPEC.OUT_BY_TMA: once the previous tile's out has left the slot of its Q, release the slot."""
    tma.store_wait(0)
    gl.barrier()  # above width 64 two warps have stored a half each, and one thread arrives
    before = q_slot(gl.maximum(ordinal - 1, 0), WHICH, SPEC)
    arrive(rings.q.empty.index(before), ordinal > 0)
