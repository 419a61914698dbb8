"""The backward for Hopper (sm_90a), in Gluon: five products in one kernel, and still bit for bit repeatable.

A program owns KEYS keys, half of them in each of two warpgroups. One warp moves tiles of Q and dO into rings of
shared memory by TMA, one lays the rows' log-sum-exp and delta beside them. The warpgroups issue their products
asynchronously (FlashAttention-3's schedule, Shah et al. 2024) on the transposes S^T = K Q^T and dP^T = V dO^T, as
backward.py does.

dQ sums over keys, so over programs: two more warps add each tile to a float32 sum in memory by TMA. They do it in one
order, programs with earlier keys first, handed on by a counter for each block of queries. GPUs start programs in that
order, though CUDA does not promise it, so none waits for one that starts after it. Most queries see the earlier keys
under the causal mask: the longest programs come first, and the GPU is busy to the end. All begin with the last of the
queries, so each follows the one before it; two tiles of dQ in shared memory let it lag.

dQ needs dS of both warpgroups, which would meet in each step. In long loops a warpgroup multiplies dQ of the step
before instead, whose dS the other has laid down long ago.

Plain attention only; the rest is the portable kernels' (backward.py). Heads that share keys have a program each, and
dK and dV of their own.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper import LOG2_E, Ring, fetch, make_barriers, make_ring

HALF = gl.constexpr(64)  # keys of a warpgroup: what one wgmma multiplies
KEYS = gl.constexpr(128)
# Half of a tile of dQ, one warpgroup's, as TMA adds it to the sum: as few rows as TMA allows.
SUM_BLOCK = gl.constexpr((16, 256))
NEVER = gl.constexpr(1 << 24)  # more rows than a program sees
STAGES = gl.constexpr(2)  # tiles of Q, and of dO, in shared memory; as many as of dS and of dQ
# head_dim -> queries a tile. S and dP of a warpgroup fill half of its registers or a quarter, dK and dV the rest.
BLOCK_M = {64: 128, 128: 64}
LATE_FROM = 16  # steps of a program, on average; from there on late is faster (LOG.md)


def steps_late(causal: bool, row_blocks: int) -> int:
    """1 where dQ's product is of the step before, so that no warpgroup waits for the other; else 0.

    It costs a program two products more: in its first step one that goes nowhere, and one after the loop that nothing
    runs beside.
    """
    return int(row_blocks // (2 if causal else 1) >= LATE_FROM)


class Work(NamedTuple):
    """What a program does: a block of keys of a head, with `steps` blocks of queries from block `last` down.

    All but the first `clear` of them need a mask.
    """

    batch: gl.tensor
    head: gl.tensor
    sequence: gl.tensor  # head of the whole batch
    key_block: gl.tensor
    last: gl.tensor
    steps: gl.tensor
    clear: gl.tensor
    q_len: gl.tensor
    keys_left: gl.tensor  # from the first of this block on
    diagonal: gl.tensor  # the row whose causal mask ends at the first key, less block `last`'s first row


@gl._core.builtin
def tma_add(descriptor, coordinates, source, _semantic=None):
    """As tma.async_copy_shared_to_global, but adds; Gluon has no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


# Spin until the counter is at the turn; then what was added before is there.
WAIT_TURN = gl.constexpr("""{
    .reg .pred other;
    .reg .b32 now;
    again:
    ld.acquire.gpu.global.b32 now, [$1];
    setp.ne.b32 other, now, $2;
    @other bra again;
    fence.proxy.async;
    mov.b32 $0, now;
}""")
# Set the counter to the turn when what this warp adds is in memory.
PASS_TURN = gl.constexpr("""{
    cp.async.bulk.wait_group 0;
    bar.warp.sync 0xffffffff;
    fence.proxy.async;
    st.release.gpu.global.b32 [$1], $2;
    mov.b32 $0, $2;
}""")


@gluon.jit
def take(TURN: gl.constexpr, Counter, turn):
    """WAIT_TURN or PASS_TURN on a counter."""
    gl.inline_asm_elementwise(TURN, "=r,l,r", [Counter, turn], gl.int32, False, 1)


@gluon.jit
def meet():
    """Wait for the other warpgroup."""
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    token = gl.full([128], 0, gl.int32, one_each)
    gl.inline_asm_elementwise("bar.sync 8, 256; mov.b32 $0, $1;", "=r,r", [token], gl.int32, False, 1)


