"""The backward for Hopper (sm_90a) above head_dim 128, in Gluon: dK and dV. wide_dq.py has dQ.

dK and dV of 64 keys take half of the registers of two warpgroups. One kernel for all five products would therefore
add 64 KB to the sum of dQ for every 64 KB of Q and dO that it loads, more than the L2 cache moves while the tensor
cores multiply. Two kernels compute seven products, but no sum: nothing is added in an order, and no memory is needed.

A work item is 64 keys of a head against all blocks of 64 queries that see them. S^T and dP^T are split between the
two consumer warpgroups by queries, dK and dV by dimensions: each multiplies all of P and dS, which pass through
shared memory. P's product runs under the arithmetic of dS, dP's under the exponentials.

Up to head_dim 192 tiles have 128 and 64 columns, of which not all are multiplied (split_tiles.py, columns.py). The
first warpgroup then has the first 128 of dK and the rest of dV, the second the others: both have equally many.

Persistent, warp-specialised and fed by TMA like forward.py. Covers plain attention, windows and documents under the
causal mask or by query (bounds.py), key padding, dropout (dropout.py), softcap and ALiBi (score_mods.py); all else is
left to the portable kernels. With grouped heads, every query head has its own dK and dV.

Key padding needs no mask here: a key's row of S^T adds to its own rows of dK and dV alone. In place of those,
whatever they got, 0 is stored. A work item that is all padding has no step, and its K and V are not loaded.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .bounds import Bounds, end_rows, start_rows
from .columns import accumulator_layout, multiply_parts, parts_of, rest_of, rows_layout
from .dropout import Draw, ds_of, negate
from .forward_schedule import ROWS
from .masks import mask_from_end, masked_bias
from .padding import key_end, last_key_before
from .pipeline import LOG2_E, Ring, arrive, make_barriers, opaque, sync_consumers
from .scheduler import CLAIM_STAGES, issue_claim, make_claims, publish_claim, read_claim
from .score_mods import probabilities, slope_of, with_distances
from .split_tiles import (
    allocate_tiles,
    bytes_of,
    fetch_rows,
    half_at,
    is_split,
    load_rows,
    make_tiles,
    phase_of,
    stage_of,
    tile_at,
)

KEYS = gl.constexpr(64)
WIDTH = gl.constexpr(256)  # columns of a tile
STAGES = gl.constexpr(2)  # tiles in shared memory of each of Q and dO: 216 KB with all else
# Of tiles of 128 and 64 columns (split_tiles.py): 168 KB. With 3, for which there is room, 216.
SPLIT_STAGES = gl.constexpr(2)


class Sizes(NamedTuple):
    """The problem sizes of a launch."""

    heads: gl.tensor
    flat_heads: gl.tensor  # batch * heads
    heads_per_group: gl.tensor  # heads in a scheduling group
    q_len: gl.tensor
    kv_len: gl.tensor
    row_blocks: gl.tensor
    key_blocks: gl.tensor
    bounds: Bounds  # None without window and documents
    Seed: gl.tensor  # of dropout, or None
    KvLengths: gl.tensor  # of key padding, or None
    Slopes: gl.tensor  # of ALiBi, or None


class Results(NamedTuple):
    """Where dK and dV of every query head go."""

    DK: gl.tensor
    DV: gl.tensor
    stride_dkb: gl.tensor
    stride_dkh: gl.tensor
    stride_dkn: gl.tensor
    stride_dvb: gl.tensor
    stride_dvh: gl.tensor
    stride_dvn: gl.tensor


class WorkItem(NamedTuple):
    """A block of keys of one head, and `steps` blocks of queries, from the last one that sees any of them downwards.
    The steps from `masked_from` on cross the diagonal; in those before `masked_until` a window or document ends."""

    batch: gl.tensor
    head: gl.tensor
    flat_head: gl.tensor  # batch * heads + head
    key_block: gl.tensor
    last_block: gl.tensor
    steps: gl.tensor
    masked_until: gl.tensor
    masked_from: gl.tensor
    diagonal_row: gl.tensor  # first row that sees the first key, relative to the first row of `last_block`


class Shared(NamedTuple):
    """What the warps of a program share."""

    k_tiles: tuple[gl.shared_memory_descriptor, ...]  # as in split_tiles.py
    v_tiles: tuple[gl.shared_memory_descriptor, ...]
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    queries: Ring
    d_outs: Ring  # released together with the queries
    p: gl.shared_memory_descriptor  # two buffers of two halves, one of each warpgroup
    ds: gl.shared_memory_descriptor  # two halves
    claims: Ring


@gluon.jit
def decode_keys(index, sizes, CAUSAL: gl.constexpr):
    """The index-th work item. Heads come in groups; within a group, the keys that most queries see come first.

    Keys beyond the last need no mask: what they get is not stored.
    """
    first_flat_head = index // (sizes.heads_per_group * sizes.key_blocks) * sizes.heads_per_group
    index -= first_flat_head * sizes.key_blocks
    heads_per_group = gl.minimum(sizes.heads_per_group, sizes.flat_heads - first_flat_head)
    flat_head = first_flat_head + index % heads_per_group
    key_block = index // heads_per_group
    first_key = key_block * KEYS
    steps = sizes.row_blocks
    masked_until = 0
    if sizes.bounds is not None:
        batch = flat_head // sizes.heads
        last_key = last_key_before(first_key + KEYS, batch, sizes)
        steps = gl.cdiv(end_rows(last_key, batch, sizes.bounds), ROWS)
        masked_until = steps - end_rows(first_key, batch, sizes.bounds) // ROWS
    last_block = steps - 1
    masked_from = steps
    first_row = first_key - (sizes.kv_len - sizes.q_len)  # that sees the first key
    if sizes.bounds is not None and sizes.bounds.keys is not None:
        steps -= start_rows(first_key, batch, sizes.bounds) // ROWS
        masked_from -= gl.cdiv(start_rows(last_key, batch, sizes.bounds), ROWS)
    elif CAUSAL:
        steps -= gl.maximum(first_row, 0) // ROWS
        masked_from -= gl.cdiv(gl.maximum(first_row + KEYS - 1, 0), ROWS)
    batch, head = flat_head // sizes.heads, flat_head % sizes.heads
    if sizes.KvLengths is not None:
        steps = gl.where(first_key < key_end(batch, sizes), steps, 0)
    diagonal_row = first_row - last_block * ROWS
    return WorkItem(
        batch, head, flat_head, key_block, last_block, steps, masked_until, masked_from, diagonal_row
    )


@gluon.jit
def load_queries(
    q_desc, k_desc, v_desc, do_desc, Counter, shared, sizes, GROUP: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """The load warp: claim work items, load K and V once for each, and its blocks of Q and dO."""
    BY_QUERY: gl.constexpr = sizes.bounds is not None and sizes.bounds.keys is not None
    ordinal = 0
    tiles_before = 0
    index = publish_claim(issue_claim(Counter), shared.claims, ordinal, sizes.key_blocks * sizes.flat_heads)
    while index >= 0:
        pending = issue_claim(Counter)
        item = decode_keys(index, sizes, CAUSAL)
        for step in range(item.steps):
            stage = stage_of(shared.queries, tiles_before + step)
            phase = phase_of(shared.queries, tiles_before + step)
            row = (item.last_block - step) * ROWS
            fetch_rows(q_desc, item.batch, item.head, row, shared.queries, stage, phase)
            if step == 0:  # after Q, whose stage is free before the previous item's last step
                mbarrier.wait(shared.kv_empty, (ordinal & 1) ^ 1)
                full, kv_head, first_key = shared.kv_full, item.head // GROUP, item.key_block * KEYS
                mbarrier.expect(full, bytes_of(k_desc, shared.k_tiles) + bytes_of(v_desc, shared.v_tiles))
                load_rows(k_desc, item.batch, kv_head, first_key, shared.k_tiles, 0, full)
                load_rows(v_desc, item.batch, kv_head, first_key, shared.v_tiles, 0, full)
            fetch_rows(do_desc, item.batch, item.head, row, shared.d_outs, stage, phase)
        if (sizes.KvLengths is not None or BY_QUERY) and item.steps == 0:
            mbarrier.wait(shared.kv_empty, (ordinal & 1) ^ 1)
            mbarrier.expect(shared.kv_full, 0)  # nothing, so that the phases still count the items
        tiles_before += item.steps
        ordinal += 1
        index = publish_claim(pending, shared.claims, ordinal, sizes.key_blocks * sizes.flat_heads)


@gluon.constexpr_function
def half_of_dv(which, head_dim):
    """Which half of dV's columns a warpgroup has; of dK's it has half `which`."""
    return 1 - which if rest_of(head_dim) else which


@gluon.jit
def consume_queries(
    results, Lse, Delta, shared, sizes, scale,
    WHICH: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, DROP: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: half of the dimensions of dK and dV, together."""
    BY_QUERY: gl.constexpr = sizes.bounds is not None and sizes.bounds.keys is not None
    REST: gl.constexpr = rest_of(HEAD_DIM)
    DV_HALF: gl.constexpr = half_of_dv(WHICH, HEAD_DIM)
    DK_DIMS: gl.constexpr = REST if REST > 0 and WHICH == 1 else WIDTH // 2
    DV_DIMS: gl.constexpr = REST if REST > 0 and DV_HALF == 1 else WIDTH // 2
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS // 2, 16])
    ordinal = 0
    tiles_before = 0
    index = read_claim(shared.claims, ordinal)
    while index >= 0:
        item = decode_keys(index, sizes, CAUSAL)
        dk = gl.zeros([KEYS, DK_DIMS], gl.float32, accumulator_layout(DK_DIMS))
        dv = gl.zeros([KEYS, DV_DIMS], gl.float32, accumulator_layout(DV_DIMS))
        zeros = gl.zeros([KEYS, ROWS // 2], gl.float32, scores_layout)
        keys = gl.arange(0, KEYS, gl.SliceLayout(1, scores_layout))
        slope = slope_of(item.head, sizes)
        if slope is not None:
            first_visible = opaque(item.diagonal_row) + keys  # opaque: 4 B are spilled otherwise
        elif BY_QUERY:
            first_visible = start_rows(item.key_block * KEYS + keys, item.batch, sizes.bounds)
            first_visible -= item.last_block * ROWS
        elif CAUSAL:
            first_visible = item.diagonal_row + keys
        if sizes.bounds is not None:
            end_visible = (
                end_rows(item.key_block * KEYS + keys, item.batch, sizes.bounds) - item.last_block * ROWS
            )
        mbarrier.wait(shared.kv_full, ordinal & 1)
        for step in range(item.steps):
            # The mask is the initial accumulator of S: no branch may come between wgmmas in flight.
            bias = zeros
            masked = step >= item.masked_from
            if sizes.bounds is not None:
                masked |= step < item.masked_until
            if (CAUSAL or BY_QUERY) and masked:
                passed = step * ROWS - WHICH * (ROWS // 2)  # rows, from this half of a block to `last_block`
                bias = masked_bias(zeros, first_visible, passed, True)
                if sizes.bounds is not None:
                    bias = mask_from_end(bias, end_visible, passed)
            rows_of_keys: gl.constexpr = None
            if slope is not None:
                rows_of_keys = first_visible + (step * ROWS - WHICH * (ROWS // 2))
            first_row = (item.last_block - step) * ROWS
            draw: gl.constexpr = None
            if DROP is not None:
                row, key = first_row + WHICH * (ROWS // 2), item.key_block * KEYS
                draw = Draw(gl.load(sizes.Seed), item.batch, item.head, row, key)
            dk, dv = process_queries(
                dk, dv, bias, draw, slope, rows_of_keys, first_row, item.flat_head, tiles_before + step,
                step == item.steps - 1, Lse, Delta, shared, sizes, scale, WHICH, HEAD_DIM, CAUSAL, DROP, SOFTCAP,
            )  # fmt: skip
        tiles_before += item.steps
        first_key = item.key_block * KEYS
        end: gl.constexpr = None
        if sizes.KvLengths is not None:
            end = key_end(item.batch, sizes)
        if sizes.KvLengths is not None or BY_QUERY:
            gl.barrier()  # all warps have come here, which in an item without a step nothing else makes sure of
            arrive(shared.kv_empty, item.steps == 0)
        DK = (
            results.DK
            + item.batch.to(gl.int64) * results.stride_dkb
            + item.head.to(gl.int64) * results.stride_dkh
        )
        DV = (
            results.DV
            + item.batch.to(gl.int64) * results.stride_dvb
            + item.head.to(gl.int64) * results.stride_dvh
        )
        dk_dim, dv_dim = WHICH * (WIDTH // 2), DV_HALF * (WIDTH // 2)
        if DROP is not None:
            dk, dv = dk * DROP.SCALE, dv * DROP.SCALE
        store_rows(dk * scale, DK, results.stride_dkn, first_key, sizes.kv_len, dk_dim, HEAD_DIM, end)
        store_rows(dv, DV, results.stride_dvn, first_key, sizes.kv_len, dv_dim, HEAD_DIM, end)
        ordinal += 1
        index = read_claim(shared.claims, ordinal)
        arrive(shared.claims.empty.index((ordinal - 1) % CLAIM_STAGES))  # read a whole item ago


@gluon.jit
def process_queries(
    dk, dv, bias, draw, slope, rows_of_keys, first_row, flat_head, tile, last, Lse, Delta, shared, sizes, scale,
    WHICH: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, DROP: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """One step: S and dP of half of a block of queries, then what all of it adds to this warpgroup's dK and dV.

    bias: initial accumulator of S^T, -inf at masked elements; unused without a mask. draw: dropout's, or None. slope,
    rows_of_keys: ALiBi's (`with_distances`), or None. last: whether it is the last step, after whose dP K and V are
    released.
    """
    HALF: gl.constexpr = ROWS // 2
    DV_HALF: gl.constexpr = half_of_dv(WHICH, HEAD_DIM)
    DK_DIMS: gl.constexpr = dk.shape[1]
    DV_DIMS: gl.constexpr = dv.shape[1]
    scores_layout: gl.constexpr = bias.type.layout
    dtype: gl.constexpr = shared.p.dtype
    stage, phase = stage_of(shared.queries, tile), phase_of(shared.queries, tile)
    # Index 0 (there are fewer than 2^30 tiles), hidden from the compilers. Otherwise they hoist the descriptors of
    # the loop-invariant operands out of the loop, which are more than there are uniform registers, and spill 100 B.
    opaque_zero = tile >> 30
    k = tile_at(shared.k_tiles, opaque_zero, 0, KEYS, HEAD_DIM)
    v = tile_at(shared.v_tiles, opaque_zero, 0, KEYS, HEAD_DIM)
    q = tile_at(shared.queries.tiles, stage, WHICH * HALF, HALF, HEAD_DIM)
    d_out = tile_at(shared.d_outs.tiles, stage, WHICH * HALF, HALF, HEAD_DIM)
    rows = first_row + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(0, scores_layout))
    lse = (
        gl.load(Lse + (flat_head * sizes.q_len + rows), mask=rows < sizes.q_len, other=float("-inf")) * LOG2_E
    )
    delta = gl.load(Delta + (flat_head * sizes.q_len + rows), mask=rows < sizes.q_len, other=0.0)
    zeros = gl.zeros([KEYS, HALF], gl.float32, scores_layout)
    mbarrier.wait(shared.queries.full.index(stage), phase)
    s = multiply_parts(k, q, bias, CAUSAL or sizes.bounds is not None)
    mbarrier.wait(shared.d_outs.full.index(stage), phase)
    dp = multiply_parts(v, d_out, zeros, False)
    if SOFTCAP > 0:
        lse -= SOFTCAP * LOG2_E
    # +inf for fully masked rows and rows beyond the end, whose P = exp2(S - inf) is then 0.
    lse = gl.where(lse == float("-inf"), float("inf"), lse)
    s = warpgroup_mma_wait(parts_of(HEAD_DIM), [s])
    lse = with_distances(lse, slope, rows_of_keys, CAUSAL, scores_layout)
    p, of_ds = probabilities(s, lse, scale * LOG2_E, SOFTCAP)
    if DROP is not None:
        delta /= DROP.SCALE
        of_ds = negate(p, draw, DROP)
        p = gl.maximum(of_ds, 0.0)
    # Two buffers: the other warpgroup may still be multiplying the previous P.
    p_buffer = 2 * (tile % 2)
    shared.p.index(p_buffer + WHICH).store(p.to(dtype))
    fence_async_shared()
    sync_consumers()
    for half in gl.static_range(2):
        part = half_at(shared.d_outs.tiles, stage, half * HALF, HALF, DV_HALF, DV_DIMS)
        dv = warpgroup_mma(shared.p.index(p_buffer + half), part, dv, is_async=True)
    dp = warpgroup_mma_wait(2, [dp])
    arrive(shared.kv_empty, last)
    ds = ds_of(of_ds, dp, delta[None, :], DROP)
    shared.ds.index(WHICH).store(ds.to(dtype))
    fence_async_shared()
    sync_consumers()
    for half in gl.static_range(2):
        part = half_at(shared.queries.tiles, stage, half * HALF, HALF, WHICH, DK_DIMS)
        dk = warpgroup_mma(shared.ds.index(half), part, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    arrive(shared.queries.empty.index(stage))
    return dk, dv


@gluon.jit
def store_rows(x, Out, stride_m, first_row, length, first_dim, HEAD_DIM: gl.constexpr, end=None):
    """Store x (64, columns) to rows of a head from first_row on, columns from first_dim on, as far as there are any.
    end: the first row that gets 0 instead, or None.

    By way of shuffles: shared memory has the next work item's tiles by then.
    """
    LAYOUT: gl.constexpr = rows_layout(x.shape[1])
    if HEAD_DIM % 16 != 0:  # Triton looks for multiples of 16 only, and stores single elements otherwise
        stride_m = stride_m // 8 * 8
    x = gl.convert_layout(x.to(Out.dtype.element_ty), LAYOUT)
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    dims = first_dim + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    if end is not None:
        x = gl.where(first_row + rows < end, x, 0.0)
    Out += first_row.to(gl.int64) * stride_m
    gl.store(Out + rows * stride_m + dims, x, mask=(first_row + rows < length) & (dims < HEAD_DIM))


@gluon.jit(do_not_specialize=[*Sizes._fields, "left", "right"])
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, DK, DV, Lse, Delta, Counter, DocumentEnd, RowStart, Seed, KvLengths, Slopes,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    heads, flat_heads, heads_per_group, q_len, kv_len, row_blocks, key_blocks, left, right, scale,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, DROP: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """dK and dV of every query head. Grid: (programs,), one for each SM but no more than work items.

    The descriptors move (1, 1, 64, box_width). Lse, Delta: float32 (batch, heads, q_len), contiguous. Counter: int32
    0. DocumentEnd, left: of windows and documents (bounds.py), or None, as RowStart and right if not by query, Seed
    without DROP, KvLengths (batch,) without key padding and Slopes (heads,) without ALiBi. GROUP: query heads
    per head of K and V.
    """
    dtype: gl.constexpr = q_desc.dtype
    if HEAD_DIM % 16 != 0:  # as in `store_rows`
        stride_dkb, stride_dkh = stride_dkb // 8 * 8, stride_dkh // 8 * 8
        stride_dvb, stride_dvh = stride_dvb // 8 * 8, stride_dvh // 8 * 8
    results = Results(DK, DV, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn)
    bounds: gl.constexpr = None
    if left is not None:
        keys: gl.constexpr = None
        if RowStart is not None or right is not None:
            keys = kv_len
        padding: gl.constexpr = None
        if right is not None:
            padding = KvLengths
        bounds = Bounds(None, DocumentEnd, left, q_len, None, RowStart, right, keys, padding)
    sizes = Sizes(
        heads, flat_heads, heads_per_group, q_len, kv_len, row_blocks, key_blocks, bounds, Seed, KvLengths, Slopes
    )  # fmt: skip
    k_tiles = allocate_tiles(k_desc, 1, HEAD_DIM)
    v_tiles = allocate_tiles(v_desc, 1, HEAD_DIM)
    stages: gl.constexpr = SPLIT_STAGES if is_split(HEAD_DIM) else STAGES
    queries = make_tiles(q_desc, stages, 2, HEAD_DIM)
    d_out_tiles = allocate_tiles(do_desc, stages, HEAD_DIM)
    d_outs = Ring(d_out_tiles, make_barriers(stages, 1), queries.empty)
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS // 2], dtype)
    p = gl.allocate_shared_memory(dtype, [4, KEYS, ROWS // 2], half)
    ds = gl.allocate_shared_memory(dtype, [2, KEYS, ROWS // 2], half)
    kv_full = make_barriers(1, 1).index(0)
    kv_empty = make_barriers(1, 2).index(0)
    claims = make_claims(2)
    shared = Shared(k_tiles, v_tiles, kv_full, kv_empty, queries, d_outs, p, ds, claims)
    fence_async_shared()  # make the initialised barriers visible to TMA
    gl.warp_specialize(
        [
            (consume_queries, (
                results, Lse, Delta, shared, sizes, scale, gl.constexpr(0), HEAD_DIM, CAUSAL, DROP, SOFTCAP
            )),
            (consume_queries, (
                results, Lse, Delta, shared, sizes, scale, gl.constexpr(1), HEAD_DIM, CAUSAL, DROP, SOFTCAP
            )),
            (load_queries, (q_desc, k_desc, v_desc, do_desc, Counter, shared, sizes, GROUP, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
