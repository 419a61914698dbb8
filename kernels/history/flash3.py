"""FlashAttention-3's forward (Shah et al. 2024, section 3) with one of its schedules undone, to be timed (Table 2).

    hopper/forward.py   both: a warp loads for two warpgroups that multiply; the product with a block's values and
                        that with the next keys are issued together, and under them runs as much of the softmax as
                        ptxas allows (here the maximum; the exponentials wait, which was faster: spec.py)
    "in turn"           the first alone: a block's two products and its softmax run one after the other
    "unspecialised"     the second alone, with the exponentials under the product with the values: all warps wait for
                        each other, then one of their threads loads

Without a mask, at head_dim 128 and 16 bits.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..arguments import check_scale
from ..flash.hopper.columns import no_sums, rescale_sums, wait_for_sums
from ..flash.hopper.descriptors import Descriptor, rows_of
from ..flash.hopper.forward import Rings, issue_pv, issue_qk, next_position, produce
from ..flash.hopper.forward_output import LN_2, Output, release_stored, store_output
from ..flash.hopper.forward_schedule import (
    ROWS,
    ForwardSizes,
    count_key_blocks,
    decode_tile,
    q_phase,
    q_slot,
)
from ..flash.hopper.launch import fits_forward
from ..flash.hopper.masks import mask_scores
from ..flash.hopper.pipeline import LOG2_E, arrive, make_barriers
from ..flash.hopper.primitives import compile_options, tma_load, tma_store
from ..flash.hopper.scheduler import CLAIM_STAGES, make_claims, read_claim
from ..flash.hopper.softmax import LOWEST, first_softmax, pack, partial_sums, softmax, unpack
from ..flash.hopper.spec import DYNAMIC_FROM, ForwardSpec, specify
from ..flash.hopper.split_tiles import make_tiles
from ..flash.operators import empty_like
from ..launch import Launch, launch, sm_count
from ..registry import AttentionError

Tensor = torch.Tensor
FORMS = ("in turn", "unspecialised")
HEAD_DIM = gl.constexpr(128)
BLOCK = gl.constexpr(128)  # queries of all warps together, and keys, of an unspecialised program
STAGES = gl.constexpr(2)
WARPS = 8  # of an unspecialised program


def flash3_forward(q: Tensor, k: Tensor, v: Tensor, form: str, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v, like q, without a gradient.

    Args:
        q, k, v: float16 or bfloat16 (batch, heads, length, 128), with as many heads each and strides that TMA takes.
        form: of FORMS.
    """
    if form not in FORMS:
        raise AttentionError(f"flash3 has the forms {' and '.join(FORMS)}, not {form}")
    if q.shape[3] != HEAD_DIM.value or q.shape[1] != k.shape[1] or not fits_forward(q, k, v):
        raise AttentionError(
            "flash3 takes float16 and bfloat16 that TMA can address, of head_dim 128 with ungrouped heads, "
            f"not {q.dtype} {tuple(q.shape)} and {tuple(k.shape)}"
        )
    out, lse = empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    scale = check_scale(scale, HEAD_DIM.value)
    if form == "unspecialised":
        launch(
            (lse,), None, lambda: _prepare_unspecialised(q, k, scale), (q, k, v, out), _describe_unspecialised
        )
    else:
        counter = q.new_zeros(1, dtype=torch.int32)
        launch((lse, counter), None, lambda: _prepare_in_turn(q, k, scale), (q, k, v, out), _describe_in_turn)
    return out


def _prepare_in_turn(q: Tensor, k: Tensor, scale: float) -> Launch:
    """As in hopper/launch.py."""
    (batch, heads, q_len, _), kv_len = q.shape, k.shape[2]
    tiles = triton.cdiv(q_len, 2 * ROWS.value) * heads * batch
    grid = (min(tiles, sm_count(q.device)), 1, 1)
    numbers = (q_len, kv_len, heads, batch, tiles, scale, spec_of(q_len, kv_len))
    return in_turn_kernel, grid, numbers, compile_options(HEAD_DIM.value)


def spec_of(q_len: int, kv_len: int) -> ForwardSpec:
    """The Spec of "in turn": that of long sequences, at every length."""
    return specify(HEAD_DIM.value, False, max(q_len, DYNAMIC_FROM), kv_len)


