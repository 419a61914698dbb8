"""The backward kernel for Hopper (sm_90a), in Gluon: five products in one kernel, and still bitwise repeatable.

A persistent program takes one work item after another (backward_schedule.py): KEYS keys of a head, split evenly
between two consumer warpgroups, against all blocks of queries that see them. One warp loads tiles of Q and dO into
rings of shared memory by TMA, another stages the rows' log-sum-exp and delta beside them (backward_loads.py). The
warpgroups issue their wgmmas asynchronously, in FlashAttention-3's schedule (Shah et al. 2024), on the transposes
S^T = K Q^T and dP^T = V dO^T, as portable/backward.py does. dQ is a sum over keys, and so over work items: two more
warps accumulate it in global memory (dq.py).

dQ of a tile needs dS of both warpgroups, which would have to synchronise in every step. In long loops (DQ_DELAY) dQ's
product is therefore delayed by one step: it reads the previous step's dS, which the other warpgroup stored long ago.

Covers plain attention and key padding (padding.py), with or without dropout (dropout.py), windows and documents under
the causal mask or by query (bounds.py), block masks (block_masks.py), softcap and ALiBi (score_mods.py).
Everything else is left to the portable kernels (portable/). With grouped heads, every query head has its own work
items, and its own dK and dV.
"""

import functools
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from .backward_loads import Zeros, load_row_statistics, load_tiles
from .backward_schedule import HALF, KEYS, STAGES, BackwardSizes, decode_work_item, passed
from .block_masks import LISTS, Blocks
from .bounds import Bounds
from .columns import (
    multiplied,
    multiply_columns,
    multiply_into,
    no_sums,
    parts_of,
    scale_sums,
    store_sums,
    wait_for_sums,
    wait_keeping,
)
from .descriptors import tile_width
from .dq import SUM_BLOCK, finish_dq, multiply_dq, reduce_dq, stage_dq
from .dropout import Draw, drop_of, negate, pack_positive
from .masks import end_visible_rows, first_visible_rows, mask_from_end, masked_bias, start_visible_rows
from .padding import clear_padding, padded_bias
from .pipeline import LOG2_E, Ring, arrive, make_barriers, make_ring, opaque, sync_consumers
from .primitives import reinterpret, tma_store
from .scheduler import CLAIM_STAGES, make_claims, read_claim
from .score_mods import probabilities, slope_of, with_distances
from .softmax import unpack

DELAY_FROM = {64: 8, 128: 16}  # steps of a work item, on average, from which on the delay is faster (LOG.md)