@gluon.jit
def arrive(barrier, pred=True):
    """One thread arrives for its warpgroup. Before it stands a barrier of the warpgroup, or the wait for the product
    that read the memory: CUTLASS's PipelineTmaAsync releases so too.

    mbarrier.arrive would do, but Triton takes it for an access to all shared memory and puts barriers around it.
    expect announces no bytes and arrives as well.
    """
    mbarrier.expect(barrier, 0, pred=pred)


@gluon.jit
def load_tiles(
    q_desc, k_desc, v_desc, do_desc, k_tiles, v_tiles, kv_full, queries, d_outs, work, GROUP: gl.constexpr
):
    """Bring K and V once, and the tiles of Q and dO as their stages become free."""
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    first_key = work.key_block * KEYS
    mbarrier.expect(kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    kv_place = [work.batch, work.head // GROUP, first_key, 0]
    tma.async_copy_global_to_shared(k_desc, kv_place, kv_full, k_tiles.index(0))
    tma.async_copy_global_to_shared(v_desc, kv_place, kv_full, v_tiles.index(0))
    for step in range(work.steps):
        stage = step % STAGES
        phase = step // STAGES & 1
        place = [work.batch, work.head, (work.last - step) * BLOCK_M, 0]
        fetch(q_desc, place, queries, stage, phase)
        fetch(do_desc, place, d_outs, stage, phase)


@gluon.jit
def load_rows(Lse, Delta, lse_ring, delta_ring, rows_full, queries, work):
    """Lay lse, in powers of two, and delta beside the tiles of queries."""
    BLOCK_M: gl.constexpr = lse_ring.shape[1]
    offsets = gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))
    first = work.sequence * work.q_len
    block = work.last
    for step in range(work.steps):
        stage = step % STAGES
        rows = block * BLOCK_M + offsets
        lse = gl.load(Lse + (first + rows), mask=rows < work.q_len, other=float("-inf")) * LOG2_E
        delta = gl.load(Delta + (first + rows), mask=rows < work.q_len, other=0.0)
        # Of a row that sees nothing, or lies beyond the end, exp2(S - inf) is 0.
        lse = gl.where(lse == float("-inf"), float("inf"), lse)
        mbarrier.wait(queries.empty.index(stage), (step // STAGES & 1) ^ 1)
        lse_ring.index(stage).store(lse)
        delta_ring.index(stage).store(delta)
        mbarrier.arrive(rows_full.index(stage))
        block -= 1


@gluon.jit
def add_dq(sum_desc, Turns, sums, work, BLOCK_M: gl.constexpr, WHICH: gl.constexpr):
    """Add every other tile of dQ, from the WHICH-th on, each in its turn: as many as blocks of keys come before."""
    row_blocks = gl.cdiv(work.q_len, BLOCK_M)
    Turns += work.sequence * row_blocks
    for step in range(WHICH, work.steps, 2):
        block = work.last - step
        first = (work.sequence * row_blocks + block) * (2 * SUM_BLOCK[0])
        take(WAIT_TURN, Turns + block, work.key_block)
        for half in gl.static_range(2):
            tile = 2 * WHICH + half
            mbarrier.wait(sums.full.index(tile), step // 2 & 1)
            place = [first + half * SUM_BLOCK[0], 0]
            if work.key_block == 0:
                tma.async_copy_shared_to_global(sum_desc, place, sums.tiles.index(tile))
            else:
                tma_add(sum_desc, place, sums.tiles.index(tile))
        tma.store_wait(0)
        mbarrier.arrive(sums.empty.index(WHICH))
        take(PASS_TURN, Turns + block, work.key_block + 1)


@gluon.jit
def consume(
    dk_desc, dv_desc, k_tiles, v_tiles, kv_full, queries, d_outs, lse_ring, delta_ring, rows_full, ds_ring,
    sums, work, scale, WHICH: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """dK and dV of half of the keys, and half of each tile of dQ: of the tile LATE steps before."""
    BLOCK_M: gl.constexpr = queries.tiles.shape[3]
    HEAD_DIM: gl.constexpr = queries.tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    dk = gl.zeros([HALF, HEAD_DIM], gl.float32, layout)
    dv = gl.zeros([HALF, HEAD_DIM], gl.float32, layout)
    if MASKED:
        seen_from = first_rows(WHICH, work, CAUSAL, scores_layout)
    mbarrier.wait(kv_full, 0)

    for step in range(work.steps):
        stage = step % STAGES
        phase = step // STAGES & 1
        # 0, but the compilers do not know: they would compute the addresses of what all steps multiply before the
        # loop, more than there are uniform registers, and spill them. At 64 dQ's product alone needs it (LOG.md).
        hidden = (step + work.q_len) >> 31
        same = hidden if HEAD_DIM > 64 else 0
        k = k_tiles.index(same).reshape([KEYS, HEAD_DIM]).slice(WHICH * HALF, HALF)
        v = v_tiles.index(same).reshape([KEYS, HEAD_DIM]).slice(WHICH * HALF, HALF)
        q = queries.tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
        d_out = d_outs.tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
        zeros = gl.zeros([HALF, BLOCK_M], gl.float32, scores_layout)
        # The mask goes in before the product: no branch may stand between products under way.
        bias = zeros
        if MASKED and step >= work.clear:
            bias = mask(zeros, seen_from, step * BLOCK_M, CAUSAL)
        mbarrier.wait(queries.full.index(stage), phase)
        s = warpgroup_mma(k, q.permute((1, 0)), bias, use_acc=MASKED, is_async=True)
        mbarrier.wait(d_outs.full.index(stage), phase)
        dp = warpgroup_mma(v, d_out.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(rows_full.index(stage), phase)
        s = warpgroup_mma_wait(1, [s])
        lse = lse_ring.index(stage).load(gl.SliceLayout(0, scores_layout))
        p = gl.exp2(s * (scale * LOG2_E) - lse[None, :])
        rounded_p = gl.convert_layout(p.to(dtype), operand)
        # Before the wait for dP: ptxas would move that wait in front of the exponentials.
        dv = warpgroup_mma(rounded_p, d_out, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
        delta = delta_ring.index(stage).load(gl.SliceLayout(0, scores_layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
        if LATE:
            mbarrier.wait(ds_ring.empty.index(2 * stage + 1 - WHICH), phase ^ 1)
        ds_ring.tiles.index(stage).slice(WHICH * HALF, HALF).store(ds)
        fence_async_shared()
        # Of step -1 the product goes nowhere, and nothing is waited for.
        done = step - LATE
        buffer = done & 1
        turn = done >> 1 & 1
        if LATE:
            gl.barrier()
            arrive(ds_ring.full.index(2 * stage + WHICH))
            mbarrier.wait(ds_ring.full.index(2 * buffer + 1 - WHICH), turn)
        else:
            meet()
        keys = k_tiles.index(hidden).reshape([KEYS, HEAD_DIM])
        dq = multiply_dq(ds_ring.tiles.index(buffer), keys, WHICH)
        rounded_ds = gl.convert_layout(ds, operand)
        dk = warpgroup_mma(rounded_ds, q, dk, is_async=True)
        # The left operands stay named until they have been read: ptxas before 13.3 reuses their registers at once.
        dv, dq, rounded_p = warpgroup_mma_wait(1, [dv, dq, rounded_p])
        mbarrier.wait(sums.empty.index(buffer), turn ^ 1 | (done < 0).to(gl.int32))
        sums.tiles.index(2 * buffer + WHICH).store(by_thread(dq))
        fence_async_shared()
        gl.barrier()
        arrive(sums.full.index(2 * buffer + WHICH), done >= 0)
        if LATE:
            arrive(ds_ring.empty.index(2 * buffer + WHICH), done >= 0)
        dk, rounded_ds = warpgroup_mma_wait(0, [dk, rounded_ds])
        arrive(queries.empty.index(stage))

    if LATE and work.steps > 0:
        buffer = (work.steps - 1) & 1
        turn = (work.steps - 1) // 2 & 1
        mbarrier.wait(ds_ring.full.index(2 * buffer + 1 - WHICH), turn)
        dq = multiply_dq(ds_ring.tiles.index(buffer), k_tiles.index(0).reshape([KEYS, HEAD_DIM]), WHICH)
        dq = warpgroup_mma_wait(0, [dq])
        mbarrier.wait(sums.empty.index(buffer), turn ^ 1)
        sums.tiles.index(2 * buffer + WHICH).store(by_thread(dq))
        fence_async_shared()
        gl.barrier()
        arrive(sums.full.index(2 * buffer + WHICH))

    meet()  # K and V are not needed any more
    k_tile = k_tiles.index(0)
    v_tile = v_tiles.index(0)
    k_tile.reshape([KEYS, HEAD_DIM]).slice(WHICH * HALF, HALF).store((dk * scale).to(dtype))
    v_tile.reshape([KEYS, HEAD_DIM]).slice(WHICH * HALF, HALF).store(dv.to(dtype))
    fence_async_shared()
    meet()
    if WHICH == 0:
        place = [work.batch, work.head, work.key_block * KEYS, 0]
        tma.async_copy_shared_to_global(dk_desc, place, k_tile)
        tma.async_copy_shared_to_global(dv_desc, place, v_tile)
        tma.store_wait(0)


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
def by_thread(dq):
    """dQ (HALF, HALF) as SUM_BLOCK in another order: four numbers of a thread, four of the next, and so on.

    So threads store 16 bytes side by side, where stores row by row met bank conflicts. `round_kernel` makes rows of
    them again.
    """
    # (warp, rows 8 apart, row, columns 8 apart, thread of four in a row, column): a thread has 2 x 8 x 2 of them
    parts = dq.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return parts.reshape([SUM_BLOCK[0], SUM_BLOCK[1]])


@gluon.jit
def first_rows(WHICH: gl.constexpr, work, CAUSAL: gl.constexpr, scores_layout: gl.constexpr):
    """The first row that sees each key of a warpgroup, less block `last`'s first; NEVER where there is no key."""
    keys = WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, scores_layout))
    first = keys * 0
    if CAUSAL:
        first = keys + work.diagonal
    return gl.where(keys < work.keys_left, first, NEVER)


@gluon.jit
def mask(zeros, seen_from, passed, CAUSAL: gl.constexpr):
    """zeros, but -inf where a query must not see a key or there is no key. passed: rows from this block to `last`."""
    if CAUSAL:
        rows = gl.arange(0, zeros.shape[1], gl.SliceLayout(0, zeros.type.layout))[None, :]
        own = rows & 6  # a thread's columns but for this are constants, which take no registers
        return gl.where(rows - own >= (seen_from + passed)[:, None] - own, zeros, float("-inf"))
    return gl.where(seen_from[:, None] == 0, zeros, float("-inf"))


@gluon.jit
def plan(heads, sequences, together, q_len, kv_len, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """The work of this program. Heads come in groups; in a group the first keys come first."""
    key_blocks = gl.cdiv(kv_len, KEYS)
    row_blocks = gl.cdiv(q_len, BLOCK_M)
    index = gl.program_id(0)
    first_sequence = index // (together * key_blocks) * together
    index -= first_sequence * key_blocks
    in_group = gl.minimum(together, sequences - first_sequence)
    sequence = first_sequence + index % in_group
    key_block = index // in_group
    first_key = key_block * KEYS
    steps = row_blocks
    clear = row_blocks
    if CAUSAL:
        offset = kv_len - q_len
        steps -= gl.maximum(first_key - offset, 0) // BLOCK_M
        clear -= gl.cdiv(gl.maximum(first_key + KEYS - 1 - offset, 0), BLOCK_M)
    if first_key + KEYS > kv_len:
        clear = 0
    last = row_blocks - 1
    diagonal = first_key - (kv_len - q_len) - last * BLOCK_M
    return Work(
        sequence // heads, sequence % heads, sequence, key_block, last, steps, clear, q_len, kv_len - first_key,
        diagonal,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["heads", "sequences", "together", "q_len", "kv_len"])
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, sum_desc, Lse, Delta, Turns,
    heads, sequences, together, q_len, kv_len, scale,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """dK, dV and the float32 sum of dQ / scale. Grid (ceil(kv_len / KEYS) * sequences,).

    dK and dV are of all heads, K and V of one in GROUP. The sum has two SUM_BLOCKs a block of queries, each in the
    order of `by_thread`; blocks that see no key are not written. Lse, Delta: float32 (batch, heads, q_len),
    contiguous. Turns: int32 zeros, one a block of queries.
    """
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[2]
    HEAD_DIM: gl.constexpr = q_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    work = plan(heads, sequences, together, q_len, kv_len, BLOCK_M, CAUSAL)

    k_tiles = gl.allocate_shared_memory(dtype, [1] + k_desc.block_type.shape, k_desc.layout)  # noqa: RUF005
    v_tiles = gl.allocate_shared_memory(dtype, [1] + v_desc.block_type.shape, v_desc.layout)  # noqa: RUF005
    queries = make_ring(q_desc, STAGES, 2)
    d_out_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, HEAD_DIM], do_desc.layout)
    d_outs = Ring(d_out_tiles, make_barriers(STAGES, 1), queries.empty)  # released with those of Q
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], dtype)
    ds_tiles = gl.allocate_shared_memory(dtype, [2, KEYS, BLOCK_M], ds_layout)
    ds_ring = Ring(ds_tiles, make_barriers(4, 1), make_barriers(4, 1))  # two halves a tile
    sum_tiles = gl.allocate_shared_memory(gl.float32, [4, SUM_BLOCK[0], SUM_BLOCK[1]], sum_desc.layout)
    sums = Ring(sum_tiles, make_barriers(4, 1), make_barriers(2, 1))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    rows_full = make_barriers(STAGES, 1)
    kv_full = make_barriers(1, 1).index(0)
    fence_async_shared()

    gl.warp_specialize(
        [
            (consume, (
                dk_desc, dv_desc, k_tiles, v_tiles, kv_full, queries, d_outs, lse_ring, delta_ring, rows_full,
                ds_ring, sums, work, scale, gl.constexpr(0), CAUSAL, MASKED, LATE,
            )),
            (consume, (
                dk_desc, dv_desc, k_tiles, v_tiles, kv_full, queries, d_outs, lse_ring, delta_ring, rows_full,
                ds_ring, sums, work, scale, gl.constexpr(1), CAUSAL, MASKED, LATE,
            )),
            (load_tiles, (
                q_desc, k_desc, v_desc, do_desc, k_tiles, v_tiles, kv_full, queries, d_outs, work, GROUP,
            )),
            (load_rows, (Lse, Delta, lse_ring, delta_ring, rows_full, queries, work)),
            (add_dq, (sum_desc, Turns, sums, work, BLOCK_M, gl.constexpr(0))),
            (add_dq, (sum_desc, Turns, sums, work, BLOCK_M, gl.constexpr(1))),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["q_len"])
def delta_kernel(
    Out, DOut, DLse, Delta, Turns,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, q_len,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O), less the gradient of lse (see backward.py), and all turns to 0.

    Grid (heads, ceil(q_len / BLOCK_M), batch).
    """
    head, block, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    sequence = batch * tl.num_programs(0) + head
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < q_len)[:, None]
    dims = tl.arange(0, HEAD_DIM)[None, :]
    Out += batch * stride_ob + head * stride_oh
    DOut += batch * stride_dob + head * stride_doh
    out = tl.load(Out + rows[:, None].to(tl.int64) * stride_om + dims, mask=inside, other=0.0)
    d_out = tl.load(DOut + rows[:, None].to(tl.int64) * stride_dom + dims, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if DLse is not None:
        delta -= tl.load(DLse + sequence * q_len + rows, mask=rows < q_len, other=0.0)
    tl.store(Delta + sequence * q_len + rows, delta, mask=rows < q_len)
    tl.store(Turns + sequence * tl.num_programs(1) + block, 0)


@triton.jit(do_not_specialize=["q_len", "blind"])
def round_kernel(
    Sum, DQ, stride_qb, stride_qh, stride_qm, q_len, blind, scale,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """dQ in rows = scale * its float32 sum, which the `blind` first queries have none of. Grid as delta_kernel's."""
    head, block, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    sequence = batch * tl.num_programs(0) + head
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    dims = tl.arange(0, HEAD_DIM)[None, :]
    Sum += (sequence * tl.num_programs(1) + block) * (BLOCK_M * HEAD_DIM)
    dq = (tl.load(Sum + tl.arange(0, BLOCK_M * HEAD_DIM)) * scale).to(DQ.dtype.element_ty)
    # Two halves, of the queries or of the dimensions, each as `by_thread` has it.
    dq = dq.reshape(2, 8, 4, 8, 4, 2, 2)
    dq = dq.permute(0, 2, 5, 3, 1, 4, 6) if BLOCK_M > HEAD_DIM else dq.permute(2, 5, 3, 0, 1, 4, 6)
    dq = tl.where(rows >= blind, dq.reshape(BLOCK_M, HEAD_DIM), 0.0)
    DQ += batch * stride_qb + head * stride_qh
    tl.store(DQ + rows.to(tl.int64) * stride_qm + dims, dq, mask=rows < q_len)
