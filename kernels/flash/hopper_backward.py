"""The backward for Hopper (sm_90a), in Gluon: five products in one kernel, and still bit for bit repeatable.

A program takes one work after another (hopper_work.py): KEYS keys of a head, half of them in each of two warpgroups.
One warp moves tiles of Q and dO into rings of shared memory by TMA, one lays the rows' log-sum-exp and delta beside
them. The warpgroups issue their products asynchronously (FlashAttention-3's schedule, Shah et al. 2024) on the
transposes S^T = K Q^T and dP^T = V dO^T, as backward.py does. dQ sums over keys, so over works: two more warps add it
up (hopper_dq.py).

dQ needs dS of both warpgroups, which would meet in each step. In long loops a warpgroup multiplies dQ of the step
before instead, whose dS the other has laid down long ago.

Plain attention, with dropout (hopper_dropout.py), windows and documents under the causal mask (hopper_bounds.py), or
a block mask (hopper_blocks.py); the rest is the portable kernels' (backward.py). Heads that share keys have works of
their own each, and dK and dV of their own.
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

from .hopper import LOG2_E, Ring, arrive, fetch, make_barriers, make_ring, opaque
from .hopper_blocks import LISTS, Blocks
from .hopper_bounds import Bounds, end_rows
from .hopper_claims import CLAIMS, ask, claimed, make_claims, tell
from .hopper_dq import SUM_BLOCK, add_dq, by_thread
from .hopper_dropout import Draw, negate, pack_positive
from .hopper_softmax import unpack
from .hopper_work import KEYS, Sizes, block_at, plan

HALF = gl.constexpr(64)  # keys of a warpgroup: what one wgmma multiplies
NEVER = gl.constexpr(1 << 24)  # more rows than a work has
STAGES = gl.constexpr(2)  # tiles of Q, and of dO, in shared memory; as many as of dS and of dQ
LATE_FROM = {64: 8, 128: 16}  # steps of a work, on average; from there on late is faster (LOG.md)


def steps_late(head_dim: int, causal: bool, row_blocks: int) -> int:
    """1 where dQ's product is of the step before, so that no warpgroup waits for the other; else 0.

    It costs a work one product more, the first step's, which the second multiplies again; and nothing runs beside the
    last, which comes after the loop.
    """
    return int(row_blocks // (2 if causal else 1) >= LATE_FROM[head_dim])


class Shared(NamedTuple):
    """What the warps of a program share. The rows' lse and delta come and go with the tiles of queries."""

    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    queries: Ring
    d_outs: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    ds: Ring  # if late; its barriers are two arrays, one of each warpgroup
    sums: Ring
    claims: Ring


@gluon.jit
def meet():
    """Wait for the other warpgroup."""
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    token = gl.full([128], 0, gl.int32, one_each)
    gl.inline_asm_elementwise("bar.sync 8, 256; mov.b32 $0, $1;", "=r,r", [token], gl.int32, False, 1)


