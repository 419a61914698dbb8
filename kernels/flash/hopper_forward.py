"""The forward kernel for Hopper (sm_90a), in Gluon: FlashAttention-3's schedule (Shah et al. 2024, section 3).

One warp moves tiles of Q, K and V into rings of shared memory by TMA. Each of CONSUMERS warpgroups owns 64 queries:
it issues the products of the next tile of keys asynchronously and computes the softmax of the one before meanwhile.
The programs are persistent, and that pipeline runs on across tiles of queries.

Plain attention only; the rest is the portable kernel's (forward.py), whose conventions this one keeps.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.0e38)  # see forward.py
ROWS = gl.constexpr(64)  # of a consumer: what one wgmma multiplies


@dataclass(frozen=True)
class Spec:
    """All that is known at compile time."""

    GROUP: gl.constexpr  # query heads to a key head
    CAUSAL: gl.constexpr
    ALIGNED: gl.constexpr  # only the last block of keys that a consumer visits needs a mask
    CONSUMERS: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr  # tiles of K, and of V, in shared memory
    Q_STAGES: gl.constexpr
    PINGPONG: gl.constexpr
    REGISTERS: gl.constexpr  # of a consumer's threads


class Sizes(NamedTuple):
    q_len: gl.tensor
    kv_len: gl.tensor
    heads: gl.tensor
    batches: gl.tensor
    together: gl.tensor  # heads whose tiles are taken together, heaviest first


class Ring(NamedTuple):
    """Tiles in shared memory; barriers that say of each that it has come, and that it may be overwritten."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Output(NamedTuple):
    Out: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_m: gl.tensor
    Lse: gl.tensor


@gluon.jit
def tile_at(step, sizes, SPEC: gl.constexpr):
    """First row, head and batch of the step-th tile of queries of this program.

    Heads come in groups; in a group the tiles with most keys come first. Every other round goes in reverse, which
    evens out what the programs get.
    """
    programs = gl.num_programs(0)
    index = step * programs + gl.program_id(0)
    if step % 2 == 1:
        index = (step + 1) * programs - 1 - gl.program_id(0)
    blocks = gl.cdiv(sizes.q_len, ROWS * SPEC.CONSUMERS)
    first_head = index // (sizes.together * blocks) * sizes.together
    index -= first_head * blocks
    together = gl.minimum(sizes.together, sizes.heads * sizes.batches - first_head)
    head = first_head + index % together
    block = blocks - 1 - index // together
    return block * ROWS * SPEC.CONSUMERS, head % sizes.heads, head // sizes.heads


@gluon.jit
def key_blocks(rows, sizes, SPEC: gl.constexpr):
    """How many blocks of keys the first `rows` rows see; at least one, whose mask may hide all of it."""
    end = sizes.kv_len
    if SPEC.CAUSAL:
        end = gl.minimum(end, rows + sizes.kv_len - sizes.q_len)
    return gl.maximum(gl.cdiv(end, SPEC.BLOCK_N), 1)


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The stage of a ring after this one, and the parity of its barriers' phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), phase ^ last.to(gl.int32)


@gluon.jit
def fetch(desc, coordinates, ring, stage, phase):
    """Start the copy of a tile as soon as the consumers have left its stage."""
    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, coordinates, ring.full.index(stage), ring.tiles.index(stage))


