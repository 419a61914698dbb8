"""The forward kernel for Hopper (sm_90a), in Gluon: FlashAttention-3's schedule (Shah et al. 2024, section 3).

One warp moves tiles of Q, K and V into rings of shared memory by TMA. Each of two or three consumers, warpgroups that
own 64 queries each, issues the products of its next tile of keys asynchronously and computes the softmax of the one
before meanwhile. A program takes one tile of queries after another (hopper_claims.py): while the consumers finish
their rows, the next tiles arrive.

Plain attention, and windows and documents under the causal mask (hopper_bounds.py), of which it visits the blocks of
keys that a row sees. The rest is the portable kernel's (forward.py), whose conventions this one keeps.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper import LOG2_E, Ring, arrive, fetch, make_ring, opaque
from .hopper_bounds import Bounds, first_keys
from .hopper_claims import CLAIMS, ask, claimed, make_claims, tell

LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.0e38)  # see forward.py
ROWS = gl.constexpr(64)  # of a consumer: what one wgmma multiplies
BLOCK_N = gl.constexpr(128)
Q_STAGES = gl.constexpr(2)
CLAIMED_FROM = 2048  # queries; with fewer, claimed tiles took up to 1.06 of the time of dealt ones


@dataclass(frozen=True)
class Spec:
    """All that is known at compile time."""

    GROUP: gl.constexpr  # query heads to a key head
    CAUSAL: gl.constexpr
    ALIGNED: gl.constexpr  # a consumer's last block of keys is the only one that needs a mask
    # Of that block the first of two consumers sees no more than half, and computes no more: 0.93 of the time at 1024.
    HALVED: gl.constexpr
    BOUNDED: gl.constexpr  # by a window or documents (hopper_bounds.py)
    CLAIMED: gl.constexpr  # programs claim their tiles (hopper_claims.py); else they are dealt beforehand
    EARLY: gl.constexpr  # a tile's exponentials come before the wait for P V, not after it (`advance`)
    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr  # tiles of K, and of V, in shared memory
    REGISTERS: gl.constexpr  # of a consumer's thread


class Sizes(NamedTuple):
    """What a launch is about, at run time."""

    q_len: gl.tensor
    kv_len: gl.tensor
    heads: gl.tensor
    batches: gl.tensor
    together: gl.tensor  # heads in a group
    tiles: gl.tensor  # of queries, in all heads
    bounds: Bounds  # if SPEC.BOUNDED


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
def tile_at(index, sizes, SPEC: gl.constexpr):
    """First row, head and batch of the index-th tile of queries.

    Heads come in groups, and in a group the tiles with most keys first.
    """
    blocks = gl.cdiv(sizes.q_len, ROWS * SPEC.CONSUMERS)
    first_head = index // (sizes.together * blocks) * sizes.together
    index -= first_head * blocks
    together = gl.minimum(sizes.together, sizes.heads * sizes.batches - first_head)
    head = first_head + index % together
    block = blocks - 1 - index // together
    return block * ROWS * SPEC.CONSUMERS, head % sizes.heads, head // sizes.heads


@gluon.jit
def dealt(place, sizes):
    """The place-th tile of this program where none are claimed: in turn, and every other round in reverse order."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    return place * programs + gl.where(place % 2 == 1, programs - 1 - own, own)


@gluon.jit
def count_dealt(sizes):
    """How many tiles `dealt` has for this program."""
    rounds = sizes.tiles // gl.num_programs(0)
    return rounds + (dealt(rounds, sizes) < sizes.tiles).to(gl.int32)


@gluon.jit
def key_blocks(rows, sizes, SPEC: gl.constexpr):
    """How many blocks of keys the first `rows` rows see; at least one, whose mask may hide all of it."""
    end = sizes.kv_len
    if SPEC.CAUSAL:
        end = gl.minimum(end, rows + sizes.kv_len - sizes.q_len)
    return gl.maximum(gl.cdiv(end, BLOCK_N), 1)


