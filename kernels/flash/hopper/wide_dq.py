"""The backward for Hopper (sm_90a) above head_dim 128, in Gluon: dQ. wide_dkdv.py has dK and dV, and says why.

The forward's tile and order: 128 queries, 64 for each of two consumer warpgroups, against blocks of 64 keys. The
warpgroups exchange nothing: while one computes dS, the other's products run.

Up to head_dim 192 tiles have 128 and 64 columns (split_tiles.py), of which not all are multiplied, and dQ is two
tensors (columns.py). Covers what wide_dkdv.py does.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from .bounds import Bounds, end_keys, first_keys
from .columns import multiply_parts, multiply_parts_into, no_sums, parts_of, scale_sums, wait_keeping
from .dropout import Draw, ds_of, negate
from .forward_schedule import ROWS, ForwardSizes, count_key_blocks, decode_tile, first_key_block
from .masks import mask_after, mask_before, mask_scores
from .padding import key_end, mask_padding
from .pipeline import LOG2_E, Ring, arrive, opaque
from .scheduler import CLAIM_STAGES, issue_claim, make_claims, publish_claim, read_claim
from .score_mods import alibi_of, modify_scores, probabilities
from .split_tiles import clear_rows, fetch_rows, is_split, make_tiles, phase_of, stage_of, tile_at
from .wide_dkdv import KEYS, store_rows

# Blocks of K and V together in shared memory: two of K and one of V, which is free after dP. With Q and dO 224 KB.
STAGES = gl.constexpr(3)
# Of tiles of 128 and 64 columns (split_tiles.py): 168 KB. There is room for 4, with a second block of V, 192, and for
# 5, with a third of K, 216.
SPLIT_STAGES = gl.constexpr(3)


class Rows(NamedTuple):
    """What is read and written by rows: pointers, and DQ's strides."""

    DQ: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_m: gl.tensor
    Lse: gl.tensor
    Delta: gl.tensor


class Rings(NamedTuple):
    """The pipelines. Q and dO have a tile for each consumer."""

    q: Ring
    d_out: Ring
    k: Ring
    v: Ring


@gluon.jit
def load_keys(q_desc, k_desc, v_desc, do_desc, Counter, rings, claims, sizes, SPEC: gl.constexpr):
    """The load warp: claim tiles of queries, load each, and the blocks of keys it sees, last first."""
    ordinal = 0
    blocks_before = 0
    index = publish_claim(issue_claim(Counter), claims, ordinal, sizes.tiles)
    while index >= 0:
        pending = issue_claim(Counter)
        first_row, head, batch = decode_tile(index, sizes, SPEC)
        for which in gl.static_range(2):
            row = first_row + which * ROWS
            fetch_rows(q_desc, batch, head, row, rings.q, which, ordinal & 1)
            fetch_rows(do_desc, batch, head, row, rings.d_out, which, ordinal & 1)
        blocks = count_key_blocks(first_row + 2 * ROWS, batch, key_end(batch, sizes), sizes, SPEC)
        visited = blocks - first_key_block(first_row, batch, sizes, SPEC)
        for passed in range(visited):
            block = blocks_before + passed
            kv_head, first_key = head // SPEC.GROUP, (blocks - 1 - passed) * KEYS
            k_stage, v_stage = stage_of(rings.k, block), stage_of(rings.v, block)
            fetch_rows(k_desc, batch, kv_head, first_key, rings.k, k_stage, phase_of(rings.k, block))
            fetch_rows(v_desc, batch, kv_head, first_key, rings.v, v_stage, phase_of(rings.v, block))
        blocks_before += visited
        ordinal += 1
        index = publish_claim(pending, claims, ordinal, sizes.tiles)


@gluon.jit
def skip_key_blocks(first, count, rings):
    """Release blocks of keys, `count` of a program's from the first-th on, that only the other consumer's rows see.

    Waiting keeps this one's arrivals in the right phase. Returns the number of the next block.
    """
    for block in range(first, first + count):
        k_stage, v_stage = stage_of(rings.k, block), stage_of(rings.v, block)
        mbarrier.wait(rings.k.full.index(k_stage), phase_of(rings.k, block))
        arrive(rings.k.empty.index(k_stage))
        mbarrier.wait(rings.v.full.index(v_stage), phase_of(rings.v, block))
        arrive(rings.v.empty.index(v_stage))
    return first + count


@gluon.jit
def clear_last_keys(block, keys_left, rings):
    """Set the padding in a tile's last block of keys, number `block` of a program's, to 0 before it is multiplied."""
    k_stage, v_stage = stage_of(rings.k, block), stage_of(rings.v, block)
    mbarrier.wait(rings.k.full.index(k_stage), phase_of(rings.k, block))
    clear_rows(rings.k.tiles, k_stage, keys_left, KEYS)
    mbarrier.wait(rings.v.full.index(v_stage), phase_of(rings.v, block))
    clear_rows(rings.v.tiles, v_stage, keys_left, KEYS)


