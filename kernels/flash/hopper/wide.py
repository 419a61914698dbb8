"""The backward for Hopper (sm_90a) above head_dim 128, in Gluon: a kernel for dK and dV, and one for dQ.

dK and dV of 64 keys take half of the registers of two warpgroups. One kernel for all five products would therefore
add 64 KB to the sum of dQ for every 64 KB of Q and dO that it loads, more than the L2 cache moves while the tensor
cores multiply. Two kernels compute seven products, but no sum: nothing is added in an order, and no memory is needed.

dkdv_kernel  A work item is 64 keys of a head against all blocks of 64 queries that see them. S^T and dP^T are split
             between the two consumer warpgroups by queries, dK and dV by dimensions: each multiplies all of P and dS,
             which pass through shared memory. P's product runs under the arithmetic of dS.
dq_kernel    The forward's tile: 128 queries, 64 of each warpgroup, against blocks of 64 keys. Nothing is exchanged.

Both are persistent, warp-specialised and fed by TMA like forward.py, and cover plain attention. With grouped heads,
every query head has its own dK and dV.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward import sync_consumers
from .backward_schedule import WorkItem
from .forward_schedule import ROWS, WIDE_ROWS, ForwardSizes, count_key_blocks, decode_tile
from .masks import mask_scores, masked_bias
from .pipeline import LOG2_E, Ring, arrive, fetch, make_barriers, make_ring
from .primitives import tma_load, tma_store
from .scheduler import CLAIM_STAGES, issue_claim, make_claims, publish_claim, read_claim

KEYS = gl.constexpr(64)  # of a work item, and of a block
WIDTH = gl.constexpr(256)  # columns of a tile
STAGES = gl.constexpr(2)  # of Q and dO in dkdv_kernel, of K in dq_kernel


class Sizes(NamedTuple):
    """The problem sizes of a launch of dkdv_kernel."""

    heads: gl.tensor
    flat_heads: gl.tensor  # batch * heads
    heads_per_group: gl.tensor  # heads in a scheduling group
    q_len: gl.tensor
    kv_len: gl.tensor
    row_blocks: gl.tensor
    key_blocks: gl.tensor


class Shared(NamedTuple):
    """What the warps of dkdv_kernel share."""

    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
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
    last_block = sizes.row_blocks - 1
    steps = sizes.row_blocks
    masked_from = steps
    first_row = first_key - (sizes.kv_len - sizes.q_len)  # that sees the first key
    if CAUSAL:
        steps -= gl.maximum(first_row, 0) // ROWS
        masked_from -= gl.cdiv(gl.maximum(first_row + KEYS - 1, 0), ROWS)
    return WorkItem(
        flat_head // sizes.heads, flat_head % sizes.heads, flat_head, key_block, last_block, steps, 0, masked_from,
        sizes.kv_len - first_key, first_row - last_block * ROWS,
    )  # fmt: skip


@gluon.jit
def load_queries(
    q_desc, k_desc, v_desc, do_desc, Counter, shared, sizes, GROUP: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """The load warp of dkdv_kernel: claim work items, load K and V once for each, and its blocks of Q and dO."""
    ordinal = 0
    tiles_before = 0
    index = publish_claim(issue_claim(Counter), shared.claims, ordinal, sizes.key_blocks * sizes.flat_heads)
    while index >= 0:
        pending = issue_claim(Counter)
        item = decode_keys(index, sizes, CAUSAL)
        for step in range(item.steps):
            stage = (tiles_before + step) % STAGES
            phase = (tiles_before + step) // STAGES & 1
            coordinates = [item.batch, item.head, (item.last_block - step) * ROWS, 0]
            fetch(q_desc, coordinates, shared.queries, stage, phase)
            if step == 0:  # after Q, whose stage is free before the previous item's last step
                mbarrier.wait(shared.kv_empty, (ordinal & 1) ^ 1)
                mbarrier.expect(shared.kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
                keys = [item.batch, item.head // GROUP, item.key_block * KEYS, 0]
                tma_load(k_desc, keys, shared.kv_full, shared.k_tiles.index(0))
                tma_load(v_desc, keys, shared.kv_full, shared.v_tiles.index(0))
            fetch(do_desc, coordinates, shared.d_outs, stage, phase)
        tiles_before += item.steps
        ordinal += 1
        index = publish_claim(pending, shared.claims, ordinal, sizes.key_blocks * sizes.flat_heads)


@gluon.jit
def consume_queries(
    dk_desc, dv_desc, Lse, Delta, shared, sizes, scale,
    WHICH: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup of dkdv_kernel: half of the dimensions of dK and dV."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 16])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS // 2, 16])
    ordinal = 0
    tiles_before = 0
    index = read_claim(shared.claims, ordinal)
    while index >= 0:
        item = decode_keys(index, sizes, CAUSAL)
        dk = gl.zeros([KEYS, WIDTH // 2], gl.float32, layout)
        dv = gl.zeros([KEYS, WIDTH // 2], gl.float32, layout)
        zeros = gl.zeros([KEYS, ROWS // 2], gl.float32, scores_layout)
        if CAUSAL:
            first_visible = item.diagonal_row + gl.arange(0, KEYS, gl.SliceLayout(1, scores_layout))
        mbarrier.wait(shared.kv_full, ordinal & 1)
        for step in range(item.steps):
            # The mask is the initial accumulator of S: no branch may come between wgmmas in flight.
            bias = zeros
            if CAUSAL and step >= item.masked_from:
                bias = masked_bias(zeros, first_visible, step * ROWS - WHICH * (ROWS // 2), CAUSAL)
            first_row = (item.last_block - step) * ROWS
            dk, dv = process_queries(
                dk, dv, bias, first_row, item.flat_head, tiles_before + step, Lse, Delta, shared, sizes, scale,
                WHICH, CAUSAL,
            )  # fmt: skip
        tiles_before += item.steps
        store_dk_dv(dk_desc, dv_desc, dk * scale, dv, shared, item, WHICH)
        ordinal += 1
        index = read_claim(shared.claims, ordinal)
        arrive(shared.claims.empty.index((ordinal - 1) % CLAIM_STAGES))  # read a whole item ago


@gluon.jit
def process_queries(
    dk, dv, bias, first_row, flat_head, tile, Lse, Delta, shared, sizes, scale,
    WHICH: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One step: S and dP of half of a block of queries, then what all of the block adds to half of dK and dV.

    bias: initial accumulator of S^T, -inf at masked elements; unused unless CAUSAL.
    """
    HALF: gl.constexpr = ROWS // 2
    scores_layout: gl.constexpr = bias.type.layout
    dtype: gl.constexpr = shared.k_tiles.dtype
    stage = tile % STAGES
    phase = tile // STAGES & 1
    # Index 0 (there are fewer than 2^30 tiles), hidden from the compilers. Otherwise they hoist the descriptors of
    # the operands that stay, more than there are uniform registers, out of the loop, and spill 100 B.
    opaque_zero = tile >> 30
    k = shared.k_tiles.index(opaque_zero).reshape([KEYS, WIDTH])
    v = shared.v_tiles.index(opaque_zero).reshape([KEYS, WIDTH])
    q = shared.queries.tiles.index(stage).reshape([ROWS, WIDTH])
    d_out = shared.d_outs.tiles.index(stage).reshape([ROWS, WIDTH])
    rows = first_row + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(0, scores_layout))
    lse = (
        gl.load(Lse + (flat_head * sizes.q_len + rows), mask=rows < sizes.q_len, other=float("-inf")) * LOG2_E
    )
    delta = gl.load(Delta + (flat_head * sizes.q_len + rows), mask=rows < sizes.q_len, other=0.0)
    zeros = gl.zeros([KEYS, HALF], gl.float32, scores_layout)
    mbarrier.wait(shared.queries.full.index(stage), phase)
    s = warpgroup_mma(k, q.slice(WHICH * HALF, HALF).permute((1, 0)), bias, use_acc=CAUSAL, is_async=True)
    mbarrier.wait(shared.d_outs.full.index(stage), phase)
    dp = warpgroup_mma(
        v, d_out.slice(WHICH * HALF, HALF).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    # +inf for fully masked rows and rows beyond the end, whose P = exp2(S - inf) is then 0.
    lse = gl.where(lse == float("-inf"), float("inf"), lse)
    s = warpgroup_mma_wait(1, [s])
    p = gl.exp2(s * (scale * LOG2_E) - lse[None, :])
    # Two buffers: the other warpgroup may still be multiplying the previous P.
    p_buffer = 2 * stage
    shared.p.index(p_buffer + WHICH).store(p.to(dtype))
    fence_async_shared()
    sync_consumers()
    for half in gl.static_range(2):
        part = d_out.slice(half * HALF, HALF).slice(WHICH * (WIDTH // 2), WIDTH // 2, dim=1)
        dv = warpgroup_mma(shared.p.index(p_buffer + half), part, dv, is_async=True)
    dp = warpgroup_mma_wait(2, [dp])
    ds = p * (dp - delta[None, :])
    shared.ds.index(WHICH).store(ds.to(dtype))
    fence_async_shared()
    sync_consumers()
    for half in gl.static_range(2):
        part = q.slice(half * HALF, HALF).slice(WHICH * (WIDTH // 2), WIDTH // 2, dim=1)
        dk = warpgroup_mma(shared.ds.index(half), part, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    arrive(shared.queries.empty.index(stage))
    return dk, dv


@gluon.jit
def store_dk_dv(dk_desc, dv_desc, dk, dv, shared, item, WHICH: gl.constexpr):
    """Store dK and dV by TMA from the tiles of K and V, then release those. Both warpgroups are done with them: each
    had its last dP before they met over dS."""
    dtype: gl.constexpr = shared.k_tiles.dtype
    for_k = shared.k_tiles.index(0).reshape([KEYS, WIDTH]).slice(WHICH * (WIDTH // 2), WIDTH // 2, dim=1)
    for_v = shared.v_tiles.index(0).reshape([KEYS, WIDTH]).slice(WHICH * (WIDTH // 2), WIDTH // 2, dim=1)
    for_k.store(dk.to(dtype))
    for_v.store(dv.to(dtype))
    fence_async_shared()
    sync_consumers()
    if WHICH == 0:
        coordinates = [item.batch, item.head, item.key_block * KEYS, 0]
        tma_store(dk_desc, coordinates, shared.k_tiles.index(0))
        tma_store(dv_desc, coordinates, shared.v_tiles.index(0))
        tma.store_wait(0)
        gl.barrier()
        arrive(shared.kv_empty)


@gluon.jit(do_not_specialize=[*Sizes._fields])
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, Lse, Delta, Counter,
    heads, flat_heads, heads_per_group, q_len, kv_len, row_blocks, key_blocks, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """dK and dV of every query head. Grid: (programs,), one for each SM but no more than work items.

    The descriptors move (1, 1, 64, 256). Lse, Delta: float32 (batch, heads, q_len), contiguous. Counter: int32 0.
    GROUP: query heads per head of K and V.
    """
    dtype: gl.constexpr = q_desc.dtype
    sizes = Sizes(heads, flat_heads, heads_per_group, q_len, kv_len, row_blocks, key_blocks)
    k_tiles = gl.allocate_shared_memory(dtype, [1] + k_desc.block_type.shape, k_desc.layout)  # noqa: RUF005
    v_tiles = gl.allocate_shared_memory(dtype, [1] + v_desc.block_type.shape, v_desc.layout)  # noqa: RUF005
    queries = make_ring(q_desc, STAGES, 2)
    d_out_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], do_desc.layout)
    d_outs = Ring(d_out_tiles, make_barriers(STAGES, 1), queries.empty)
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS // 2], dtype)
    p = gl.allocate_shared_memory(dtype, [2 * STAGES, KEYS, ROWS // 2], half)
    ds = gl.allocate_shared_memory(dtype, [2, KEYS, ROWS // 2], half)
    kv_full = make_barriers(1, 1).index(0)
    kv_empty = make_barriers(1, 1).index(0)
    claims = make_claims(2)
    shared = Shared(k_tiles, v_tiles, kv_full, kv_empty, queries, d_outs, p, ds, claims)
    fence_async_shared()  # make the initialised barriers visible to TMA
    gl.warp_specialize(
        [
            (
                consume_queries,
                (dk_desc, dv_desc, Lse, Delta, shared, sizes, scale, gl.constexpr(0), CAUSAL),
            ),
            (
                consume_queries,
                (dk_desc, dv_desc, Lse, Delta, shared, sizes, scale, gl.constexpr(1), CAUSAL),
            ),
            (load_queries, (q_desc, k_desc, v_desc, do_desc, Counter, shared, sizes, GROUP, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )


class Rows(NamedTuple):
    """What dq_kernel reads and writes by rows: pointers, and DQ's strides."""

    DQ: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_m: gl.tensor
    Lse: gl.tensor
    Delta: gl.tensor


class Rings(NamedTuple):
    """The pipelines of dq_kernel. Q and dO have a tile for each consumer."""

    q: Ring
    d_out: Ring
    k: Ring
    v: Ring


@gluon.jit
def load_keys(q_desc, k_desc, v_desc, do_desc, Counter, rings, claims, sizes, SPEC: gl.constexpr):
    """The load warp of dq_kernel: claim tiles of queries, load each, and the blocks of keys it sees, last first."""
    ordinal = 0
    blocks_before = 0
    index = publish_claim(issue_claim(Counter), claims, ordinal, sizes.tiles)
    while index >= 0:
        pending = issue_claim(Counter)
        first_row, head, batch = decode_tile(index, sizes, SPEC)
        for which in gl.static_range(2):
            coordinates = [batch, head, first_row + which * ROWS, 0]
            fetch(q_desc, coordinates, rings.q, which, ordinal & 1)
            fetch(do_desc, coordinates, rings.d_out, which, ordinal & 1)
        blocks = count_key_blocks(first_row + 2 * ROWS, sizes, SPEC)
        for passed in range(blocks):
            block = blocks_before + passed
            keys = [batch, head // SPEC.GROUP, (blocks - 1 - passed) * KEYS, 0]
            fetch(k_desc, keys, rings.k, block % STAGES, block // STAGES & 1)
            fetch(v_desc, keys, rings.v, 0, block & 1)
        blocks_before += blocks
        ordinal += 1
        index = publish_claim(pending, claims, ordinal, sizes.tiles)


@gluon.jit
def consume_keys(
    of_rows, rings, claims, sizes, scale, WHICH: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """A consumer warpgroup of dq_kernel: rows WHICH * 64 to WHICH * 64 + 63 of each tile of queries."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    # Blocks, of those that a row of this consumer sees, that the diagonal or the end of the keys may cut.
    CUT: gl.constexpr = 1 if SPEC.ALIGNED else 2
    ordinal = 0
    blocks_before = 0
    index = read_claim(claims, ordinal)
    while index >= 0:
        tile_row, head, batch = decode_tile(index, sizes, SPEC)
        first_row = tile_row + WHICH * ROWS
        blocks = count_key_blocks(first_row + ROWS, sizes, SPEC)
        skipped = count_key_blocks(tile_row + 2 * ROWS, sizes, SPEC) - blocks
        for block in range(blocks_before, blocks_before + skipped):
            # Seen only by the other consumer. Waiting keeps this one's arrivals in the right phase.
            mbarrier.wait(rings.k.full.index(block % STAGES), block // STAGES & 1)
            arrive(rings.k.empty.index(block % STAGES))
            mbarrier.wait(rings.v.full.index(0), block & 1)
            arrive(rings.v.empty.index(0))
        blocks_before += skipped
        rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        first = (batch * sizes.heads + head) * sizes.q_len
        lse = gl.load(of_rows.Lse + (first + rows), mask=rows < sizes.q_len, other=float("-inf")) * LOG2_E
        lse = gl.where(lse == float("-inf"), float("inf"), lse)  # P is 0 there
        delta = gl.load(of_rows.Delta + (first + rows), mask=rows < sizes.q_len, other=0.0)
        dq = gl.zeros([ROWS, WIDTH], gl.float32, layout)
        zeros = gl.zeros([ROWS, KEYS], gl.float32, scores_layout)
        mbarrier.wait(rings.q.full.index(WHICH), ordinal & 1)
        mbarrier.wait(rings.d_out.full.index(WHICH), ordinal & 1)
        for passed in range(blocks):
            bias = zeros
            if passed < CUT:
                bias = mask_scores(zeros, first_row, (blocks - 1 - passed) * KEYS, sizes, SPEC)
            dq = process_keys(dq, bias, lse, delta, blocks_before + passed, rings, scale, WHICH)
        arrive(rings.q.empty.index(WHICH))
        arrive(rings.d_out.empty.index(WHICH))
        blocks_before += blocks
        out = gl.convert_layout((dq * scale).to(of_rows.DQ.dtype.element_ty), WIDE_ROWS)
        DQ = of_rows.DQ + batch.to(gl.int64) * of_rows.stride_b + head.to(gl.int64) * of_rows.stride_h
        DQ += first_row.to(gl.int64) * of_rows.stride_m
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE_ROWS))[:, None]
        dims = gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE_ROWS))[None, :]
        inside = first_row + rows < sizes.q_len
        if WIDTH > SPEC.HEAD_DIM:
            inside = inside & (dims < SPEC.HEAD_DIM)
        gl.store(DQ + rows * of_rows.stride_m + dims, out, mask=inside)
        ordinal += 1
        index = read_claim(claims, ordinal)
        arrive(claims.empty.index((ordinal - 1) % CLAIM_STAGES))  # read a whole tile ago


@gluon.jit
def process_keys(dq, bias, lse, delta, block, rings, scale, WHICH: gl.constexpr):
    """dq and what a block of keys adds to it. bias: initial accumulator of S, -inf at masked elements."""
    dtype: gl.constexpr = rings.k.tiles.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    stage = block % STAGES
    own = WHICH + (block >> 30)  # WHICH, hidden as in `process_queries`; else 716 B are spilled
    q = rings.q.tiles.index(own).reshape([ROWS, WIDTH])
    d_out = rings.d_out.tiles.index(own).reshape([ROWS, WIDTH])
    k = rings.k.tiles.index(stage).reshape([KEYS, WIDTH])
    v = rings.v.tiles.index(0).reshape([KEYS, WIDTH])
    zeros = gl.zeros([ROWS, KEYS], gl.float32, bias.type.layout)
    mbarrier.wait(rings.k.full.index(stage), block // STAGES & 1)
    s = warpgroup_mma(q, k.permute((1, 0)), bias, is_async=True)
    mbarrier.wait(rings.v.full.index(0), block & 1)
    dp = warpgroup_mma(d_out, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    p = gl.exp2(s * (scale * LOG2_E) - lse[:, None])
    dp = warpgroup_mma_wait(0, [dp])
    arrive(rings.v.empty.index(0))
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(dtype), operand)
    # The register operand stays live until it has been read: ptxas before 13.3 reuses its registers at once.
    dq, ds = warpgroup_mma_wait(0, [warpgroup_mma(ds, k, dq, is_async=True), ds])
    arrive(rings.k.empty.index(stage))
    return dq


@gluon.jit(do_not_specialize=["q_len", "kv_len", "heads", "batches", "heads_per_group", "tiles"])
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, DQ, Lse, Delta, Counter, stride_dqb, stride_dqh, stride_dqm,
    q_len, kv_len, heads, batches, heads_per_group, tiles, scale, SPEC: gl.constexpr,
):  # fmt: skip
    """dQ. Grid: (programs,), one for each SM but no more than there are tiles of 128 queries.

    The descriptors move (1, 1, 64, 256). Lse, Delta: float32 (batch, heads, q_len), contiguous. Counter: int32 0.
    """
    if SPEC.HEAD_DIM % 16 != 0:  # Triton looks for multiples of 16 only, and stores single elements otherwise
        stride_dqb, stride_dqh, stride_dqm = stride_dqb // 8 * 8, stride_dqh // 8 * 8, stride_dqm // 8 * 8
    rings = Rings(
        make_ring(q_desc, 2, 1), make_ring(do_desc, 2, 1), make_ring(k_desc, STAGES, 2), make_ring(v_desc, 1, 2)
    )  # fmt: skip
    sizes = ForwardSizes(q_len, kv_len, heads, batches, heads_per_group, tiles, None, None)
    claims = make_claims(2)
    fence_async_shared()  # make the initialised barriers visible to TMA
    of_rows = Rows(DQ, stride_dqb, stride_dqh, stride_dqm, Lse, Delta)
    gl.warp_specialize(
        [
            (consume_keys, (of_rows, rings, claims, sizes, scale, gl.constexpr(0), SPEC)),
            (consume_keys, (of_rows, rings, claims, sizes, scale, gl.constexpr(1), SPEC)),
            (load_keys, (q_desc, k_desc, v_desc, do_desc, Counter, rings, claims, sizes, SPEC)),
        ],
        [4, 1],
        [240, 24],
    )