@gluon.jit
def first_block(row, batch, sizes, SPEC: gl.constexpr):
    """The block with the first key that a row sees, or where there is no such row, the last one."""
    first = 0
    if SPEC.BOUNDED:
        first = first_keys(gl.minimum(row, sizes.q_len - 1), batch, sizes.bounds) // BLOCK_N
    return first


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
    blocks = key_blocks(first_row + ROWS * SPEC.CONSUMERS, sizes, SPEC)
    kv_head = head // SPEC.GROUP
    for passed in range(blocks - first_block(first_row, batch, sizes, SPEC)):
        first_key = (blocks - 1 - passed) * BLOCK_N
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
def start_scores(queries, slot, keys, stage, phase, SEEN: gl.constexpr):
    """Begin q k^T for the first SEEN keys at `stage`."""
    HEAD_DIM: gl.constexpr = queries.tiles.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SEEN, 16])
    q = queries.tiles.index(slot).reshape([ROWS, HEAD_DIM])
    k = keys.tiles.index(stage).reshape([BLOCK_N, HEAD_DIM])
    if SEEN < BLOCK_N:
        k = k.slice(0, SEEN)
    nothing = gl.zeros([ROWS, SEEN], gl.float32, layout)
    mbarrier.wait(keys.full.index(stage), phase)
    return warpgroup_mma(q, k.permute([1, 0]), nothing, use_acc=False, is_async=True)


@gluon.jit
def start_output(p, acc, values, stage, phase, SPEC: gl.constexpr):
    """Begin acc + p v for the values at `stage`."""
    v = values.tiles.index(stage).reshape([BLOCK_N, acc.shape[1]])
    p = unpack(p, values.tiles.dtype, acc.type.layout)
    if not SPEC.EARLY:
        mbarrier.wait(values.full.index(stage), phase)
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """p rounded to dtype, two neighbours to an int32: a loop that carries 16-bit numbers repacks them every time, in
    64 instructions of 470."""
    low, high = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
        )
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
    )  # fmt: skip