@gluon.jit
def produce(q_desc, k_desc, v_desc, queries, keys, values, sizes, steps, SPEC: gl.constexpr):
    stage = 0
    phase = 0
    for step in range(steps):
        first_row, head, batch = tile_at(step, sizes, SPEC)
        for which in gl.static_range(SPEC.CONSUMERS):
            slot = step % SPEC.Q_STAGES * SPEC.CONSUMERS + which
            row = first_row + which * ROWS
            fetch(q_desc, [batch, head, row, 0], queries, slot, step // SPEC.Q_STAGES & 1)
        blocks = key_blocks(first_row + ROWS * SPEC.CONSUMERS, sizes, SPEC)
        kv_head = head // SPEC.GROUP
        for passed in range(blocks):
            first_key = (blocks - 1 - passed) * SPEC.BLOCK_N
            fetch(k_desc, [batch, kv_head, first_key, 0], keys, stage, phase)
            fetch(v_desc, [batch, kv_head, first_key, 0], values, stage, phase)
            stage, phase = following(stage, phase, SPEC.STAGES)


@gluon.jit
def skip(blocks, keys, values, stage, phase, SPEC: gl.constexpr):
    """Pass blocks that only later rows see. Waiting for them keeps this consumer's arrivals in their phases."""
    for _ in range(blocks):
        mbarrier.wait(keys.full.index(stage), phase)
        mbarrier.arrive(keys.empty.index(stage))
        mbarrier.wait(values.full.index(stage), phase)
        mbarrier.arrive(values.empty.index(stage))
        stage, phase = following(stage, phase, SPEC.STAGES)
    return stage, phase


@gluon.jit
def start_scores(queries, slot, keys, stage, phase, SPEC: gl.constexpr):
    """Begin q k^T for the keys at `stage`."""
    HEAD_DIM: gl.constexpr = queries.tiles.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SPEC.BLOCK_N, 16])
    q = queries.tiles.index(slot).reshape([ROWS, HEAD_DIM])
    k = keys.tiles.index(stage).reshape([SPEC.BLOCK_N, HEAD_DIM]).permute([1, 0])
    nothing = gl.zeros([ROWS, SPEC.BLOCK_N], gl.float32, layout)
    mbarrier.wait(keys.full.index(stage), phase)
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def start_output(p, acc, values, stage, phase, SPEC: gl.constexpr):
    """Begin acc + p v for the values at `stage`."""
    v = values.tiles.index(stage).reshape([SPEC.BLOCK_N, acc.shape[1]])
    p = unpack(p, values.tiles.dtype, acc.type.layout)
    mbarrier.wait(values.full.index(stage), phase)
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def partial_sums(p):
    """(ROWS, 8): a sum over the columns that agree modulo 8, which one thread holds; no shuffles."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def hide(scores, first_row, first_key, sizes, SPEC: gl.constexpr):
    """-inf where a row may not see a key."""
    layout: gl.constexpr = scores.type.layout
    end = sizes.kv_len - first_key
    keys = gl.arange(0, SPEC.BLOCK_N, layout=gl.SliceLayout(0, layout))[None, :]
    if SPEC.CAUSAL:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
        return gl.where(keys <= rows + (first_row + end - sizes.q_len), scores, float("-inf"))
    return gl.where(keys < end, scores, float("-inf"))


@gluon.jit
def softmax(scores, row_max, row_sum, unit):
    """Exponentials of a tile of scores, and what its rows' earlier results are to be multiplied by."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * unit)
    p = gl.exp2(scores * unit - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return p, new_max, row_sum + partial_sums(p), rescale


@gluon.jit
def first_softmax(scores, unit):
    """The same for the first tile of its rows."""
    row_max = gl.maximum(gl.max(scores, 1) * unit, LOWEST)
    p = gl.exp2(scores * unit - row_max[:, None])
    return p, row_max, partial_sums(p)


@gluon.jit
def after(row_sum):
    """row_sum, which depends on every exponential, behind a fence: without it ptxas waits for the products first."""
    return gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [row_sum], gl.float32, False, 1
    )


@gluon.jit
def take_turn(token, WHICH: gl.constexpr):
    """Wait until the consumer before this one has issued its products."""
    if WHICH == 0:
        gl.inline_asm_elementwise("bar.sync 8, 256; mov.b32 $0, $1;", "=r,r", [token], gl.int32, False, 1)
    elif WHICH == 1:
        gl.inline_asm_elementwise("bar.sync 9, 256; mov.b32 $0, $1;", "=r,r", [token], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.sync 10, 256; mov.b32 $0, $1;", "=r,r", [token], gl.int32, False, 1)


@gluon.jit
def give_turn(token, WHICH: gl.constexpr):
    if WHICH == 0:
        gl.inline_asm_elementwise("bar.arrive 8, 256; mov.b32 $0, $1;", "=r,r", [token], gl.int32, False, 1)
    elif WHICH == 1:
        gl.inline_asm_elementwise("bar.arrive 9, 256; mov.b32 $0, $1;", "=r,r", [token], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.arrive 10, 256; mov.b32 $0, $1;", "=r,r", [token], gl.int32, False, 1)


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
def pack(p, dtype: gl.constexpr):
    """p rounded to dtype, two neighbours to an int32: a loop that carries 16-bit numbers repacks them every time."""
    low, high = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
        )
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1)