def choose_dq_delay(
    width: int, causal: bool, row_blocks: int, padded: bool = False, capped: bool = False
) -> int:
    """DQ_DELAY: 1 if dQ's product is delayed by a step, so that warpgroups need not wait for each other; else 0.

    The delay costs each work item an extra product (the first step's, which the second repeats), and the last product
    runs after the loop with nothing to overlap. width: `tile_width`. padded, capped: with key padding or softcap,
    which spill 4 to 8 B in one of the forms.
    """
    if width == 64 and (padded if causal else capped):
        return 0
    return int(row_blocks // (2 if causal else 1) >= DELAY_FROM[width])


def choose_dq_delay_of_few(columns: int, full_window: bool) -> int:
    """DQ_DELAY where work items have few steps: with a window, documents or a block mask. columns: `choose_columns`.

    With the delay a full window takes 0.95 to 0.97 of the time at 96 columns, 1.00 at 128, and 0.98 to 1.01 at 64,
    where it would spill 4 B; causal windows and documents take 1.00 to 1.04 (kernels/log/hopper_masks.md).
    """
    return int(full_window and columns == 96)


@functools.cache  # 12 us
def choose_columns(head_dim: int, dropout_p: float) -> int:
    """How many of a tile's columns are multiplied. With dropout, 32 of 64 would spill 8 B without a mask."""
    return tile_width(head_dim) if drop_of(dropout_p) and head_dim <= 64 else multiplied(head_dim)


class Shared(NamedTuple):
    """A program's tiles in shared memory, and their barriers. Rows' lse and delta are released with Q's tiles."""

    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    queries: Ring
    d_outs: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    ds: Ring  # barriers only if DQ_DELAY: a pair of arrays, one for each warpgroup
    dqs: Ring
    claims: Ring


@gluon.jit
def make_shared(q_desc, k_desc, v_desc, do_desc, dq_sum_desc, DQ_DELAY: gl.constexpr):
    """Allocate the shared memory and initialise its barriers.

    Never create a barrier that no warp uses: Triton reuses its memory for other data (compile_report checks this).
    """
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    WIDTH: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [1] + k_desc.block_type.shape, k_desc.layout)  # noqa: RUF005
    v_tiles = gl.allocate_shared_memory(dtype, [1] + v_desc.block_type.shape, v_desc.layout)  # noqa: RUF005
    queries = make_ring(q_desc, STAGES, 2)
    d_out_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, WIDTH], do_desc.layout)
    d_outs = Ring(d_out_tiles, make_barriers(STAGES, 1), queries.empty)  # released together with Q
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], dtype)
    ds_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, BLOCK_M], ds_layout)
    dq_shape: gl.constexpr = [2 * STAGES, SUM_BLOCK[0], SUM_BLOCK[1]]  # two halves of each tile
    dq_tiles = gl.allocate_shared_memory(gl.float32, dq_shape, dq_sum_desc.layout)
    dqs = Ring(dq_tiles, make_barriers(2 * STAGES, 1), make_barriers(STAGES, 1))
    if DQ_DELAY:
        # One array for each warpgroup: in a common one, Triton puts a barrier between arrival and wait (LOG.md).
        ds_full = (make_barriers(STAGES, 1), make_barriers(STAGES, 1))
        ds_empty = (make_barriers(STAGES, 1), make_barriers(STAGES, 1))
        ds = Ring(ds_tiles, ds_full, ds_empty)
    else:
        ds = Ring(ds_tiles, None, None)
    kv_full = make_barriers(1, 1).index(0)
    kv_empty = make_barriers(1, 2).index(0)
    rows_full = make_barriers(STAGES, 1)
    claims = make_claims(5)  # read by two consumers, load_row_statistics and two reduce_dq warps
    return Shared(
        k_tiles, v_tiles, kv_full, kv_empty, queries, d_outs, lse, delta, rows_full, ds, dqs, claims
    )