@gluon.jit
def load_tiles(
    q_desc, k_desc, v_desc, do_desc, Counter, shared, sizes,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Claim works; bring K and V of each once, and the tiles of Q and dO as their stages become free."""
    place = 0
    count = 0
    index = 0
    while index >= 0:
        index = tell(ask(Counter), shared.claims, place, sizes.key_blocks * sizes.sequences)
        if index >= 0:
            work = plan(index, sizes, BLOCK_M, CAUSAL)
            for step in range(work.steps):
                stage = (count + step) % STAGES
                phase = (count + step) // STAGES & 1
                spot = [work.batch, work.head, block_at(work, step, sizes, BLOCK_M) * BLOCK_M, 0]
                fetch(q_desc, spot, shared.queries, stage, phase)
                if step == 0:  # behind Q, whose stage is free before the last step of the work before
                    mbarrier.wait(shared.kv_empty, (place & 1) ^ 1)
                    mbarrier.expect(shared.kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
                    kv_spot = [work.batch, work.head // GROUP, work.key_block * KEYS, 0]
                    tma.async_copy_global_to_shared(k_desc, kv_spot, shared.kv_full, shared.k_tiles.index(0))
                    tma.async_copy_global_to_shared(v_desc, kv_spot, shared.kv_full, shared.v_tiles.index(0))
                fetch(do_desc, spot, shared.d_outs, stage, phase)
            count += work.steps
        place += 1


@gluon.jit
def load_rows(Lse, Delta, shared, sizes, CAUSAL: gl.constexpr, DROP: gl.constexpr):
    """Lay lse, in powers of two, and delta, in units of what dropout makes of dP, beside the tiles of queries."""
    BLOCK_M: gl.constexpr = shared.lse.shape[1]
    offsets = gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))
    place = 0
    count = 0
    index = claimed(shared.claims, place)
    while index >= 0:
        mbarrier.arrive(shared.claims.empty.index(place % CLAIMS))
        work = plan(index, sizes, BLOCK_M, CAUSAL)
        first = work.sequence * sizes.q_len
        block = work.last
        for step in range(work.steps):
            stage = (count + step) % STAGES
            if sizes.blocks is not None:
                block = block_at(work, step, sizes, BLOCK_M)
            rows = block * BLOCK_M + offsets
            lse = gl.load(Lse + (first + rows), mask=rows < sizes.q_len, other=float("-inf")) * LOG2_E
            delta = gl.load(Delta + (first + rows), mask=rows < sizes.q_len, other=0.0)
            if DROP is not None:
                delta /= DROP.SCALE
            # Of a row that sees nothing, or lies beyond the end, exp2(S - inf) is 0.
            lse = gl.where(lse == float("-inf"), float("inf"), lse)
            mbarrier.wait(shared.queries.empty.index(stage), ((count + step) // STAGES & 1) ^ 1)
            shared.lse.index(stage).store(lse)
            shared.delta.index(stage).store(delta)
            mbarrier.arrive(shared.rows_full.index(stage))
            block -= 1
        count += work.steps
        place += 1
        index = claimed(shared.claims, place)


@gluon.jit
def consume(
    dk_desc, dv_desc, shared, sizes, scale,
    WHICH: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, LATE: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    """dK and dV of half of the keys, and half of each tile of dQ: of the tile LATE steps before (see `advance`)."""
    BLOCK_M: gl.constexpr = shared.queries.tiles.shape[3]
    HEAD_DIM: gl.constexpr = shared.queries.tiles.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    place = 0
    count = 0  # tiles of queries before this work
    index = claimed(shared.claims, place)
    while index >= 0:
        work = plan(index, sizes, BLOCK_M, CAUSAL)
        dk = gl.zeros([HALF, HEAD_DIM], gl.float32, layout)
        dv = gl.zeros([HALF, HEAD_DIM], gl.float32, layout)
        zeros = gl.zeros([HALF, BLOCK_M], gl.float32, scores_layout)
        mbarrier.wait(shared.kv_full, place & 1)
        # dK and dV of the work before have left the tile of dS that `store` laid them in. The other warpgroup learns
        # it by ds.empty, or when both meet: the first step writes the other tile.
        if HEAD_DIM == 64 and WHICH == 0:
            tma.store_wait(0)
            gl.barrier()
        # The last tile of the work before: finish_dq multiplied it, and at 64 `store` used it.
        if LATE and place > 0:
            arrive(shared.ds.empty[WHICH].index((count - 1) % STAGES))
        if MASKED:
            seen_from = first_rows(WHICH, work, CAUSAL, scores_layout)
        if sizes.bounds is not None:
            seen_until = last_rows(WHICH, work, sizes.bounds, BLOCK_M, scores_layout)
        for step in range(work.steps):
            # The mask goes in before the product: no branch may stand between products under way.
            bias = zeros
            if MASKED and (step >= work.clear or step < work.begun):
                bias = mask(zeros, seen_from, step * BLOCK_M, CAUSAL)
                if sizes.bounds is not None:
                    bias = mask_ends(bias, seen_until, step * BLOCK_M)
            draw: gl.constexpr = None
            if DROP is not None:
                row, key = (work.last - step) * BLOCK_M, work.key_block * KEYS + WHICH * HALF
                draw = Draw(gl.load(sizes.Seed), work.batch, work.head, row, key)
            dk, dv = advance(dk, dv, bias, draw, step, count, shared, sizes, scale, WHICH, MASKED, LATE, DROP)
        count += work.steps
        if LATE:
            finish_dq(shared, count - 1, WHICH)
        if HEAD_DIM == 64:
            arrive(shared.kv_empty)
        # Planned again: kept through the loop it would take registers.
        work = plan(opaque(index), sizes, BLOCK_M, CAUSAL)
        if DROP is not None:
            dk *= DROP.SCALE
            dv *= DROP.SCALE
        store(dk_desc, dv_desc, dk * scale, dv, shared, work, (count - 1) % STAGES, WHICH)
        place += 1
        index = claimed(shared.claims, place)
        arrive(shared.claims.empty.index((place - 1) % CLAIMS))
    if WHICH == 0:
        tma.store_wait(0)


@gluon.jit
def advance(
    dk, dv, bias, draw, step, count, shared, sizes, scale,
    WHICH: gl.constexpr, MASKED: gl.constexpr, LATE: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    """What a tile of queries adds to dK and dV, and half of a tile of dQ.

    bias: what is added to the scores, -inf where a query must not see a key, if MASKED. draw: for dropout.
    """
    BLOCK_M: gl.constexpr = shared.queries.tiles.shape[3]
    HEAD_DIM: gl.constexpr = shared.queries.tiles.shape[4]
    dtype: gl.constexpr = shared.k_tiles.dtype
    scores_layout: gl.constexpr = bias.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    tile = count + step
    stage = tile % STAGES
    phase = tile // STAGES & 1
    # 0, but the compilers do not know: they would compute the addresses of what all steps multiply before the loop,
    # more than there are uniform registers, and spill them. At 64, not late, dQ's product alone needs it (LOG.md).
    hidden = (step + sizes.q_len) >> 31
    same = hidden if HEAD_DIM > 64 or LATE else 0
    k = shared.k_tiles.index(same).reshape([KEYS, HEAD_DIM]).slice(WHICH * HALF, HALF)
    v = shared.v_tiles.index(same).reshape([KEYS, HEAD_DIM]).slice(WHICH * HALF, HALF)
    q = shared.queries.tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
    d_out = shared.d_outs.tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
    zeros = gl.zeros([HALF, BLOCK_M], gl.float32, scores_layout)
    mbarrier.wait(shared.queries.full.index(stage), phase)
    s = warpgroup_mma(k, q.permute((1, 0)), bias, use_acc=MASKED, is_async=True)
    mbarrier.wait(shared.d_outs.full.index(stage), phase)
    if DROP is None:
        dp = warpgroup_mma(v, d_out.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(shared.rows_full.index(stage), phase)
    s = warpgroup_mma_wait(1 if DROP is None else 0, [s])
    lse = shared.lse.index(stage).load(gl.SliceLayout(0, scores_layout))
    p = gl.exp2(s * (scale * LOG2_E) - lse[None, :])
    if DROP is None:
        rounded_p = gl.convert_layout(p.to(dtype), operand)
        # Before the wait for dP: ptxas would move that wait in front of the exponentials.
        dv = warpgroup_mma(rounded_p, d_out, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
        delta = shared.delta.index(stage).load(gl.SliceLayout(0, scores_layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
    else:
        # Drawn before there is a dP, and that after dV: there are no registers for two of them, up to 180 B spilled.
        p = negate(p, draw, DROP)
        rounded_p = unpack(pack_positive(p, dtype), dtype, dv.type.layout)
        dv = warpgroup_mma_wait(0, [warpgroup_mma(rounded_p, d_out, dv, is_async=True)])
        dp = warpgroup_mma(v, d_out.permute((1, 0)), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(0, [dp])
        delta = shared.delta.index(stage).load(gl.SliceLayout(0, scores_layout))
        ds = (gl.maximum(p, 0.0) * dp - gl.abs(p) * delta[None, :]).to(dtype)
    if LATE:
        mbarrier.wait(shared.ds.empty[1 - WHICH].index(stage), phase ^ 1)
    shared.ds.tiles.index(stage).slice(WHICH * HALF, HALF).store(ds)
    fence_async_shared()
    # Late, the first step multiplies what the second will again, and hands nothing over: no wait depends on the step.
    done = tile
    ready = True
    if LATE:
        ready = step > 0
        done = tile - ready.to(gl.int32)
    buffer = done % STAGES
    turn = done // STAGES & 1
    if LATE:
        gl.barrier()
        arrive(shared.ds.full[WHICH].index(stage))
        mbarrier.wait(shared.ds.full[1 - WHICH].index(buffer), turn)
    else:
        meet()
    keys = shared.k_tiles.index(hidden).reshape([KEYS, HEAD_DIM])
    dq = multiply_dq(shared.ds.tiles.index(buffer), keys, WHICH)
    rounded_ds = gl.convert_layout(ds, operand)
    dk = warpgroup_mma(rounded_ds, q, dk, is_async=True)
    # The left operands stay named until they have been read: ptxas before 13.3 reuses their registers at once.
    if DROP is None:
        dv, dq, rounded_p = warpgroup_mma_wait(1, [dv, dq, rounded_p])
    else:
        dq = warpgroup_mma_wait(1, [dq])
    mbarrier.wait(shared.sums.empty.index(buffer), turn ^ 1)
    hand_over(dq, shared.sums, 2 * buffer + WHICH, ready)
    if LATE:
        arrive(shared.ds.empty[WHICH].index(buffer), ready)
    dk, rounded_ds = warpgroup_mma_wait(0, [dk, rounded_ds])
    arrive(shared.queries.empty.index(stage))
    return dk, dv


@gluon.jit
def finish_dq(shared, tile, WHICH: gl.constexpr):
    """Half of the last tile of dQ, which no step after it multiplies."""
    buffer = tile % STAGES
    turn = tile // STAGES & 1
    # At index 0 (of fewer than 2^30 tiles), which the compilers do not know here either.
    keys = shared.k_tiles.index(tile >> 30).reshape([KEYS, shared.k_tiles.shape[4]])
    mbarrier.wait(shared.ds.full[1 - WHICH].index(buffer), turn)
    dq = warpgroup_mma_wait(0, [multiply_dq(shared.ds.tiles.index(buffer), keys, WHICH)])
    mbarrier.wait(shared.sums.empty.index(buffer), turn ^ 1)
    hand_over(dq, shared.sums, 2 * buffer + WHICH)


@gluon.jit
def hand_over(dq, sums, tile, pred=True):
    """Lay down half of a tile of dQ for the warp that adds it."""
    sums.tiles.index(tile).store(by_thread(dq))
    fence_async_shared()
    gl.barrier()
    arrive(sums.full.index(tile), pred)


@gluon.jit
def store(dk_desc, dv_desc, dk, dv, shared, work, stage, WHICH: gl.constexpr):
    """Start to store dK and dV: at head_dim 64 through the last tile of dS, so that K and V of the next work can come
    meanwhile. At 128 both are too large for it, and go through K's and V's own tiles."""
    HEAD_DIM: gl.constexpr = dk.shape[1]
    dtype: gl.constexpr = shared.k_tiles.dtype
    meet()  # neither dS nor K and V are needed any more
    if HEAD_DIM == 64:
        both = shared.ds.tiles.index(stage)._reinterpret(dtype, [2, 1, 1, KEYS, HEAD_DIM], dk_desc.layout)
        dk_tile = both.index(0)
        dv_tile = both.index(1)
    else:
        dk_tile = shared.k_tiles.index(0)
        dv_tile = shared.v_tiles.index(0)
    dk_tile.reshape([KEYS, HEAD_DIM]).slice(WHICH * HALF, HALF).store(dk.to(dtype))
    dv_tile.reshape([KEYS, HEAD_DIM]).slice(WHICH * HALF, HALF).store(dv.to(dtype))
    fence_async_shared()
    meet()
    if WHICH == 0:
        spot = [work.batch, work.head, work.key_block * KEYS, 0]
        tma.async_copy_shared_to_global(dk_desc, spot, dk_tile)
        tma.async_copy_shared_to_global(dv_desc, spot, dv_tile)
        if HEAD_DIM > 64:
            tma.store_wait(0)
    if HEAD_DIM > 64:
        gl.barrier()
        arrive(shared.kv_empty)


@gluon.jit
def multiply_dq(ds_tile, keys, WHICH: gl.constexpr):
    """Start the product of half of a tile of dQ: half of the queries, or where those are few of the dimensions."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    if ds_tile.shape[1] > HALF:
        ds_tile = ds_tile.slice(WHICH * HALF, HALF, dim=1)
    else:
        keys = keys.slice(WHICH * HALF, HALF, dim=1)
    zeros = gl.zeros([HALF, HALF], gl.float32, layout)
    return warpgroup_mma(ds_tile.permute((1, 0)), keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def first_rows(WHICH: gl.constexpr, work, CAUSAL: gl.constexpr, scores_layout: gl.constexpr):
    """The first row that sees each key of a warpgroup, less block `last`'s first; NEVER where there is no key."""
    keys = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, scores_layout))
    first = keys * 0
    if CAUSAL:
        first = keys + work.diagonal
    return gl.where(keys < work.keys_left, first, NEVER)


