"""The Hopper backward's two warps that fetch: tiles by TMA, and the rows' log-sum-exp and delta."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .backward_schedule import KEYS, STAGES, block_at, claim_keys, decode_work_item, passed
from .pipeline import LOG2_E, fetch
from .primitives import await_previous, let_next_start, tma_load
from .scheduler import CLAIM_STAGES, issue_claim, publish_claim, read_claim

TOGETHER = gl.constexpr(2)  # keys that a warp sets to 0 at a time: 16 bytes a thread at head_dim 128


@gluon.jit
def load_tiles(
    q_desc, k_desc, v_desc, do_desc, Counter, shared, sizes,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The load warp: claim work items, load K and V once for each, and Q and dO as their stages become free."""
    await_previous()  # delta_kernel, which sets the counter
    ordinal = 0
    tiles_before = 0
    index = 0
    while index >= 0:
        pending = issue_claim(Counter)
        if sizes.KvLengths is not None or (sizes.bounds is not None and sizes.bounds.RowStart is not None):
            pending = claim_keys(pending, Counter, sizes, BLOCK_M)
        index = publish_claim(pending, shared.claims, ordinal, sizes.key_blocks * sizes.flat_heads)
        if index >= 0:
            item = decode_work_item(index, sizes, BLOCK_M, CAUSAL)
            for step in range(item.steps):
                stage = (tiles_before + step) % STAGES
                phase = (tiles_before + step) // STAGES & 1
                coordinates = [item.batch, item.head, block_at(item, step, sizes, BLOCK_M) * BLOCK_M, 0]
                fetch(q_desc, coordinates, shared.queries, stage, phase)
                if step == 0:  # after Q, whose stage is free before the previous item's last step
                    mbarrier.wait(shared.kv_empty, (ordinal & 1) ^ 1)
                    mbarrier.expect(shared.kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
                    kv_coordinates = [item.batch, item.head // GROUP, item.key_block * KEYS, 0]
                    tma_load(k_desc, kv_coordinates, shared.kv_full, shared.k_tiles.index(0))
                    tma_load(v_desc, kv_coordinates, shared.kv_full, shared.v_tiles.index(0))
                fetch(do_desc, coordinates, shared.d_outs, stage, phase)
            tiles_before += item.steps
        ordinal += 1
    let_next_start()  # round_kernel, in the room that this program leaves


class Zeros(NamedTuple):
    """Gradients that are 0: a window hides a head's first keys from every query, and work items have those after."""

    DK: gl.tensor  # (batch, heads, unseen keys and the others, 128)
    DV: gl.tensor  # likewise, with the same strides
    share: gl.tensor  # keys of a work item, a multiple of TOGETHER
    unseen: gl.tensor  # of a head, a multiple of KEYS
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_n: gl.tensor


@gluon.jit
def clear_unseen(item, zeros):
    """Set this work item's share of its head's unseen dK and dV to 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [TOGETHER, 32 // TOGETHER], [1, 1], [1, 0])
    dims = gl.arange(0, 256 // TOGETHER, gl.SliceLayout(0, layout))[None, :]
    keys = gl.arange(0, TOGETHER, gl.SliceLayout(1, layout))[:, None]
    nothing = gl.zeros([TOGETHER, 256 // TOGETHER], gl.float32, layout).to(zeros.DK.dtype.element_ty)
    begin = item.key_block * zeros.share
    end = gl.minimum(begin + zeros.share, zeros.unseen)
    head = item.batch.to(gl.int64) * zeros.stride_b + item.head.to(gl.int64) * zeros.stride_h
    for first in range(begin, end, TOGETHER):
        places = head + (first + keys).to(gl.int64) * zeros.stride_n + dims
        gl.store(zeros.DK + places, nothing)
        gl.store(zeros.DV + places, nothing)


@gluon.jit
def load_row_statistics(
    Lse, Delta, zeros, shared, sizes, CAUSAL: gl.constexpr, DROP: gl.constexpr, SOFTCAP: gl.constexpr
):
    """Stage the rows' lse (base 2) and delta beside the tiles of Q; with dropout delta / DROP.SCALE.

    zeros: a `Zeros`, or None. This warp has time: its stores of 0 take 0.01 of the backward's.
    """
    BLOCK_M: gl.constexpr = shared.lse.shape[1]
    offsets = gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))
    await_previous()  # delta_kernel
    ordinal = 0
    tiles_before = 0
    index = read_claim(shared.claims, ordinal)
    while index >= 0:
        mbarrier.arrive(shared.claims.empty.index(ordinal % CLAIM_STAGES))
        item = decode_work_item(index, sizes, BLOCK_M, CAUSAL)
        first = item.flat_head * sizes.q_len
        block = item.last_block - passed(item, 0)
        toward = -1
        if item.upwards is not None:
            toward = gl.where(item.upwards, 1, -1)
        for step in range(item.steps):
            stage = (tiles_before + step) % STAGES
            if sizes.blocks is not None:
                block = block_at(item, step, sizes, BLOCK_M)
            rows = block * BLOCK_M + offsets
            lse = gl.load(Lse + (first + rows), mask=rows < sizes.q_len, other=float("-inf")) * LOG2_E
            delta = gl.load(Delta + (first + rows), mask=rows < sizes.q_len, other=0.0)
            if DROP is not None:
                delta /= DROP.SCALE
            if SOFTCAP > 0:
                lse -= SOFTCAP * LOG2_E
            # +inf for fully masked rows and rows beyond the end, whose P = exp2(S - inf) is then 0.
            lse = gl.where(lse == float("-inf"), float("inf"), lse)
            mbarrier.wait(shared.queries.empty.index(stage), ((tiles_before + step) // STAGES & 1) ^ 1)
            shared.lse.index(stage).store(lse)
            shared.delta.index(stage).store(delta)
            mbarrier.arrive(shared.rows_full.index(stage))
            block += toward
        if zeros is not None:
            clear_unseen(item, zeros)
        tiles_before += item.steps
        ordinal += 1
        index = read_claim(shared.claims, ordinal)