@gluon.jit
def consume(
    dk_desc, dv_desc, shared, sizes, scale,
    WHICH: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, DQ_DELAY: gl.constexpr, DROP: gl.constexpr,
    SOFTCAP: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: dK and dV of its half of the keys, half of each dQ tile, DQ_DELAY steps behind."""
    BLOCK_M: gl.constexpr = shared.queries.tiles.shape[3]
    WIDTH: gl.constexpr = shared.queries.tiles.shape[4]
    BY_QUERY: gl.constexpr = sizes.bounds is not None and sizes.bounds.keys is not None
    # Key padding begins in at most one block of keys of a head. The others have a loop of their own, in which no
    # accumulator begins as a mask. `ordinal` is computed: carried through two loops it would cost a register. In
    # short loops, with dropout, and at width 128 the code of two loops cost more than it saved (LOG.md).
    PADDED: gl.constexpr = sizes.KvLengths is not None and not (CAUSAL or sizes.bounds or sizes.blocks)
    SPLIT: gl.constexpr = PADDED and WIDTH == 64 and DQ_DELAY and DROP is None
    ordinal = 0
    tiles_before = 0  # query tiles before this work item
    index = read_claim(shared.claims, ordinal)
    while index >= 0:
        if SPLIT:
            ordinal = tiles_before // sizes.row_blocks
        item = decode_work_item(index, sizes, BLOCK_M, CAUSAL)
        dk = no_sums(HALF, COLUMNS)
        dv = no_sums(HALF, COLUMNS)
        mbarrier.wait(shared.kv_full, ordinal & 1)
        # Wait until TMA has read the previous item's dK and dV from the dS tile where `store_dk_dv` staged them. The
        # other warpgroup learns of it through ds.empty, or in `sync_consumers`: the first step writes the other dS
        # tile.
        if WIDTH == 64 and WHICH == 0:
            tma.store_wait(0)
            gl.barrier()
        # Release the previous item's last dS tile, which finish_dq read and, at width 64, `store_dk_dv` reused.
        if DQ_DELAY and ordinal > 0:
            arrive(shared.ds.empty[WHICH].index((tiles_before - 1) % STAGES))
        if sizes.KvLengths is not None:
            clear_padding(shared.k_tiles.index(0).reshape([KEYS, WIDTH]), item.keys_left)
            own = shared.v_tiles.index(0).reshape([KEYS, WIDTH]).slice(WHICH * HALF, HALF)
            clear_padding(own, item.keys_left - WHICH * HALF)
        # opaque: kept live through the loops, what is compared here would take a register
        if SPLIT and opaque(item.keys_left) < KEYS:
            dk, dv = process_query_tiles(
                dk, dv, item, tiles_before, shared, sizes, scale,
                WHICH, CAUSAL, MASKED, DQ_DELAY, DROP, SOFTCAP, COLUMNS, True,
            )  # fmt: skip
        else:
            dk, dv = process_query_tiles(
                dk, dv, item, tiles_before, shared, sizes, scale,
                WHICH, CAUSAL, MASKED and not SPLIT, DQ_DELAY, DROP, SOFTCAP, COLUMNS, False,
            )  # fmt: skip
        tiles_before += item.steps
        if DQ_DELAY:
            finish_dq(shared, tiles_before - 1, WHICH, COLUMNS)
        if WIDTH == 64:
            arrive(shared.kv_empty)
        # Recomputed: kept live through the loop it would take registers.
        index = opaque(index)
        if SPLIT:
            ordinal = tiles_before // sizes.row_blocks - 1
        # Read again too, to free the register that these lack.
        if SOFTCAP > 0 or sizes.Slopes is not None or BY_QUERY:
            index = read_claim(shared.claims, ordinal)
        item = decode_work_item(index, sizes, BLOCK_M, CAUSAL)
        if DROP is not None:
            dk = scale_sums(dk, DROP.SCALE)
            dv = scale_sums(dv, DROP.SCALE)
        store_dk_dv(
            dk_desc, dv_desc, scale_sums(dk, scale), dv, shared, item, (tiles_before - 1) % STAGES, WHICH
        )
        ordinal += 1
        index = read_claim(shared.claims, ordinal)
        arrive(shared.claims.empty.index((ordinal - 1) % CLAIM_STAGES))
    if WHICH == 0:
        tma.store_wait(0)


@gluon.jit
def process_query_tiles(
    dk, dv, item, tiles_before, shared, sizes, scale,
    WHICH: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, DQ_DELAY: gl.constexpr, DROP: gl.constexpr,
    SOFTCAP: gl.constexpr, COLUMNS: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """The steps of a work item: add the contributions of all its query tiles to dK and dV. CUT: key padding, without
    another mask, hides some of the keys from every step."""
    BLOCK_M: gl.constexpr = shared.queries.tiles.shape[3]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    zeros = gl.zeros([HALF, BLOCK_M], gl.float32, scores_layout)
    BY_QUERY: gl.constexpr = sizes.bounds is not None and sizes.bounds.keys is not None
    if BY_QUERY:
        first_visible = start_visible_rows(WHICH, item, sizes.bounds, BLOCK_M, scores_layout)
    elif MASKED and not CUT:
        first_visible = first_visible_rows(WHICH, item, CAUSAL, scores_layout)
    if sizes.bounds is not None:
        end_visible = end_visible_rows(WHICH, item, sizes.bounds, BLOCK_M, scores_layout)
    slope = slope_of(item.head, sizes)
    for step in range(item.steps):
        # The mask is the initial accumulator of S: no branch may come between wgmmas in flight.
        bias = zeros
        down = passed(item, step)
        if CUT:  # computed in each step (step >> 30 is 0): kept, it would take registers and spill 4 to 12 B
            bias = padded_bias(zeros, WHICH * HALF, opaque(item.keys_left + (step >> 30)))
        elif MASKED and (down >= item.masked_from or down < item.masked_until):
            bias = masked_bias(zeros, first_visible, down * BLOCK_M, CAUSAL or BY_QUERY)
            if sizes.bounds is not None:
                bias = mask_from_end(bias, end_visible, down * BLOCK_M)
        rows_of_keys: gl.constexpr = None
        if slope is not None:
            rows_of_keys = first_visible_rows(WHICH, item, True, scores_layout) + down * BLOCK_M
        draw: gl.constexpr = None
        if DROP is not None:
            row, key = (item.last_block - down) * BLOCK_M, item.key_block * KEYS + WHICH * HALF
            draw = Draw(gl.load(sizes.Seed), item.batch, item.head, row, key)
        dk, dv = process_query_tile(
            dk, dv, bias, draw, slope, rows_of_keys, step, tiles_before, shared, sizes, scale,
            WHICH, CAUSAL, MASKED, DQ_DELAY, DROP, SOFTCAP, COLUMNS,
        )  # fmt: skip
    return dk, dv


@gluon.jit
def process_query_tile(
    dk, dv, bias, draw, slope, rows_of_keys, step, tiles_before, shared, sizes, scale,
    WHICH: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, DQ_DELAY: gl.constexpr, DROP: gl.constexpr,
    SOFTCAP: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """One step: add a query tile's contributions to dK and dV, and compute half of a dQ tile.

    bias: initial accumulator of S^T, -inf at masked elements; unused unless MASKED. draw: dropout's, or None. slope,
    rows_of_keys: ALiBi's (`with_distances`), or None.
    """
    BLOCK_M: gl.constexpr = shared.queries.tiles.shape[3]
    WIDTH: gl.constexpr = shared.queries.tiles.shape[4]
    dtype: gl.constexpr = shared.k_tiles.dtype
    scores_layout: gl.constexpr = bias.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    PARTS: gl.constexpr = parts_of(COLUMNS)
    tile = tiles_before + step
    stage = tile % STAGES
    phase = tile // STAGES & 1
    # Always 0, but the compilers cannot tell. Otherwise they hoist the wgmma descriptors of the loop-invariant
    # operands out of the loop, which are more than there are uniform registers, and spill them. At width 64
    # without the delay only dQ's product needs it (LOG.md).
    MODIFIED: gl.constexpr = SOFTCAP > 0 or slope is not None
    opaque_zero = tile >> 30 if MODIFIED else (step + sizes.q_len) >> 31  # q_len takes a register
    kv_index = opaque_zero if WIDTH > 64 or DQ_DELAY else 0
    k = shared.k_tiles.index(kv_index).reshape([KEYS, WIDTH]).slice(WHICH * HALF, HALF)
    v = shared.v_tiles.index(kv_index).reshape([KEYS, WIDTH]).slice(WHICH * HALF, HALF)
    q = shared.queries.tiles.index(stage).reshape([BLOCK_M, WIDTH])
    d_out = shared.d_outs.tiles.index(stage).reshape([BLOCK_M, WIDTH])
    zeros = gl.zeros([HALF, BLOCK_M], gl.float32, scores_layout)
    mbarrier.wait(shared.queries.full.index(stage), phase)
    s = multiply_columns(k, q, bias, MASKED, COLUMNS)
    mbarrier.wait(shared.d_outs.full.index(stage), phase)
    # dP runs under the exponentials; with score modifiers at width 64, after dV, or up to 44 B are spilled.
    EARLY: gl.constexpr = DROP is None and not (MODIFIED and WIDTH == 64)
    if EARLY:
        dp = multiply_columns(v, d_out, zeros, False, COLUMNS)
    mbarrier.wait(shared.rows_full.index(stage), phase)
    s = warpgroup_mma_wait(PARTS if EARLY else 0, [s])
    lse = shared.lse.index(stage).load(gl.SliceLayout(0, scores_layout))
    lse = with_distances(lse, slope, rows_of_keys, CAUSAL, scores_layout)
    p, of_ds = probabilities(s, lse, scale * LOG2_E, SOFTCAP)
    if DROP is None:
        rounded_p = gl.convert_layout(p.to(dtype), operand)
        # Issued before the wait for dP; otherwise ptxas moves that wait ahead of the exponentials.
        dv = multiply_into(rounded_p, d_out, dv, COLUMNS)
        if EARLY:
            dp = warpgroup_mma_wait(PARTS, [dp])
        else:
            dp = multiply_columns(v, d_out, zeros, False, COLUMNS)
            dv, _ = wait_keeping(dv, (rounded_p,), PARTS)
            dp = warpgroup_mma_wait(0, [dp])
        delta = shared.delta.index(stage).load(gl.SliceLayout(0, scores_layout))
        ds = (of_ds * (dp - delta[None, :])).to(dtype)
    else:
        # The mask is drawn before dP exists, and dP computed after dV; otherwise up to 180 B are spilled.
        p = negate(p, draw, DROP)
        rounded_p = unpack(pack_positive(p, dtype), dtype, dv[0].type.layout)
        dv = wait_for_sums(multiply_into(rounded_p, d_out, dv, COLUMNS))
        dp = multiply_columns(v, d_out, zeros, False, COLUMNS)
        dp = warpgroup_mma_wait(0, [dp])
        delta = shared.delta.index(stage).load(gl.SliceLayout(0, scores_layout))
        ds = (gl.maximum(p, 0.0) * dp - gl.abs(p) * delta[None, :]).to(dtype)
    if DQ_DELAY:
        mbarrier.wait(shared.ds.empty[1 - WHICH].index(stage), phase ^ 1)
    shared.ds.tiles.index(stage).slice(WHICH * HALF, HALF).store(ds)
    fence_async_shared()
    # If DQ_DELAY, the first step multiplies its own dS, as the second will again, and discards the result: this way
    # no wait is conditional on the step.
    dq_tile = tile
    ready = True
    if DQ_DELAY:
        ready = step > 0
        dq_tile = tile - ready.to(gl.int32)
    dq_stage = dq_tile % STAGES
    dq_phase = dq_tile // STAGES & 1
    if DQ_DELAY:
        gl.barrier()
        arrive(shared.ds.full[WHICH].index(stage))
        mbarrier.wait(shared.ds.full[1 - WHICH].index(dq_stage), dq_phase)
    else:
        sync_consumers()
    keys = shared.k_tiles.index(opaque_zero).reshape([KEYS, WIDTH])
    dq = multiply_dq(shared.ds.tiles.index(dq_stage), keys, WHICH, COLUMNS)
    rounded_ds = gl.convert_layout(ds, operand)
    dk = multiply_into(rounded_ds, q, dk, COLUMNS)
    # The register A operands stay live until they have been read: ptxas before 13.3 reuses their registers at once.
    if EARLY:
        dv, kept = wait_keeping(dv, (dq, rounded_p), PARTS)
        dq = kept[0]
    else:
        dq = warpgroup_mma_wait(PARTS, [dq])
    mbarrier.wait(shared.dqs.empty.index(dq_stage), dq_phase ^ 1)
    stage_dq(dq, shared.dqs, 2 * dq_stage + WHICH, ready)
    if DQ_DELAY:
        arrive(shared.ds.empty[WHICH].index(dq_stage), ready)
    dk, _ = wait_keeping(dk, (rounded_ds,), 0)
    arrive(shared.queries.empty.index(stage))
    return dk, dv


@gluon.jit
def store_dk_dv(dk_desc, dv_desc, dk, dv, shared, item, stage, WHICH: gl.constexpr):
    """Start the TMA stores of dK and dV. At width 64 they are staged in the last dS tile, so that the next item's
    K and V can be loaded meanwhile; at 128 they do not fit there and are staged in K's and V's own tiles."""
    WIDTH: gl.constexpr = shared.k_tiles.shape[4]
    dtype: gl.constexpr = shared.k_tiles.dtype
    sync_consumers()  # both warpgroups are done with dS, K and V
    if WIDTH == 64:
        both = reinterpret(shared.ds.tiles.index(stage), dtype, [2, 1, 1, KEYS, WIDTH], dk_desc.layout)
        dk_tile = both.index(0)
        dv_tile = both.index(1)
    else:
        dk_tile = shared.k_tiles.index(0)
        dv_tile = shared.v_tiles.index(0)
    store_sums(dk_tile.reshape([KEYS, WIDTH]).slice(WHICH * HALF, HALF), dk)
    store_sums(dv_tile.reshape([KEYS, WIDTH]).slice(WHICH * HALF, HALF), dv)
    fence_async_shared()
    sync_consumers()
    if WHICH == 0:
        coordinates = [item.batch, item.head, item.key_block * KEYS, 0]
        tma_store(dk_desc, coordinates, dk_tile)
        tma_store(dv_desc, coordinates, dv_tile)
        if WIDTH > 64:
            tma.store_wait(0)
    if WIDTH > 64:
        gl.barrier()
        arrive(shared.kv_empty)


@gluon.jit(do_not_specialize=[*BackwardSizes._fields, "left", "right", *LISTS])
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, dq_sum_desc, Lse, Delta, Turns, DocumentStart, DocumentEnd,
    RowStart, QueryBlocks, Seed, KvLengths, Slopes, ZeroK, ZeroV,
    heads, flat_heads, heads_per_group, items_per_group, q_len, kv_len, offset, row_blocks, key_blocks, tail_head,
    left, right, stride_lb, stride_lh, width, share, unseen, stride_zb, stride_zh, stride_zn, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, DQ_DELAY: gl.constexpr, BOUNDED: gl.constexpr,
    LISTED: gl.constexpr, DROP: gl.constexpr, SOFTCAP: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """dK, dV and the float32 sum dQ / scale. Grid: (programs,), one per SM but no more than work items.

    dK and dV have every query head; K and V have one head for each GROUP of them. The sum has two SUM_BLOCKs for each
    block of queries, in the element order of `to_thread_order`; not written are blocks that see no key, and columns
    that are not multiplied. Lse, Delta: float32 (batch, heads, q_len), contiguous. Turns: int32, one for each block
    of queries, then the work item counter, as `delta_kernel` initialises them. DocumentStart, DocumentEnd, left: if
    BOUNDED (bounds.py). RowStart or right: if BOUNDED and not CAUSAL. QueryBlocks, stride_lb, stride_lh, width: lists
    of blocks of queries, if LISTED (block_masks.py). Seed: int64, if DROP. KvLengths: int32 (batch,), or None; needs
    MASKED. Slopes: (heads,), or None. ZeroK, ZeroV, share to stride_zn: the parts of `Zeros`, or None; kv_len counts
    the other keys. COLUMNS: `choose_columns`.
    """
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    bounds: gl.constexpr = None
    if BOUNDED:
        keys: gl.constexpr = None
        if RowStart is not None or right is not None:
            keys = kv_len
        padding: gl.constexpr = None
        if right is not None:
            padding = KvLengths
        bounds = Bounds(DocumentStart, DocumentEnd, left, q_len, None, RowStart, right, keys, padding)
    blocks: gl.constexpr = None
    if LISTED:
        blocks = Blocks(QueryBlocks, stride_lb, stride_lh, width)
    sizes = BackwardSizes(
        heads, flat_heads, heads_per_group, items_per_group, q_len, kv_len, offset, row_blocks, key_blocks, tail_head,
        bounds, blocks, Seed, KvLengths, Slopes,
    )  # fmt: skip
    Counter = Turns + row_blocks * flat_heads
    zeros: gl.constexpr = None
    if ZeroK is not None:
        zeros = Zeros(ZeroK, ZeroV, share, unseen, stride_zb, stride_zh, stride_zn)

    shared = make_shared(q_desc, k_desc, v_desc, do_desc, dq_sum_desc, DQ_DELAY)
    fence_async_shared()  # make the initialised barriers visible to TMA

    gl.warp_specialize(
        [
            (consume, (
                dk_desc, dv_desc, shared, sizes, scale, gl.constexpr(0), CAUSAL, MASKED, DQ_DELAY, DROP, SOFTCAP,
                COLUMNS,
            )),
            (consume, (
                dk_desc, dv_desc, shared, sizes, scale, gl.constexpr(1), CAUSAL, MASKED, DQ_DELAY, DROP, SOFTCAP,
                COLUMNS,
            )),
            (load_tiles, (q_desc, k_desc, v_desc, do_desc, Counter, shared, sizes, GROUP, BLOCK_M, CAUSAL)),
            (load_row_statistics, (Lse, Delta, zeros, shared, sizes, CAUSAL, DROP, SOFTCAP)),
            (reduce_dq, (
                dq_sum_desc, Turns, shared.dqs, shared.claims, sizes, BLOCK_M, CAUSAL, gl.constexpr(0), COLUMNS
            )),
            (reduce_dq, (
                dq_sum_desc, Turns, shared.dqs, shared.claims, sizes, BLOCK_M, CAUSAL, gl.constexpr(1), COLUMNS
            )),
        ],
        [4, 1, 1, 1, 1],
        # At 32 columns consumers can do with less. Without the delay another warp would spill 20 B, and softcap 8.
        [232, 40, 40, 40, 40] if COLUMNS == 32 and not DQ_DELAY else [240, 24, 24, 24, 24],
    )  # fmt: skip
