"""The forward kernel for Hopper (sm_90a), in Gluon: FlashAttention-3's schedule (Shah et al. 2024, section 3).

One warp moves tiles of Q, K and V into rings of shared memory by TMA. Each of two or three consumers, warpgroups that
own 64 queries each, issues the products of its next tile of keys asynchronously and computes the softmax of the one
before meanwhile (hopper_softmax.py). A program takes one tile of queries after another (hopper_tiles.py): while the
consumers finish their rows, the next tiles arrive.

Plain attention, windows and documents under the causal mask (hopper_bounds.py), and block masks (hopper_blocks.py):
it visits the blocks of keys that a row sees. The rest is the portable kernel's (forward.py), whose conventions this
one keeps.
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

from .hopper import LOG2_E, Ring, arrive, fetch, make_ring
from .hopper_blocks import LISTS, Blocks, count_visited, list_of
from .hopper_bounds import Bounds, first_keys
from .hopper_claims import CLAIMS, ask, claimed, make_claims, tell
from .hopper_softmax import first_softmax, hide, hide_before, pack, softmax, unpack, widen
from .hopper_tiles import BLOCK_N, ROWS, Sizes, count_dealt, dealt, first_block, key_blocks, tile_at

LN_2 = gl.constexpr(0.6931471805599453)
Q_STAGES = gl.constexpr(2)


class Rings(NamedTuple):
    """Tiles on their way from the producer to the consumers."""

    q: Ring
    k: Ring
    v: Ring


class Output(NamedTuple):
    """Where results go."""

    Out: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_m: gl.tensor
    Lse: gl.tensor


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The stage of a ring after this one, and the parity of its barriers' phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), phase ^ last.to(gl.int32)


@gluon.jit
def fetch_tile(index, place, q_desc, k_desc, v_desc, rings, stage, phase, sizes, SPEC: gl.constexpr):
    """Fetch the index-th tile of queries, and all its keys and values, last block first."""
    first_row, head, batch = tile_at(index, sizes, SPEC)
    for which in gl.static_range(SPEC.CONSUMERS):
        slot = place % Q_STAGES * SPEC.CONSUMERS + which
        row = first_row + which * ROWS
        fetch(q_desc, [batch, head, row, 0], rings.q, slot, place // Q_STAGES & 1)
    if SPEC.LISTED:
        List = list_of(first_row // BLOCK_N, head, batch, sizes.blocks)
        blocks = count_visited(List)
    else:
        blocks = key_blocks(first_row + ROWS * SPEC.CONSUMERS, sizes, SPEC)
    kv_head = head // SPEC.GROUP
    for passed in range(blocks - first_block(first_row, batch, sizes, SPEC)):
        first_key = (blocks - 1 - passed) * BLOCK_N
        if SPEC.LISTED:
            first_key = gl.load(List + blocks - passed) * BLOCK_N
        fetch(k_desc, [batch, kv_head, first_key, 0], rings.k, stage, phase)
        fetch(v_desc, [batch, kv_head, first_key, 0], rings.v, stage, phase)
        stage, phase = following(stage, phase, SPEC.STAGES)
    return stage, phase


@gluon.jit
def produce(q_desc, k_desc, v_desc, Counter, rings, claims, sizes, SPEC: gl.constexpr):
    """The producer."""
    stage = 0
    phase = 0
    if SPEC.CLAIMED:
        place = 0
        index = tell(ask(Counter), claims, place, sizes.tiles)
        while index >= 0:
            answer = ask(Counter)
            stage, phase = fetch_tile(index, place, q_desc, k_desc, v_desc, rings, stage, phase, sizes, SPEC)
            place += 1
            index = tell(answer, claims, place, sizes.tiles)
    else:
        for place in range(count_dealt(sizes)):
            index = dealt(place, sizes)
            stage, phase = fetch_tile(index, place, q_desc, k_desc, v_desc, rings, stage, phase, sizes, SPEC)


@gluon.jit
def skip(blocks, rings, stage, phase, SPEC: gl.constexpr):
    """Pass blocks that only another consumer's rows see. To wait for them keeps the arrivals in their phases."""
    for _ in range(blocks):
        mbarrier.wait(rings.k.full.index(stage), phase)
        mbarrier.arrive(rings.k.empty.index(stage))
        mbarrier.wait(rings.v.full.index(stage), phase)
        mbarrier.arrive(rings.v.empty.index(stage))
        stage, phase = following(stage, phase, SPEC.STAGES)
    return stage, phase