@gluon.jit
def consume_keys(
    of_rows, rings, claims, sizes, scale, WHICH: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """A consumer warpgroup: rows WHICH * 64 to WHICH * 64 + 63 of each tile of queries."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    # How many of the blocks that a row of this consumer sees may be cut by the diagonal or the end of the keys.
    CUT: gl.constexpr = 1 if SPEC.ALIGNED else 2
    ordinal = 0
    blocks_before = 0
    index = read_claim(claims, ordinal)
    while index >= 0:
        tile_row, head, batch = decode_tile(index, sizes, SPEC)
        first_row = tile_row + WHICH * ROWS
        end = key_end(batch, sizes)
        blocks = count_key_blocks(first_row + ROWS, batch, end, sizes, SPEC)
        skipped = count_key_blocks(tile_row + 2 * ROWS, batch, end, sizes, SPEC) - blocks
        blocks_before = skip_key_blocks(blocks_before, skipped, rings)
        rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, scores_layout))
        first = (batch * sizes.heads + head) * sizes.q_len
        lse = gl.load(of_rows.Lse + (first + rows), mask=rows < sizes.q_len, other=float("-inf")) * LOG2_E
        if SPEC.SOFTCAP > 0:
            lse -= SPEC.SOFTCAP * LOG2_E
        lse = gl.where(lse == float("-inf"), float("inf"), lse)  # P is 0 there
        delta = gl.load(of_rows.Delta + (first + rows), mask=rows < sizes.q_len, other=0.0)
        if SPEC.DROP is not None:
            delta /= SPEC.DROP.SCALE
        alibi = alibi_of(head, first_row, sizes)
        begin = first_key_block(first_row, batch, sizes, SPEC)
        if SPEC.BOUNDED:
            first_seen = first_keys(rows, batch, sizes.bounds)
            last_row = gl.minimum(first_row + ROWS, sizes.q_len) - 1
            if SPEC.BY_QUERY:
                end_seen = end_keys(rows, batch, sizes.bounds)
                end_of_first = end_keys(first_row, batch, sizes.bounds) // KEYS
            whole = gl.cdiv(first_keys(last_row, batch, sizes.bounds), KEYS)  # the first block that none cuts
        dq = no_sums(ROWS, SPEC.HEAD_DIM)
        zeros = gl.zeros([ROWS, KEYS], gl.float32, scores_layout)
        mbarrier.wait(rings.q.full.index(WHICH), ordinal & 1)
        mbarrier.wait(rings.d_out.full.index(WHICH), ordinal & 1)
        if sizes.KvLengths is not None:
            clear_last_keys(blocks_before, end - (blocks - 1) * KEYS, rings)
        for passed in range(blocks - begin):
            left = opaque(blocks - 1 - passed)  # opaque: 4 B are spilled otherwise
            bias = zeros
            if SPEC.BY_QUERY:
                if left >= end_of_first:
                    bias = mask_after(bias, end_seen, left * KEYS)
            elif passed < CUT:
                bias = mask_scores(zeros, first_row, left * KEYS, sizes, SPEC)
                if sizes.KvLengths is not None:
                    bias = mask_padding(bias, end - left * KEYS)
            if SPEC.BOUNDED and left < whole:
                bias = mask_before(bias, first_seen, left * KEYS)
            draw: gl.constexpr = None
            if SPEC.DROP is not None:
                draw = Draw(gl.load(sizes.Seed), batch, head, first_row, left * KEYS)
            dq = process_keys(
                dq, bias, lse, delta, draw, alibi, left * KEYS, blocks_before + passed, left == begin, rings, sizes,
                scale, WHICH, SPEC,
            )  # fmt: skip
        blocks_before += blocks - begin
        if SPEC.BOUNDED:
            skipped = begin - first_key_block(tile_row, batch, sizes, SPEC)
            blocks_before = skip_key_blocks(blocks_before, skipped, rings)
        # Decoded again: kept live through the loop, they would take registers.
        tile_row, head, batch = decode_tile(opaque(index), sizes, SPEC)
        first_row = tile_row + WHICH * ROWS
        DQ = of_rows.DQ + batch.to(gl.int64) * of_rows.stride_b + head.to(gl.int64) * of_rows.stride_h
        stride_m, q_len = of_rows.stride_m, sizes.q_len
        if SPEC.DROP is not None:
            dq = scale_sums(dq, SPEC.DROP.SCALE)
        for part in gl.static_range(len(dq)):
            store_rows(dq[part] * scale, DQ, stride_m, first_row, q_len, part * dq[0].shape[1], SPEC.HEAD_DIM)
        ordinal += 1
        index = read_claim(claims, ordinal)
        arrive(claims.empty.index((ordinal - 1) % CLAIM_STAGES))  # read a whole tile ago


@gluon.jit
def process_keys(
    dq, bias, lse, delta, draw, alibi, first_key, block, last, rings, sizes, scale,
    WHICH: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """dq, as `no_sums` returns it, and what a block of keys adds to it.

    bias: initial accumulator of S, -inf at masked elements. lse: base 2, with softcap minus the cap. draw: dropout's,
    or None. alibi: an Alibi or None. first_key: of the block. last: whether Q and dO are released after dP.
    """
    dtype: gl.constexpr = rings.k.tiles[0].dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, dq[0].type.layout, 2)
    k_stage, v_stage = stage_of(rings.k, block), stage_of(rings.v, block)
    own = WHICH + (block >> 30)  # WHICH, hidden as in wide_dkdv.py; else 716 B are spilled
    q = tile_at(rings.q.tiles, own, 0, ROWS, SPEC.HEAD_DIM)
    d_out = tile_at(rings.d_out.tiles, own, 0, ROWS, SPEC.HEAD_DIM)
    k = tile_at(rings.k.tiles, k_stage, 0, KEYS, SPEC.HEAD_DIM)
    # 0, hidden too where a feature needs registers: 4 to 84 B are spilled otherwise
    MORE: gl.constexpr = draw is not None or alibi is not None or sizes.KvLengths is not None
    hidden = block >> 30 if SPEC.BOUNDED or SPEC.SOFTCAP > 0 or MORE else 0
    v = tile_at(rings.v.tiles, v_stage + hidden, 0, KEYS, SPEC.HEAD_DIM)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, bias.type.layout)
    mbarrier.wait(rings.k.full.index(k_stage), phase_of(rings.k, block))
    s = multiply_parts(q, k, bias, True)
    mbarrier.wait(rings.v.full.index(v_stage), phase_of(rings.v, block))
    dp = multiply_parts(d_out, v, zeros, False)
    s = warpgroup_mma_wait(parts_of(SPEC.HEAD_DIM), [s])
    if alibi is not None:
        of_ds = gl.exp2(modify_scores(s, scale * LOG2_E, alibi, first_key, SPEC) - lse[:, None])
    else:
        _, of_ds = probabilities(s, lse[:, None], scale * LOG2_E, SPEC.SOFTCAP)
    if SPEC.DROP is not None:
        of_ds = negate(of_ds, draw, SPEC.DROP, True)
    dp = warpgroup_mma_wait(0, [dp])
    arrive(rings.v.empty.index(v_stage))
    arrive(rings.q.empty.index(own), last)
    arrive(rings.d_out.empty.index(own), last)
    ds = gl.convert_layout(ds_of(of_ds, dp, delta[:, None], SPEC.DROP).to(dtype), operand)
    # The register operand stays live until it has been read: ptxas before 13.3 reuses its registers at once.
    dq, _ = wait_keeping(multiply_parts_into(ds, k, dq), (ds,), 0)
    arrive(rings.k.empty.index(k_stage))
    return dq


@gluon.jit(
    do_not_specialize=["q_len", "kv_len", "heads", "batches", "heads_per_group", "tiles", "left", "right"]
)
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, DQ, Lse, Delta, Counter, DocumentStart, KeyEnd, Seed, KvLengths, Slopes,
    stride_dqb, stride_dqh, stride_dqm,
    q_len, kv_len, heads, batches, heads_per_group, tiles, left, right, scale, SPEC: gl.constexpr,
):  # fmt: skip
    """dQ. Grid: (programs,), one for each SM but no more than there are tiles of 128 queries.

    The descriptors move (1, 1, 64, box_width). Lse, Delta: float32 (batch, heads, q_len), contiguous. Counter: int32
    0. DocumentStart, left: if SPEC.BOUNDED, KeyEnd or right: if SPEC.BY_QUERY (bounds.py), else None, as Seed without
    SPEC.DROP, KvLengths (batch,) without key padding and Slopes (heads,) without ALiBi.
    """
    if SPEC.HEAD_DIM % 16 != 0:  # as in `store_rows`
        stride_dqb, stride_dqh = stride_dqb // 8 * 8, stride_dqh // 8 * 8
    STAGES_OF_BOTH: gl.constexpr = SPLIT_STAGES if is_split(SPEC.HEAD_DIM) else STAGES
    q = make_tiles(q_desc, 2, 1, SPEC.HEAD_DIM)
    d_out = make_tiles(do_desc, 2, 1, SPEC.HEAD_DIM)
    k = make_tiles(k_desc, (STAGES_OF_BOTH + 1) // 2, 2, SPEC.HEAD_DIM)
    v = make_tiles(v_desc, STAGES_OF_BOTH // 2, 2, SPEC.HEAD_DIM)
    rings = Rings(q, d_out, k, v)
    absent: gl.constexpr = None
    bounds: gl.constexpr = None
    if SPEC.BOUNDED:
        padding: gl.constexpr = None
        if right is not None:
            padding = KvLengths
        keys = kv_len if SPEC.BY_QUERY else None
        bounds = Bounds(DocumentStart, None, left, q_len, KeyEnd, None, right, keys, padding)
    sizes = ForwardSizes(
        q_len, kv_len, heads, batches, heads_per_group, tiles, bounds, absent, KvLengths, Seed, Slopes
    )
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