def _describe_in_turn(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple[Descriptor, ...]:
    rows = ROWS.value
    return rows_of(q, rows), rows_of(k, BLOCK.value), rows_of(v, BLOCK.value), rows_of(out, rows)


def _prepare_unspecialised(q: Tensor, k: Tensor, scale: float) -> Launch:
    (batch, heads, q_len, _), kv_len = q.shape, k.shape[2]
    grid = (triton.cdiv(q_len, BLOCK.value) * heads * batch, 1, 1)
    return unspecialised_kernel, grid, (q_len, kv_len, heads, scale), {"num_warps": WARPS}


def _describe_unspecialised(*moved: Tensor) -> tuple[Descriptor, ...]:
    return tuple(rows_of(x, BLOCK.value) for x in moved)


# ---- specialised, a block's products and its softmax in turn -------------------------------------


@gluon.jit
def attend_in_turn(
    index, ordinal, rings, stage, phase, output, sizes, exp2_scale, WHICH: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """As `attend` of hopper/forward.py, except for what the loop does."""
    dtype: gl.constexpr = rings.q.tiles[0].dtype
    tile_row, head, batch = decode_tile(index, sizes, SPEC)
    first_row = tile_row + WHICH * ROWS
    blocks = count_key_blocks(first_row + ROWS, batch, sizes.kv_len, sizes, SPEC)
    slot = q_slot(ordinal, WHICH, SPEC)
    mbarrier.wait(rings.q.full.index(slot), q_phase(ordinal, WHICH, SPEC))
    scores = warpgroup_mma_wait(0, [issue_qk(rings, slot, stage, phase, SPEC.BLOCK_N, SPEC)])
    mbarrier.arrive(rings.k.empty.index(stage))
    scores = mask_scores(scores, first_row, (blocks - 1) * SPEC.BLOCK_N, sizes, SPEC)
    p, row_max, row_sum = first_softmax(scores, exp2_scale, None, dtype, SPEC)
    release_stored(ordinal, rings, WHICH, SPEC)
    accs = no_sums(ROWS, SPEC.HEAD_DIM)
    accs = wait_for_sums(issue_pv(p, accs, rings, stage, phase, SPEC))
    mbarrier.arrive(rings.v.empty.index(stage))
    stage, phase = next_position(stage, phase, SPEC.STAGES)
    for _ in range(blocks - 1):
        scores = warpgroup_mma_wait(0, [issue_qk(rings, slot, stage, phase, SPEC.BLOCK_N, SPEC)])
        mbarrier.arrive(rings.k.empty.index(stage))
        new_p, row_max, row_sum, rescale = softmax(scores, row_max, row_sum, exp2_scale)
        accs = rescale_sums(accs, rescale)
        accs = wait_for_sums(issue_pv(pack(new_p, dtype), accs, rings, stage, phase, SPEC))
        mbarrier.arrive(rings.v.empty.index(stage))
        stage, phase = next_position(stage, phase, SPEC.STAGES)
    tile = rings.q.tiles[0].index(slot)
    store_output(tile, accs, row_max, row_sum, output, first_row, head, batch, sizes, SPEC)
    return stage, phase


@gluon.jit
def consume_in_turn(rings, claims, output, sizes, exp2_scale, WHICH: gl.constexpr, SPEC: gl.constexpr):
    """As `consume` of hopper/forward.py."""
    stage = 0
    phase = 0
    ordinal = 0
    index = read_claim(claims, ordinal)
    while index >= 0:
        stage, phase = attend_in_turn(
            index, ordinal, rings, stage, phase, output, sizes, exp2_scale, WHICH, SPEC
        )
        ordinal += 1
        index = read_claim(claims, ordinal)
        arrive(claims.empty.index((ordinal - 1) % CLAIM_STAGES))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["q_len", "kv_len", "heads", "batches", "tiles"])
def in_turn_kernel(
    q_desc, k_desc, v_desc, out_desc, Lse, Counter, q_len, kv_len, heads, batches, tiles, scale, SPEC: gl.constexpr
):  # fmt: skip
    """As `hopper_forward_kernel`, which describes the arguments, for a call without a mask and with claimed tiles."""
    rings = Rings(
        make_tiles(q_desc, SPEC.Q_SLOTS, 1, HEAD_DIM),
        make_tiles(k_desc, SPEC.STAGES, SPEC.CONSUMERS, HEAD_DIM),
        make_tiles(v_desc, SPEC.STAGES, SPEC.CONSUMERS, HEAD_DIM),
    )
    none: gl.constexpr = None
    sizes = ForwardSizes(q_len, kv_len, heads, batches, 1, tiles, none, none, none, none, none)
    output = Output(out_desc, none, none, none, none, Lse, none)
    claims = make_claims(SPEC.CONSUMERS)
    exp2_scale = scale * LOG2_E
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume_in_turn, (rings, claims, output, sizes, exp2_scale, gl.constexpr(0), SPEC)),
            (consume_in_turn, (rings, claims, output, sizes, exp2_scale, gl.constexpr(1), SPEC)),
            (produce, (q_desc, k_desc, v_desc, Counter, rings, claims, sizes, SPEC)),
        ],
        [4, 1],
        [SPEC.REGISTERS, 24],
    )


# ---- pipelined, all warps alike -------------------------------------------------------------------


@gluon.jit
def load_block(desc, passed, last, head, batch, tiles, barriers):
    """One thread starts to load the block of keys or values after `passed` others, counted from the last block, if
    there is one. No warp may still read what was in its place."""
    if passed <= last:
        stage = passed % STAGES
        mbarrier.expect(barriers.index(stage), desc.block_type.nbytes)
        tma_load(desc, [batch, head, (last - passed) * BLOCK, 0], barriers.index(stage), tiles.index(stage))