@gluon.jit
def start_scores(rings, slot, stage, phase, SEEN: gl.constexpr):
    """Begin q k^T for the first SEEN keys at `stage`."""
    HEAD_DIM: gl.constexpr = rings.q.tiles.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SEEN, 16])
    q = rings.q.tiles.index(slot).reshape([ROWS, HEAD_DIM])
    k = rings.k.tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
    if SEEN < BLOCK_N:
        k = k.slice(0, SEEN)
    nothing = gl.zeros([ROWS, SEEN], gl.float32, layout)
    mbarrier.wait(rings.k.full.index(stage), phase)
    return warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def start_output(p, acc, rings, stage, phase, SPEC: gl.constexpr):
    """Begin acc + p v for the values at `stage`."""
    v = rings.v.tiles.index(stage).reshape([BLOCK_N, acc.shape[1]])
    p = unpack(p, rings.v.tiles.dtype, acc.type.layout)
    if not SPEC.EARLY:
        mbarrier.wait(rings.v.full.index(stage), phase)
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def advance(
    acc, p, row_max, row_sum, rings, slot, stage, phase,
    unit, first_row, first_key, first_seen, sizes, SPEC: gl.constexpr,
):  # fmt: skip
    """Multiply p with the values at `stage`, and meanwhile take the keys of the stage after it into the softmax.

    first_seen: the first key that each row sees; None where all of them see all of these.
    """
    next_stage, next_phase = following(stage, phase, SPEC.STAGES)
    scores = start_scores(rings, slot, next_stage, next_phase, BLOCK_N)
    acc = start_output(p, acc, rings, stage, phase, SPEC)
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(rings.k.empty.index(next_stage))
    if not SPEC.ALIGNED:
        scores = hide(scores, first_row, first_key, sizes, SPEC)
    if first_seen is not None:
        scores = hide_before(scores, first_seen, first_key)
    new_p, row_max, row_sum, rescale = softmax(scores, row_max, row_sum, unit)
    if SPEC.EARLY:
        # ptxas moves nothing across this wait. Without it the exponentials go behind the next one, which took 1.07 to
        # 1.12 of the time with head_dim 128 and a causal mask, but 0.94 to 0.98 without a mask (LOG.md).
        mbarrier.wait(rings.v.full.index(next_stage), next_phase)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(rings.v.empty.index(stage))
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    # Packed before that wait, ptxas would serialise the products (C7513).
    return acc, pack(new_p, rings.v.tiles.dtype), row_max, row_sum, next_stage, next_phase


@gluon.jit
def finish(acc, row_max, row_sum, output, first_row, head, batch, sizes):
    """Divide by the softmax's sums and store. A row that saw nothing has sum 0: out 0, lse -inf."""
    HEAD_DIM: gl.constexpr = acc.shape[1]
    row_layout: gl.constexpr = row_max.type.layout
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_layout)
    blind = row_sum == 0
    row_sum = gl.where(blind, 1.0, row_sum)
    lse = gl.where(blind, float("-inf"), (row_max + gl.log2(row_sum)) * LN_2)
    rows = first_row + gl.arange(0, ROWS, layout=row_layout)
    Lse = output.Lse + (batch.to(gl.int64) * sizes.heads + head) * sizes.q_len
    gl.store(Lse + rows, lse, mask=rows < sizes.q_len)
    out = acc * gl.convert_layout(1 / row_sum, gl.SliceLayout(1, acc.type.layout))[:, None]
    out = gl.convert_layout(out.to(output.Out.dtype.element_ty), layout)
    Out = output.Out + batch.to(gl.int64) * output.stride_b + head.to(gl.int64) * output.stride_h
    Out += first_row.to(gl.int64) * output.stride_m
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(Out + rows * output.stride_m + dims, out, mask=first_row + rows < sizes.q_len)