@gluon.jit
def unpack(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """What `pack` packed, as the left operand of a product."""
    pairs = gl.join(packed.to(gl.int16), (packed >> 16).to(gl.int16))
    p = pairs.reshape([packed.shape[0], 2 * packed.shape[1]]).to(dtype, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def consume(
    queries, keys, values, output, sizes, steps, unit, WHICH: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    HEAD_DIM: gl.constexpr = queries.tiles.shape[4]
    dtype: gl.constexpr = queries.tiles.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    stage = 0
    phase = 0
    if SPEC.PINGPONG and WHICH == SPEC.CONSUMERS - 1:
        give_turn(stage, 0)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)

    tile_row, head, batch = tile_at(0, sizes, SPEC)
    first_row = tile_row + WHICH * ROWS
    blocks = key_blocks(first_row + ROWS, sizes, SPEC)
    stage, phase = skip(
        key_blocks(tile_row + ROWS * SPEC.CONSUMERS, sizes, SPEC) - blocks, keys, values, stage, phase, SPEC
    )
    mbarrier.wait(queries.full.index(WHICH), 0)
    scores = warpgroup_mma_wait(0, [start_scores(queries, WHICH, keys, stage, phase, SPEC)])
    mbarrier.arrive(keys.empty.index(stage))
    scores = hide(scores, first_row, (blocks - 1) * SPEC.BLOCK_N, sizes, SPEC)
    p, row_max, row_sum = first_softmax(scores, unit)
    p = pack(p, dtype)

    for step in range(steps - 1):
        slot = step % SPEC.Q_STAGES * SPEC.CONSUMERS + WHICH
        for passed in range(blocks - 1):
            acc, p, row_max, row_sum, stage, phase = advance(
                acc, p, row_max, row_sum, queries, slot, keys, values, stage, phase,
                unit, first_row, (blocks - 2 - passed) * SPEC.BLOCK_N, sizes, WHICH, SPEC,
            )  # fmt: skip
        mbarrier.arrive(queries.empty.index(slot))

        # The last values of this tile of queries, and the first keys of the next.
        next_tile_row, next_head, next_batch = tile_at(step + 1, sizes, SPEC)
        next_row = next_tile_row + WHICH * ROWS
        blocks = key_blocks(next_row + ROWS, sizes, SPEC)
        skipped = key_blocks(next_tile_row + ROWS * SPEC.CONSUMERS, sizes, SPEC) - blocks
        next_stage, next_phase = following(stage, phase, SPEC.STAGES)
        next_stage, next_phase = skip(skipped, keys, values, next_stage, next_phase, SPEC)
        slot = (step + 1) % SPEC.Q_STAGES * SPEC.CONSUMERS + WHICH
        mbarrier.wait(queries.full.index(slot), (step + 1) // SPEC.Q_STAGES & 1)
        scores = start_scores(queries, slot, keys, next_stage, next_phase, SPEC)
        acc = start_output(p, acc, values, stage, phase, SPEC)
        scores = warpgroup_mma_wait(1, [scores])
        mbarrier.arrive(keys.empty.index(next_stage))
        scores = hide(scores, next_row, (blocks - 1) * SPEC.BLOCK_N, sizes, SPEC)
        p, next_max, next_sum = first_softmax(scores, unit)
        next_sum = after(next_sum)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(values.empty.index(stage))
        finish(acc, row_max, row_sum, output, first_row, head, batch, sizes)
        stage, phase = next_stage, next_phase
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, acc_layout)
        p = pack(p, dtype)
        row_max, row_sum = next_max, next_sum
        first_row, head, batch = next_row, next_head, next_batch

    slot = (steps - 1) % SPEC.Q_STAGES * SPEC.CONSUMERS + WHICH
    for passed in range(blocks - 1):
        acc, p, row_max, row_sum, stage, phase = advance(
            acc, p, row_max, row_sum, queries, slot, keys, values, stage, phase,
            unit, first_row, (blocks - 2 - passed) * SPEC.BLOCK_N, sizes, WHICH, SPEC,
        )  # fmt: skip
    acc = warpgroup_mma_wait(0, [start_output(p, acc, values, stage, phase, SPEC)])
    finish(acc, row_max, row_sum, output, first_row, head, batch, sizes)


@gluon.jit
def advance(
    acc, p, row_max, row_sum, queries, slot, keys, values, stage, phase,
    unit, first_row, first_key, sizes, WHICH: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Multiply p with the values at `stage`, and meanwhile take the keys of the stage after it into the softmax."""
    next_stage, next_phase = following(stage, phase, SPEC.STAGES)
    if SPEC.PINGPONG:
        take_turn(stage, WHICH)
    scores = start_scores(queries, slot, keys, next_stage, next_phase, SPEC)
    acc = start_output(p, acc, values, stage, phase, SPEC)
    if SPEC.PINGPONG:
        give_turn(stage, (WHICH + 1) % SPEC.CONSUMERS)
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(keys.empty.index(next_stage))
    if not SPEC.ALIGNED:
        scores = hide(scores, first_row, first_key, sizes, SPEC)
    new_p, row_max, row_sum, rescale = softmax(scores, row_max, row_sum, unit)
    row_sum = after(row_sum)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(values.empty.index(stage))
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, pack(new_p, values.tiles.dtype), row_max, row_sum, next_stage, next_phase


@gluon.jit
def make_ring(desc, ROWS_: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr):
    tiles = gl.allocate_shared_memory(
        desc.dtype, [STAGES, 1, 1, ROWS_, desc.block_type.shape[3]], desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return Ring(tiles, full, empty)


@gluon.jit(do_not_specialize=["q_len", "kv_len", "heads", "batches", "together"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, Out, Lse, stride_ob, stride_oh, stride_om,
    q_len, kv_len, heads, batches, together, scale, SPEC: gl.constexpr,
):  # fmt: skip
    """Grid (up to as many programs as there are tiles,). Lse: float32 (batch, heads, q_len), contiguous."""
    queries = make_ring(q_desc, ROWS, SPEC.Q_STAGES * SPEC.CONSUMERS, 1)
    keys = make_ring(k_desc, SPEC.BLOCK_N, SPEC.STAGES, SPEC.CONSUMERS)
    values = make_ring(v_desc, SPEC.BLOCK_N, SPEC.STAGES, SPEC.CONSUMERS)
    sizes = Sizes(q_len, kv_len, heads, batches, together)
    output = Output(Out, stride_ob, stride_oh, stride_om, Lse)
    unit = scale * LOG2_E

    tiles = gl.cdiv(q_len, ROWS * SPEC.CONSUMERS) * heads * batches
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    steps = tiles // programs
    if steps % 2 == 1:  # see tile_at
        place = programs - 1 - place
    steps += (place < tiles % programs).to(gl.int32)

    if SPEC.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (queries, keys, values, output, sizes, steps, unit, gl.constexpr(0), SPEC)),
                (consume, (queries, keys, values, output, sizes, steps, unit, gl.constexpr(1), SPEC)),
                (produce, (q_desc, k_desc, v_desc, queries, keys, values, sizes, steps, SPEC)),
            ],
            [4, 1],
            [SPEC.REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (queries, keys, values, output, sizes, steps, unit, gl.constexpr(0), SPEC)),
                (consume, (queries, keys, values, output, sizes, steps, unit, gl.constexpr(1), SPEC)),
                (consume, (queries, keys, values, output, sizes, steps, unit, gl.constexpr(2), SPEC)),
                (produce, (q_desc, k_desc, v_desc, queries, keys, values, sizes, steps, SPEC)),
            ],
            [4, 4, 1],
            [SPEC.REGISTERS, SPEC.REGISTERS, 24],
        )


# head_dim, causal -> consumers, block_n, stages, q_stages, ping-pong, registers
CONFIGS = {
    (64, True): (2, 128, 4, 2, False, 240),
    (64, False): (2, 128, 4, 2, False, 240),
    (128, True): (2, 128, 2, 2, False, 240),
    (128, False): (2, 128, 2, 2, False, 240),
}
TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
TOGETHER = 2


@functools.cache
def specify(head_dim: int, causal: bool, aligned: bool, group: int) -> Spec:
    """What the kernel is compiled with."""
    return Spec(*map(gl.constexpr, (group, causal, aligned, *CONFIGS[head_dim, causal])))


@functools.cache
def _layout(rows: int, head_dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, head_dim], TYPES[dtype])


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def supports(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `hopper_forward` takes these tensors: head_dim 64 or 128, 16 bits, and strides that TMA takes."""
    return (
        q.shape[3] in (64, 128)
        and q.dtype in TYPES
        and all(
            x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(s > 0 and s % 8 == 0 for s in x.stride()[:3])
            for x in (q, k, v)
        )
    )


def hopper_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> None:
    """Write softmax(q k^T * scale) v to out, and the log-sum-exp of the scaled scores to lse.

    Args:
        q, k, v: float16 or bfloat16 (batch, heads, length, 64 or 128) that `supports` accepts; heads of q a multiple
            of those of k and v. No length may be 0.
        out: like q, with any strides whose last is 1.
        lse: float32 (batch, heads, q_len), contiguous.
        causal: bottom-right aligned where the lengths differ; a row that sees nothing gets out 0 and lse -inf.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_len = k.shape[2]
    aligned = not causal or (kv_len - q_len) % 64 == 0
    spec = specify(head_dim, causal, aligned, heads // k.shape[1])
    block_n = spec.BLOCK_N.value
    tiles = triton.cdiv(q_len, 64 * spec.CONSUMERS.value) * heads * batch
    processors = _processors(q.device)
    together = processors // TOGETHER if causal else 1
    descriptors = [
        TensorDescriptor(x, x.shape, x.stride(), [1, 1, n, head_dim], _layout(n, head_dim, x.dtype))
        for x, n in ((q, 64), (k, block_n), (v, block_n))
    ]
    hopper_forward_kernel[min(tiles, processors),](
        *descriptors, out, lse, *out.stride()[:3], q_len, kv_len, heads, batch, together, scale, spec
    )