@gluon.jit
def unpack(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """What `pack` packed, as the left operand of a product in `layout`."""
    pairs = gl.join(packed.to(gl.int16), (packed >> 16).to(gl.int16))
    p = pairs.reshape([packed.shape[0], 2 * packed.shape[1]]).to(dtype, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def partial_sums(p):
    """(ROWS, 8): sums over the columns that agree modulo 8, which one thread holds, so without shuffles."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def hide(scores, first_row, first_key, sizes, SPEC: gl.constexpr):
    """-inf where a row may not see a key."""
    layout: gl.constexpr = scores.type.layout
    end = sizes.kv_len - first_key
    keys = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    # Three consumers have few registers: with what differs between threads taken off both sides, columns are
    # constants. With more registers that is slower (LOG.md, "What the Hopper kernels spilled").
    own = keys & (6 if SPEC.CONSUMERS == 3 else 0)
    if SPEC.CAUSAL:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
        # Opaque, or ptxas would add to the rows what is the same in the whole launch, and spill that.
        last = opaque(first_row + end - sizes.q_len)
        return gl.where(keys - own <= rows + last - own, scores, float("-inf"))
    return gl.where(keys - own < end - own, scores, float("-inf"))


@gluon.jit
def hide_before(scores, first_seen, first_key):
    """-inf where a row sees no key yet. first_seen: the first key that each sees."""
    layout: gl.constexpr = scores.type.layout
    # Opaque, or ptxas would keep this of a block not come to, and spill with head_dim 128.
    first = gl.convert_layout(first_seen, gl.SliceLayout(1, layout))[:, None] - opaque(first_key)
    keys = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    # As in `hide`, but with two consumers too: a masked step has 535 instructions, else 574 to 639.
    own = keys & 6
    return gl.where(keys - own >= first - own, scores, float("-inf"))


@gluon.jit
def first_softmax(scores, unit, dtype: gl.constexpr):
    """Packed exponentials of the first tile of some rows, their maximum and their partial sums."""
    row_max = gl.maximum(gl.max(scores, 1) * unit, LOWEST)
    p = gl.exp2(scores * unit - row_max[:, None])
    return pack(p, dtype), row_max, partial_sums(p)


@gluon.jit
def widen(p, row_max, row_sum, dtype: gl.constexpr):
    """What first_softmax gives for the left half of a tile as what it gives for a tile whose right half is hidden."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    whole = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    p_layout: gl.constexpr = pack(whole, dtype).type.layout
    sum_layout: gl.constexpr = partial_sums(whole).type.layout
    p = gl.join(p, gl.zeros_like(p)).permute([0, 2, 1]).reshape([ROWS, BLOCK_N // 2])
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, layout))
    return gl.convert_layout(p, p_layout), row_max, gl.convert_layout(row_sum, sum_layout)


@gluon.jit
def softmax(scores, row_max, row_sum, unit):
    """The same for a later tile, exponentials not packed, and what the earlier results are to be multiplied by."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * unit)
    p = gl.exp2(scores * unit - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return p, new_max, row_sum + partial_sums(p), rescale


@gluon.jit
def advance(
    acc, p, row_max, row_sum, queries, slot, keys, values, stage, phase,
    unit, first_row, first_key, first_seen, sizes, SPEC: gl.constexpr, BEGINS: gl.constexpr,
):  # fmt: skip
    """Multiply p with the values at `stage`, and meanwhile take the keys of the stage after it into the softmax.

    BEGINS: for some row the first key that it sees is among these.
    """
    next_stage, next_phase = following(stage, phase, SPEC.STAGES)
    scores = start_scores(queries, slot, keys, next_stage, next_phase, BLOCK_N)
    acc = start_output(p, acc, values, stage, phase, SPEC)
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(keys.empty.index(next_stage))
    if not SPEC.ALIGNED:
        scores = hide(scores, first_row, first_key, sizes, SPEC)
    if BEGINS:
        scores = hide_before(scores, first_seen, first_key)
    new_p, row_max, row_sum, rescale = softmax(scores, row_max, row_sum, unit)
    if SPEC.EARLY:
        # ptxas moves nothing across this wait. Without it the exponentials go behind the next one, which took 1.07 to
        # 1.12 of the time with head_dim 128 and a causal mask, but 0.94 to 0.98 without a mask (LOG.md).
        mbarrier.wait(values.full.index(next_stage), next_phase)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(values.empty.index(stage))
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    # Packed before that wait, ptxas would serialise the products (C7513).
    return acc, pack(new_p, values.tiles.dtype), row_max, row_sum, next_stage, next_phase


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
    queries = rings.q
    keys = rings.k
    values = rings.v
    HEAD_DIM: gl.constexpr = queries.tiles.shape[4]
    dtype: gl.constexpr = queries.tiles.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    SEEN: gl.constexpr = BLOCK_N // 2 if SPEC.HALVED and WHICH == 0 else BLOCK_N
    tile_row, head, batch = tile_at(index, sizes, SPEC)
    first_row = tile_row + WHICH * ROWS
    blocks = key_blocks(first_row + ROWS, sizes, SPEC)
    skipped = key_blocks(tile_row + ROWS * SPEC.CONSUMERS, sizes, SPEC) - blocks
    stage, phase = skip(skipped, rings, stage, phase, SPEC)
    slot = place % Q_STAGES * SPEC.CONSUMERS + WHICH
    mbarrier.wait(queries.full.index(slot), place // Q_STAGES & 1)

    scores = warpgroup_mma_wait(0, [start_scores(queries, slot, keys, stage, phase, SEEN)])
    mbarrier.arrive(keys.empty.index(stage))
    scores = hide(scores, first_row, (blocks - 1) * BLOCK_N, sizes, SPEC)
    if SPEC.BOUNDED:
        rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores.type.layout))
        first_seen = first_keys(rows, batch, sizes.bounds)
        scores = hide_before(scores, first_seen, (blocks - 1) * BLOCK_N)
    p, row_max, row_sum = first_softmax(scores, unit, dtype)
    if SEEN < BLOCK_N:
        p, row_max, row_sum = widen(p, row_max, row_sum, dtype)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
    if SPEC.EARLY:
        mbarrier.wait(values.full.index(stage), phase)
    clear = blocks - 1  # blocks behind this one that all rows see
    if SPEC.BOUNDED:
        begin = first_block(first_row, batch, sizes, SPEC)
        begin_of_last = first_keys(gl.minimum(first_row + ROWS, sizes.q_len) - 1, batch, sizes.bounds)
        clear = gl.minimum(gl.maximum(clear - gl.cdiv(begin_of_last, BLOCK_N), 0), clear - begin)
    for passed in range(clear):
        first_key = (blocks - 2 - passed) * BLOCK_N
        acc, p, row_max, row_sum, stage, phase = advance(
            acc, p, row_max, row_sum, queries, slot, keys, values, stage, phase,
            unit, first_row, first_key, None, sizes, SPEC, False,
        )  # fmt: skip
    if SPEC.BOUNDED:
        for block in range(blocks - 2 - clear, begin - 1, -1):
            first_key = block * BLOCK_N
            acc, p, row_max, row_sum, stage, phase = advance(
                acc, p, row_max, row_sum, queries, slot, keys, values, stage, phase,
                unit, first_row, first_key, first_seen, sizes, SPEC, True,
            )  # fmt: skip
    mbarrier.arrive(queries.empty.index(slot))
    acc = warpgroup_mma_wait(0, [start_output(p, acc, values, stage, phase, SPEC)])
    mbarrier.arrive(values.empty.index(stage))
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


@gluon.jit(do_not_specialize=["q_len", "kv_len", "heads", "batches", "together", "tiles", "left"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, Out, Lse, Counter, DocumentStart, stride_ob, stride_oh, stride_om,
    q_len, kv_len, heads, batches, together, tiles, left, scale, SPEC: gl.constexpr,
):  # fmt: skip
    """Grid (at most as many programs as tiles,).

    Lse: float32 (batch, heads, q_len), contiguous. Counter: int32 0, where programs claim (hopper_claims.py).
    DocumentStart, left: see hopper_bounds.py.
    """
    queries = make_ring(q_desc, Q_STAGES * SPEC.CONSUMERS, 1)
    keys = make_ring(k_desc, SPEC.STAGES, SPEC.CONSUMERS)
    values = make_ring(v_desc, SPEC.STAGES, SPEC.CONSUMERS)
    rings = Rings(queries, keys, values)
    bounds: gl.constexpr = None
    if SPEC.BOUNDED:
        bounds = Bounds(DocumentStart, None, left, q_len)
    sizes = Sizes(q_len, kv_len, heads, batches, together, tiles, bounds)
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


@functools.lru_cache(4096)
def specify(
    head_dim: int, causal: bool, q_len: int, kv_len: int, group: int = 1, bounded: bool = False
) -> Spec:
    """What the kernel is compiled with for a shape. LOG.md has the times.

    Args:
        group: query heads to a key head.
        bounded: by a window or documents; causal, and q_len == kv_len.
    """
    # With head_dim 64 the exponentials take as long as the products, and three consumers overlap them better than
    # two where tiles of 192 rows fit: 16 k tokens took 0.95 of the time at 4096 (full) and 0.86 at 16,384, but 1.22
    # at 1024 (causal). Bounded rows are as short as in a short sequence.
    many = head_dim == 64 and q_len >= (4096 if causal else 2048) and not bounded
    consumers, stages, registers = (3, 3, 160) if many else (2, 256 // head_dim, 240)
    claimed = q_len >= CLAIMED_FROM or bounded  # tiles of bounded rows differ by what only the device knows
    return Spec(
        GROUP=gl.constexpr(group),
        CAUSAL=gl.constexpr(causal),
        ALIGNED=gl.constexpr(not causal or (kv_len - q_len) % ROWS.value == 0),
        HALVED=gl.constexpr(causal and consumers == 2 and (kv_len - q_len) % BLOCK_N.value == 0),
        BOUNDED=gl.constexpr(bounded),
        CLAIMED=gl.constexpr(claimed),
        EARLY=gl.constexpr(claimed and causal and (many or head_dim == 128)),
        CONSUMERS=gl.constexpr(consumers),
        STAGES=gl.constexpr(stages),
        REGISTERS=gl.constexpr(registers),
    )