@gluon.jit
def loaded_block(passed, tiles, barriers):
    """The block, once it is there: shared memory (keys, dims)."""
    stage = passed % STAGES
    mbarrier.wait(barriers.index(stage), passed // STAGES & 1)
    return tiles.index(stage).reshape([BLOCK, HEAD_DIM])


@gluon.jit(do_not_specialize=["q_len", "kv_len", "heads"])
def unspecialised_kernel(q_desc, k_desc, v_desc, out_desc, Lse, q_len, kv_len, heads, scale):
    """out = softmax(q k^T * scale) v, and lse. Grid: (blocks of 128 queries of all heads,); 8 warps. The descriptors
    move (1, 1, 128, 128)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    dtype: gl.constexpr = q_desc.dtype
    shape: gl.constexpr = q_desc.block_type.shape
    q_tile = gl.allocate_shared_memory(dtype, shape, q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES] + shape, k_desc.layout)  # noqa: RUF005
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES] + shape, v_desc.layout)  # noqa: RUF005
    q_full, k_full, v_full = make_barriers(1, 1), make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    fence_async_shared()
    blocks = gl.cdiv(q_len, BLOCK)
    first_row, flat_head = gl.program_id(0) % blocks * BLOCK, gl.program_id(0) // blocks
    head, batch = flat_head % heads, flat_head // heads
    last = gl.maximum(gl.cdiv(kv_len, BLOCK), 1) - 1
    mbarrier.expect(q_full.index(0), q_desc.block_type.nbytes)
    tma_load(q_desc, [batch, head, first_row, 0], q_full.index(0), q_tile)
    for passed in gl.static_range(STAGES):
        load_block(k_desc, passed, last, head, batch, k_tiles, k_full)
        load_block(v_desc, passed, last, head, batch, v_tiles, v_full)

    q = q_tile.reshape([BLOCK, HEAD_DIM])
    zeros = gl.zeros([BLOCK, BLOCK], gl.float32, layout)
    exp2_scale = scale * LOG2_E
    mbarrier.wait(q_full.index(0), 0)
    k = loaded_block(0, k_tiles, k_full).permute([1, 0])
    scores = warpgroup_mma_wait(0, [warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)])
    gl.barrier()  # all warps have read it
    load_block(k_desc, STAGES, last, head, batch, k_tiles, k_full)
    keys = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
    scores = gl.where(keys < kv_len - last * BLOCK, scores, float("-inf"))
    # Not by `softmax`, whose rows are those of one warpgroup.
    row_max = gl.maximum(gl.max(scores, 1) * exp2_scale, LOWEST)
    p = gl.exp2(scores * exp2_scale - row_max[:, None])
    row_sum = partial_sums(p)
    p = pack(p, dtype)
    acc = gl.zeros([BLOCK, HEAD_DIM], gl.float32, layout)
    for passed in range(last):
        k = loaded_block(passed + 1, k_tiles, k_full).permute([1, 0])
        scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        v = loaded_block(passed, v_tiles, v_full)
        acc = warpgroup_mma(unpack(p, dtype, layout), v, acc, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        new_max = gl.maximum(row_max, gl.max(scores, 1) * exp2_scale)
        new_p = gl.exp2(scores * exp2_scale - new_max[:, None])
        rescale = gl.exp2(row_max - new_max)
        row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        row_sum += partial_sums(new_p)
        row_max = new_max
        # ptxas moves nothing across it: the exponentials would sink below the next wait, as in hopper/forward.py.
        mbarrier.wait(v_full.index((passed + 1) % STAGES), (passed + 1) // STAGES & 1)
        acc = warpgroup_mma_wait(0, [acc])
        gl.barrier()  # all warps have read both
        load_block(k_desc, passed + 1 + STAGES, last, head, batch, k_tiles, k_full)
        load_block(v_desc, passed + STAGES, last, head, batch, v_tiles, v_full)
        acc = acc * gl.convert_layout(rescale, rows_layout)[:, None]
        p = pack(new_p, dtype)
    v = loaded_block(last, v_tiles, v_full)
    acc = warpgroup_mma_wait(0, [warpgroup_mma(unpack(p, dtype, layout), v, acc, is_async=True)])

    total = gl.convert_layout(gl.sum(row_sum, 1), rows_layout)
    rows = first_row + gl.arange(0, BLOCK, layout=rows_layout)
    Lse += flat_head.to(gl.int64) * q_len
    gl.store(Lse + rows, (row_max + gl.log2(total)) * LN_2, mask=rows < q_len)
    q.store((acc * (1 / total)[:, None]).to(dtype))
    fence_async_shared()
    gl.barrier()
    tma_store(out_desc, [batch, head, first_row, 0], q_tile)
    tma.store_wait(0)
