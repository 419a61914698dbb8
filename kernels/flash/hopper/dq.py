"""dQ of the Hopper backward: a float32 sum over blocks of keys, in a fixed order and so bitwise repeatable.

The consumers multiply a tile's halves and stage them in shared memory. Two warps of each program add the tiles to
global memory by TMA reductions, every other tile each. A turn counter for each block of queries serialises the
additions in ascending order of keys (descending, where a head goes upwards: backward_schedule.py): a tile waits until
all blocks of keys that its queries see and that come earlier have been added. Those are earlier work items, already
claimed by running programs (scheduler.py), so the wait cannot deadlock (tests/kernels/test_hopper_orders.py).

Ascending order suits the causal mask: earlier keys are seen by the most queries, so the longest items run first and
the GPU is busy to the end. Block masks aside, an item starts at its last block of queries, which is at or after that
of the item before it, and so follows that item through the queries; two dQ tiles in shared memory let it lag.

Also here, in plain Triton: the pass before the kernel, which computes delta and resets the counters, and the pass
after it, which rounds the sum to dQ's dtype.
"""

import functools

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .backward_schedule import HALF, KEYS, STAGES, block_at, decode_work_item
from .block_masks import LISTS, list_of
from .bounds import first_keys
from .columns import accumulator_layout, columns_of
from .pipeline import arrive
from .primitives import await_previous, tma_add, tma_store
from .scheduler import CLAIM_STAGES, read_claim

# A warpgroup's half of a dQ tile, up to (HALF, HALF), in shared memory and in the sum: as few rows as TMA allows.
SUM_BLOCK = gl.constexpr((16, 256))


@gluon.constexpr_function
def columns_of_half(columns, half):
    """Columns of a warpgroup's half of a dQ tile: half of its queries with all columns or, if it has 64 queries, all
    of them with the first 64 columns or the others."""
    return columns if columns <= HALF.value else (HALF.value, columns - HALF.value)[half]


@gluon.constexpr_function
def rows_of_half(columns):
    """How many rows of a SUM_BLOCK, from the first on, so many columns take."""
    return columns * HALF.value // SUM_BLOCK.value[1]


@functools.cache
def sum_block(columns: int) -> tuple[int, int]:
    """What TMA moves at a time for a tile of so many columns: its second half, which is no larger than the first."""
    return rows_of_half(columns_of_half(columns, 1)), SUM_BLOCK.value[1]


# Spin until the counter reaches the turn. The acquire makes all earlier additions visible.
ACQUIRE = gl.constexpr("""{
    .reg .pred other;
    .reg .b32 now;
    again:
    ld.acquire.gpu.global.b32 now, [$1];
    setp.ne.b32 other, now, $2;
    @other bra again;
    fence.proxy.async;
    mov.b32 $0, now;
}""")
# Wait until this warp's additions are complete in global memory, then pass the turn on.
RELEASE = gl.constexpr("""{
    cp.async.bulk.wait_group 0;
    bar.warp.sync 0xffffffff;
    fence.proxy.async;
    st.release.gpu.global.b32 [$1], $2;
    mov.b32 $0, $2;
}""")