@gluon.jit
def last_rows(WHICH: gl.constexpr, work, bounds, BLOCK_M: gl.constexpr, scores_layout: gl.constexpr):
    """The last row that sees each key of a warpgroup, and 1, less block `last`'s first."""
    keys = work.key_block * KEYS + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, scores_layout))
    return end_rows(keys, work.batch, bounds) - work.last * BLOCK_M


@gluon.jit
def mask(zeros, seen_from, passed, CAUSAL: gl.constexpr):
    """zeros, but -inf where a query must not see a key or there is no key. passed: rows from this block to `last`."""
    if CAUSAL:
        rows = gl.arange(0, zeros.shape[1], gl.SliceLayout(0, zeros.type.layout))[None, :]
        own = rows & 6  # a thread's columns but for this are constants, which take no registers
        return gl.where(rows - own >= (seen_from + passed)[:, None] - own, zeros, float("-inf"))
    return gl.where(seen_from[:, None] == 0, zeros, float("-inf"))


@gluon.jit
def mask_ends(bias, seen_until, passed):
    """bias, but -inf where a window or a document has ended before a query. passed: as for `mask`."""
    rows = gl.arange(0, bias.shape[1], gl.SliceLayout(0, bias.type.layout))[None, :]
    own = rows & 6  # as in `mask`: without it 464 B are spilled
    return gl.where(rows - own < (seen_until + passed)[:, None] - own, bias, float("-inf"))