@gluon.jit
def attend(
    index, place, rings, stage, phase, output, sizes, unit, WHICH: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """Rows WHICH * 64 to WHICH * 64 + 63 of the index-th tile of queries."""
    HEAD_DIM: gl.constexpr = rings.q.tiles.shape[4]
    dtype: gl.constexpr = rings.q.tiles.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    SEEN: gl.constexpr = BLOCK_N // 2 if SPEC.HALVED and WHICH == 0 else BLOCK_N
    tile_row, head, batch = tile_at(index, sizes, SPEC)
    first_row = tile_row + WHICH * ROWS
    if SPEC.LISTED:
        List = list_of(tile_row // BLOCK_N, head, batch, sizes.blocks)
        blocks = count_visited(List)
        last_key = gl.load(List + blocks) * BLOCK_N
    else:
        blocks = key_blocks(first_row + ROWS, sizes, SPEC)
        skipped = key_blocks(tile_row + ROWS * SPEC.CONSUMERS, sizes, SPEC) - blocks
        stage, phase = skip(skipped, rings, stage, phase, SPEC)
        last_key = (blocks - 1) * BLOCK_N  # the first of the last block
    slot = place % Q_STAGES * SPEC.CONSUMERS + WHICH
    mbarrier.wait(rings.q.full.index(slot), place // Q_STAGES & 1)

    scores = warpgroup_mma_wait(0, [start_scores(rings, slot, stage, phase, SEEN)])
    mbarrier.arrive(rings.k.empty.index(stage))
    scores = hide(scores, first_row, last_key, sizes, SPEC)
    if SPEC.BOUNDED:
        rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores.type.layout))
        first_seen = first_keys(rows, batch, sizes.bounds)
        scores = hide_before(scores, first_seen, last_key)
    p, row_max, row_sum = first_softmax(scores, unit, dtype)
    if SEEN < BLOCK_N:
        p, row_max, row_sum = widen(p, row_max, row_sum, dtype)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
    if SPEC.EARLY:
        mbarrier.wait(rings.v.full.index(stage), phase)
    clear = blocks - 1  # blocks behind this one that all rows see
    if SPEC.BOUNDED:
        begin = first_block(first_row, batch, sizes, SPEC)
        begin_of_last = first_keys(gl.minimum(first_row + ROWS, sizes.q_len) - 1, batch, sizes.bounds)
        clear = gl.minimum(gl.maximum(clear - gl.cdiv(begin_of_last, BLOCK_N), 0), clear - begin)
    for passed in range(clear):
        first_key = (blocks - 2 - passed) * BLOCK_N
        acc, p, row_max, row_sum, stage, phase = advance(
            acc, p, row_max, row_sum, rings, slot, stage, phase,
            unit, first_row, first_key, None, sizes, SPEC,
        )  # fmt: skip
    if SPEC.BOUNDED:
        for block in range(blocks - 2 - clear, begin - 1, -1):
            first_key = block * BLOCK_N
            acc, p, row_max, row_sum, stage, phase = advance(
                acc, p, row_max, row_sum, rings, slot, stage, phase,
                unit, first_row, first_key, first_seen, sizes, SPEC,
            )  # fmt: skip
    mbarrier.arrive(rings.q.empty.index(slot))
    acc = warpgroup_mma_wait(0, [start_output(p, acc, rings, stage, phase, SPEC)])
    mbarrier.arrive(rings.v.empty.index(stage))
    finish(acc, row_max, row_sum, output, first_row, head, batch, sizes)
    stage, phase = following(stage, phase, SPEC.STAGES)
    if SPEC.BOUNDED:
        stage, phase = skip(begin - first_block(tile_row, batch, sizes, SPEC), rings, stage, phase, SPEC)
    return stage, phase


@gluon.jit
def consume(rings, claims, output, sizes, unit, WHICH: gl.constexpr, SPEC: gl.constexpr):
    """The consumer of rows WHICH * 64 to WHICH * 64 + 63 of each tile."""
    stage = 0
    phase = 0
    if SPEC.CLAIMED:
        place = 0
        index = claimed(claims, place)
        while index >= 0:
            stage, phase = attend(index, place, rings, stage, phase, output, sizes, unit, WHICH, SPEC)
            place += 1
            index = claimed(claims, place)
            arrive(claims.empty.index((place - 1) % CLAIMS))  # read a whole tile before
    else:
        # A known number of tiles: a loop until there is none took 1.01 to 1.03 of the time, without a mask (LOG.md).
        for place in range(count_dealt(sizes)):
            index = dealt(place, sizes)
            stage, phase = attend(index, place, rings, stage, phase, output, sizes, unit, WHICH, SPEC)


@gluon.jit(do_not_specialize=["q_len", "kv_len", "heads", "batches", "together", "tiles", "left", *LISTS])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, Out, Lse, Counter, DocumentStart, KeyBlocks, stride_ob, stride_oh, stride_om,
    q_len, kv_len, heads, batches, together, tiles, left, stride_lb, stride_lh, width,
    scale, SPEC: gl.constexpr,
):  # fmt: skip
    """Grid (at most as many programs as tiles,).

    Lse: float32 (batch, heads, q_len), contiguous. Counter: int32 0, where programs claim (hopper_claims.py).
    DocumentStart, left: see hopper_bounds.py, if SPEC.BOUNDED. KeyBlocks: lists of blocks of keys, with these
    strides, if SPEC.LISTED (hopper_blocks.py).
    """
    q = make_ring(q_desc, Q_STAGES * SPEC.CONSUMERS, 1)
    k = make_ring(k_desc, SPEC.STAGES, SPEC.CONSUMERS)
    v = make_ring(v_desc, SPEC.STAGES, SPEC.CONSUMERS)
    rings = Rings(q, k, v)
    bounds: gl.constexpr = None
    if SPEC.BOUNDED:
        bounds = Bounds(DocumentStart, None, left, q_len)
    blocks: gl.constexpr = None
    if SPEC.LISTED:
        blocks = Blocks(KeyBlocks, stride_lb, stride_lh, width)
    sizes = Sizes(q_len, kv_len, heads, batches, together, tiles, bounds, blocks)
    output = Output(Out, stride_ob, stride_oh, stride_om, Lse)
    # No barrier may be made that is not used: Triton gives its memory to others (compile_report looks for it).
    claims: gl.constexpr = None
    if SPEC.CLAIMED:
        claims = make_claims(SPEC.CONSUMERS)
    unit = scale * LOG2_E
    fence_async_shared()  # TMA is to see the barriers initialised
    if SPEC.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (rings, claims, output, sizes, unit, gl.constexpr(0), SPEC)),
                (consume, (rings, claims, output, sizes, unit, gl.constexpr(1), SPEC)),
                (produce, (q_desc, k_desc, v_desc, Counter, rings, claims, sizes, SPEC)),
            ],
            [4, 1],
            [SPEC.REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (rings, claims, output, sizes, unit, gl.constexpr(0), SPEC)),
                (consume, (rings, claims, output, sizes, unit, gl.constexpr(1), SPEC)),
                (consume, (rings, claims, output, sizes, unit, gl.constexpr(2), SPEC)),
                (produce, (q_desc, k_desc, v_desc, Counter, rings, claims, sizes, SPEC)),
            ],
            [4, 4, 1],
            [SPEC.REGISTERS, SPEC.REGISTERS, 24],
        )