@gluon.jit
def multiply_dq(ds_tile, keys, WHICH: gl.constexpr, COLUMNS: gl.constexpr):
    """Issue the product of a warpgroup's half of a dQ tile, (HALF, `columns_of_half`)."""
    OWN: gl.constexpr = columns_of_half(COLUMNS, WHICH)
    if ds_tile.shape[1] > HALF:
        ds_tile = ds_tile.slice(WHICH * HALF, HALF, dim=1)
        keys = columns_of(keys, 0, OWN)
    else:
        keys = keys.slice(WHICH * HALF, OWN, dim=1)
    zeros = gl.zeros([HALF, OWN], gl.float32, accumulator_layout(OWN))
    return warpgroup_mma(ds_tile.permute((1, 0)), keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def stage_dq(dq, dqs, tile, pred=True):
    """Store half of a dQ tile to shared memory and signal the warp that adds it, unless pred is False."""
    dqs.tiles.index(tile).slice(0, rows_of_half(dq.shape[1])).store(to_thread_order(dq))
    fence_async_shared()
    gl.barrier()
    arrive(dqs.full.index(tile), pred)


@gluon.jit
def finish_dq(shared, tile, WHICH: gl.constexpr, COLUMNS: gl.constexpr):
    """If DQ_DELAY: half of the last dQ tile, which no further step multiplies."""
    dq_stage = tile % STAGES
    dq_phase = tile // STAGES & 1
    # Index 0 (there are fewer than 2^30 tiles), hidden from the compilers here too.
    keys = shared.k_tiles.index(tile >> 30).reshape([KEYS, shared.k_tiles.shape[4]])
    mbarrier.wait(shared.ds.full[1 - WHICH].index(dq_stage), dq_phase)
    dq = warpgroup_mma_wait(0, [multiply_dq(shared.ds.tiles.index(dq_stage), keys, WHICH, COLUMNS)])
    mbarrier.wait(shared.dqs.empty.index(dq_stage), dq_phase ^ 1)
    stage_dq(dq, shared.dqs, 2 * dq_stage + WHICH)


@gluon.jit
def to_thread_order(dq):
    """Permute dQ (HALF, columns) to the first rows of a SUM_BLOCK: four elements of a thread, then four of the next
    thread, and so on. Two rows hold eight columns.

    Threads thus store adjacent 16-byte vectors; row-major stores had bank conflicts. `round_kernel` undoes the
    permutation.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    # (warp, row / 8 % 2, row % 8, column / 8, thread within a row, column % 2): a thread holds 2 x COLUMNS / 8 x 2
    parts = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return parts.reshape([rows_of_half(COLUMNS), SUM_BLOCK[1]])


@gluon.jit
def acquire_turn(Counter, turn):
    gl.inline_asm_elementwise(ACQUIRE, "=r,l,r", [Counter, turn], gl.int32, False, 1)


@gluon.jit
def release_turn(Counter, next_turn):
    gl.inline_asm_elementwise(RELEASE, "=r,l,r", [Counter, next_turn], gl.int32, False, 1)


@gluon.jit
def add_half(dq_sum_desc, block, staged, first, turn, exists, COLUMNS: gl.constexpr):
    """Add half of a dQ tile, with COLUMNS columns, to its block of the sum, or store it there in the first turn."""
    ROWS: gl.constexpr = dq_sum_desc.block_type.shape[0]
    for piece in gl.static_range(rows_of_half(COLUMNS) // ROWS):
        coordinates = [block * SUM_BLOCK[0] + piece * ROWS, 0]
        part = staged.slice(piece * ROWS, ROWS)
        if exists:
            if turn == first:
                tma_store(dq_sum_desc, coordinates, part)
            else:
                tma_add(dq_sum_desc, coordinates, part)


@gluon.jit
def reduce_dq(
    dq_sum_desc, Turns, dqs, claims, sizes,
    BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, WHICH: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """One of the two accumulating warps: add every other dQ tile, those of parity WHICH, each in its turn."""
    await_previous()  # delta_kernel, which sets the turns
    ordinal = 0
    tiles_before = 0
    index = read_claim(claims, ordinal)
    while index >= 0:
        mbarrier.arrive(claims.empty.index(ordinal % CLAIM_STAGES))
        item = decode_work_item(index, sizes, BLOCK_M, CAUSAL)
        for step in range((tiles_before + WHICH) & 1, item.steps, 2):
            row_block = block_at(item, step, sizes, BLOCK_M)
            first, turn = turns_of(item, row_block, sizes, BLOCK_M)
            flat_block = item.flat_head * sizes.row_blocks + row_block
            # A list may name a block beyond the end, which has no sum.
            exists = True if sizes.blocks is None else row_block < sizes.row_blocks
            if exists:
                acquire_turn(Turns + flat_block, turn)
            for half in gl.static_range(2):
                tile = 2 * WHICH + half
                mbarrier.wait(dqs.full.index(tile), (tiles_before + step) >> 1 & 1)
                add_half(
                    dq_sum_desc, 2 * flat_block + half, dqs.tiles.index(tile), first, turn, exists,
                    columns_of_half(COLUMNS, half),
                )  # fmt: skip
            tma.store_wait(0)
            mbarrier.arrive(dqs.empty.index(WHICH))
            if exists:
                release_turn(Turns + flat_block, turn + 1)
        tiles_before += item.steps
        ordinal += 1
        index = read_claim(claims, ordinal)


@gluon.jit
def turns_of(item, row_block, sizes, BLOCK_M: gl.constexpr):
    """The first turn of a block of queries, and this work item's: its block of keys (going upwards, counted from the
    last one that the queries see), or that block's position in the queries' list."""
    first = 0
    turn = item.key_block
    if item.upwards is not None:
        last_seen = gl.minimum(
            (row_block * BLOCK_M + (BLOCK_M - 1) + sizes.offset) // KEYS, sizes.key_blocks - 1
        )
        turn = gl.where(item.upwards, last_seen - turn, turn)
    if sizes.bounds is not None:
        first = first_keys(row_block * BLOCK_M, item.batch, sizes.bounds) // KEYS
    if sizes.blocks is not None:
        # After its own list, a block of keys has its positions in the lists of the queries (`masks.block_lists`).
        List = list_of(item.key_block, item.head, item.batch, sizes.blocks)
        behind = 1 + sizes.blocks.width // 2
        turn = gl.load(
            List + behind + row_block // (KEYS // BLOCK_M), mask=row_block < sizes.row_blocks, other=0
        )
    return first, turn


@triton.jit(do_not_specialize=["q_len", "left"])
def delta_kernel(
    Out, OutLow, DOut, Lse, DLse, Delta, Turns, DocumentStart, Lengths,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, q_len, left,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    OVERLAPPED: tl.constexpr = False,
):  # fmt: skip
    """delta = rowsum(dO * O) - d_lse; with Turns also sets the work item counter to 0, and each turn to the first
    block of KEYS keys that the queries see.

    OutLow: what rounding took from O, laid out as Out, or None. Lse, DLse: both or neither (see portable/backward.py
    for why d_lse enters delta). DocumentStart, Lengths, left: see bounds.py. WIDTH: `tile_width` of HEAD_DIM. Grid
    (heads, ceil(q_len / BLOCK_M), batch). OVERLAPPED: lets the next kernel start (primitives.py).
    """
    if OVERLAPPED:
        gdc_launch_dependents()
    head, block, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    flat_head = batch * tl.num_programs(0) + head
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < q_len)[:, None]
    dims = tl.arange(0, WIDTH)[None, :]
    if WIDTH > HEAD_DIM:
        inside = inside & (dims < HEAD_DIM)
    if HEAD_DIM % 16 != 0:  # Triton looks for multiples of 16 only, and loads single elements otherwise
        stride_ob, stride_oh, stride_om = stride_ob // 8 * 8, stride_oh // 8 * 8, stride_om // 8 * 8
        stride_dob, stride_doh, stride_dom = stride_dob // 8 * 8, stride_doh // 8 * 8, stride_dom // 8 * 8
    Out += batch * stride_ob + head * stride_oh
    DOut += batch * stride_dob + head * stride_doh
    out = tl.load(Out + rows[:, None].to(tl.int64) * stride_om + dims, mask=inside, other=0.0)
    d_out = tl.load(DOut + rows[:, None].to(tl.int64) * stride_dom + dims, mask=inside, other=0.0)
    out = out.to(tl.float32)
    if OutLow is not None:
        OutLow += batch * stride_ob + head * stride_oh
        low = tl.load(OutLow + rows[:, None].to(tl.int64) * stride_om + dims, mask=inside, other=0.0)
        out += low.to(tl.float32)
    delta = tl.sum(out * d_out.to(tl.float32), 1)
    if DLse is not None:
        lse = tl.load(Lse + flat_head * q_len + rows, mask=rows < q_len, other=float("-inf"))
        # Where lse is -inf the row is fully masked, and its d_lse may be NaN.
        delta -= tl.load(DLse + flat_head * q_len + rows, mask=lse != float("-inf"), other=0.0)
    tl.store(Delta + flat_head * q_len + rows, delta, mask=rows < q_len)
    if Turns is not None:
        first = tl.maximum(block * BLOCK_M - left, 0)
        if DocumentStart is not None:
            first = tl.maximum(first, tl.load(DocumentStart + batch * q_len + block * BLOCK_M))
        if Lengths is not None:
            first = tl.minimum(first, tl.maximum(tl.load(Lengths + batch), 0))
        tl.store(Turns + flat_head * tl.num_programs(1) + block, first // KEYS)
        if flat_head + block == 0:  # the work item counter is stored after the turns
            tl.store(Turns + tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2), 0)


@triton.jit(do_not_specialize=["q_len", "masked_rows", "left", *LISTS])
def round_kernel(
    Sum, DQ, KeyBlocks, KvLengths, KeyStart, KeyEnd, stride_qb, stride_qh, stride_qm, q_len, masked_rows, left,
    stride_lb, stride_lh, width, scale,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    OVERLAPPED: tl.constexpr = False,
):  # fmt: skip
    """dQ = scale * its float32 sum, rounded and back in row order. Grid as delta_kernel's. What it reads in place
    of columns that were not multiplied is not stored.

    Fully masked rows have no sum and get 0: the first `masked_rows`, with KeyBlocks those with an empty list, with
    KvLengths those of a batch without keys, with left too (of a window beside padding, else None) those whose window
    begins in the padding, with KeyStart and KeyEnd, the bounds by query (bounds.py), those that see no key.
    OVERLAPPED: started before the kernel that adds up the sum has ended.
    """
    if OVERLAPPED:
        gdc_wait()
    head, block, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    flat_head = batch * tl.num_programs(0) + head
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    dims = tl.arange(0, WIDTH)[None, :]
    Sum += (flat_head * tl.num_programs(1) + block) * (BLOCK_M * WIDTH)
    dq = (tl.load(Sum + tl.arange(0, BLOCK_M * WIDTH)) * scale).to(DQ.dtype.element_ty)
    # Two halves, of the queries or of the dimensions, each in the order of `to_thread_order`.
    dq = dq.reshape(2, 8, 4, 8, 4, 2, 2)
    dq = dq.permute(0, 2, 5, 3, 1, 4, 6) if BLOCK_M > WIDTH else dq.permute(2, 5, 3, 0, 1, 4, 6)
    if KeyBlocks is not None:
        List = KeyBlocks + batch * stride_lb + head * stride_lh + block * BLOCK_M // KEYS * width
        masked_rows = tl.where(tl.load(List) > 0, masked_rows, q_len)
    if KvLengths is not None and left is None:
        masked_rows = tl.where(tl.load(KvLengths + batch) > 0, masked_rows, q_len)
    seeing = rows >= masked_rows
    if left is not None:
        seeing = tl.maximum(rows - left, 0) < tl.load(KvLengths + batch)
    if KeyEnd is not None:
        of_rows = batch * q_len + rows
        ends = tl.load(KeyEnd + of_rows, mask=rows < q_len, other=0)
        seeing = ends > tl.load(KeyStart + of_rows, mask=rows < q_len, other=0)
    dq = tl.where(seeing, dq.reshape(BLOCK_M, WIDTH), 0.0)
    if HEAD_DIM % 16 != 0:
        stride_qb, stride_qh, stride_qm = stride_qb // 8 * 8, stride_qh // 8 * 8, stride_qm // 8 * 8
    DQ += batch * stride_qb + head * stride_qh
    inside = rows < q_len
    if WIDTH > HEAD_DIM:
        inside = inside & (dims < HEAD_DIM)
    tl.store(DQ + rows.to(tl.int64) * stride_qm + dims, dq, mask=inside)