@gluon.jit(do_not_specialize=[*Sizes._fields, "left", *LISTS])
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, sum_desc, Lse, Delta, Turns, DocumentStart, DocumentEnd,
    QueryBlocks, Seed,
    heads, sequences, together, in_group, q_len, kv_len, offset, row_blocks, key_blocks, left, stride_lb, stride_lh,
    width, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, LATE: gl.constexpr, BOUNDED: gl.constexpr,
    LISTED: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    """dK, dV and the float32 sum of dQ / scale. Grid (as many programs as run at a time, or fewer,).

    dK and dV are of all heads, K and V of one in GROUP. The sum has two SUM_BLOCKs a block of queries, each in the
    order of `by_thread`; blocks that see no key are not written. Lse, Delta: float32 (batch, heads, q_len),
    contiguous. Turns: int32, one a block of queries, and one more that counts claims, as `delta_kernel` leaves them.
    DocumentStart, DocumentEnd, left: see hopper_bounds.py, if BOUNDED. QueryBlocks: lists of blocks of queries, with
    these strides, if LISTED (hopper_blocks.py). Seed: dropout's, int64, if DROP.
    """
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    HEAD_DIM: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    bounds: gl.constexpr = None
    if BOUNDED:
        bounds = Bounds(DocumentStart, DocumentEnd, left, q_len)
    blocks: gl.constexpr = None
    if LISTED:
        blocks = Blocks(QueryBlocks, stride_lb, stride_lh, width)
    sizes = Sizes(
        heads, sequences, together, in_group, q_len, kv_len, offset, row_blocks, key_blocks, bounds, blocks, Seed
    )  # fmt: skip
    Counter = Turns + row_blocks * sequences

    k_tiles = gl.allocate_shared_memory(dtype, [1] + k_desc.block_type.shape, k_desc.layout)  # noqa: RUF005
    v_tiles = gl.allocate_shared_memory(dtype, [1] + v_desc.block_type.shape, v_desc.layout)  # noqa: RUF005
    queries = make_ring(q_desc, STAGES, 2)
    d_out_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], do_desc.layout)
    d_outs = Ring(d_out_tiles, make_barriers(STAGES, 1), queries.empty)  # released with those of Q
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], dtype)
    ds_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, BLOCK_M], ds_layout)
    sum_shape: gl.constexpr = [2 * STAGES, SUM_BLOCK[0], SUM_BLOCK[1]]  # two halves a tile
    sum_tiles = gl.allocate_shared_memory(gl.float32, sum_shape, sum_desc.layout)
    sums = Ring(sum_tiles, make_barriers(2 * STAGES, 1), make_barriers(STAGES, 1))
    # No barrier may be made that is not used: Triton gives its memory to others (compile_report looks for it).
    if LATE:
        # An array for each warpgroup: in one of both Triton would put a barrier between arrival and wait (LOG.md).
        ds_full = (make_barriers(STAGES, 1), make_barriers(STAGES, 1))
        ds_empty = (make_barriers(STAGES, 1), make_barriers(STAGES, 1))
        ds = Ring(ds_tiles, ds_full, ds_empty)
    else:
        ds = Ring(ds_tiles, None, None)
    kv_full = make_barriers(1, 1).index(0)
    kv_empty = make_barriers(1, 2).index(0)
    rows_full = make_barriers(STAGES, 1)
    claims = make_claims(5)  # two consumers, load_rows, two that add dQ
    shared = Shared(
        k_tiles, v_tiles, kv_full, kv_empty, queries, d_outs, lse, delta, rows_full, ds, sums, claims
    )
    fence_async_shared()  # TMA is to see the barriers initialised

    gl.warp_specialize(
        [
            (consume, (dk_desc, dv_desc, shared, sizes, scale, gl.constexpr(0), CAUSAL, MASKED, LATE, DROP)),
            (consume, (dk_desc, dv_desc, shared, sizes, scale, gl.constexpr(1), CAUSAL, MASKED, LATE, DROP)),
            (load_tiles, (q_desc, k_desc, v_desc, do_desc, Counter, shared, sizes, GROUP, BLOCK_M, CAUSAL)),
            (load_rows, (Lse, Delta, shared, sizes, CAUSAL, DROP)),
            (add_dq, (sum_desc, Turns, sums, claims, sizes, BLOCK_M, CAUSAL, gl.constexpr(0))),
            (add_dq, (sum_desc, Turns, sums, claims, sizes, BLOCK_M, CAUSAL, gl.constexpr(1))),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )
