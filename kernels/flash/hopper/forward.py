"""The forward kernel for Hopper (sm_90a), in Gluon: FlashAttention-3's schedule (Shah et al. 2024, section 3).

Warp-specialised and persistent. A producer warp loads tiles of Q, K and V into rings of shared memory by TMA. Two or
three consumer warpgroups own 64 queries each; a consumer issues S = Q K^T of the next block of keys and O += P V of
the current one asynchronously, and computes the next block's softmax while P V runs (softmax.py). A program
processes one tile of queries after another (forward_schedule.py), and the producer prefetches the next tile while the
consumers finish (forward_output.py: how out leaves).

Covers plain attention, windows and documents under the causal mask or by query (bounds.py), block masks
(block_masks.py), key padding (padding.py), dropout (dropout.py), sinks, softcap and ALiBi (score_mods.py). Blocks of
keys that are fully masked are not visited. All else is left to the portable kernel (portable/forward.py), whose
conventions this one follows.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from .block_masks import LISTS, Blocks, count_visited, list_of
from .bounds import Bounds, end_keys, first_keys
from .columns import multiply_parts, multiply_parts_into, no_sums, parts_of, rescale_sums, wait_for_sums
from .dropout import Draw, draw_words, drop
from .forward_output import Output, recomputes_tile, release_stored, store_output
from .forward_schedule import (
    ROWS,
    ForwardSizes,
    count_key_blocks,
    count_static_tiles,
    decode_tile,
    first_key_block,
    q_phase,
    q_slot,
    static_tile,
)
from .masks import mask_after, mask_before, mask_scores
from .padding import key_end, mask_padding
from .pipeline import LOG2_E, Ring, arrive, opaque
from .scheduler import CLAIM_STAGES, issue_claim, make_claims, publish_claim, read_claim
from .score_mods import alibi_of, modify_scores, score_exp2_scale
from .softmax import first_softmax, pack, softmax, unpack, widen
from .split_tiles import clear_rows, fetch_rows, make_tiles, tile_at

NUMBERS = [*ForwardSizes._fields[: ForwardSizes._fields.index("bounds")], "left", "right", *LISTS]


class Rings(NamedTuple):
    """The producer-to-consumer pipelines, one for each operand."""

    q: Ring
    k: Ring
    v: Ring


@gluon.jit
def next_position(stage, phase, STAGES: gl.constexpr):
    """The ring's next stage, and the phase parity of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), phase ^ last.to(gl.int32)


@gluon.jit
def fetch_tile(index, ordinal, q_desc, k_desc, v_desc, rings, stage, phase, sizes, SPEC: gl.constexpr):
    """Load the index-th tile of queries, then all blocks of keys and values that it sees, the last block first.

    Returns the ring position (stage, phase) after the last block.
    """
    first_row, head, batch = decode_tile(index, sizes, SPEC)
    for which in gl.static_range(SPEC.CONSUMERS):
        slot = q_slot(ordinal, which, SPEC)
        row = first_row + which * ROWS
        fetch_rows(q_desc, batch, head, row, rings.q, slot, q_phase(ordinal, which, SPEC))
    if SPEC.LISTED:
        List = list_of(first_row // SPEC.BLOCK_N, head, batch, sizes.blocks)
        blocks = count_visited(List)
    else:
        rows = first_row + ROWS * SPEC.CONSUMERS
        blocks = count_key_blocks(rows, batch, key_end(batch, sizes), sizes, SPEC)
    kv_head = head // SPEC.GROUP
    for passed in range(blocks - first_key_block(first_row, batch, sizes, SPEC)):
        first_key = (blocks - 1 - passed) * SPEC.BLOCK_N
        if SPEC.LISTED:
            first_key = gl.load(List + blocks - passed) * SPEC.BLOCK_N
        fetch_rows(k_desc, batch, kv_head, first_key, rings.k, stage, phase)
        if SPEC.Q_SLOTS < 2 * SPEC.CONSUMERS:
            wait_for_queries(ordinal, rings, SPEC)
        fetch_rows(v_desc, batch, kv_head, first_key, rings.v, stage, phase)
        stage, phase = next_position(stage, phase, SPEC.STAGES)
    return stage, phase


@gluon.jit
def wait_for_queries(ordinal, rings, SPEC: gl.constexpr):
    """Wait until the tile's Qs are loaded. With three slots, two consumers share them: a consumer's next Q follows
    the other's in its slot, where one parity means both that it is loaded and that the one before is not. After a
    short tile, whose keys and values came before the other's Q, a consumer would take that one."""
    for which in gl.static_range(SPEC.CONSUMERS):
        mbarrier.wait(rings.q.full.index(q_slot(ordinal, which, SPEC)), q_phase(ordinal, which, SPEC))


@gluon.jit
def produce(q_desc, k_desc, v_desc, Counter, rings, claims, sizes, SPEC: gl.constexpr):
    """The producer warp: load one tile of queries after another, in the order of forward_schedule.py."""
    stage = 0
    phase = 0
    if SPEC.CLAIMS_LATE:
        ordinal = 0
        index = publish_claim(gl.program_id(0), claims, ordinal, sizes.tiles)
        while index >= 0:
            stage, phase = fetch_tile(
                index, ordinal, q_desc, k_desc, v_desc, rings, stage, phase, sizes, SPEC
            )
            pending = issue_claim(Counter) + gl.num_programs(0)
            ordinal += 1
            index = publish_claim(pending, claims, ordinal, sizes.tiles)
    elif SPEC.DYNAMIC:
        ordinal = 0
        index = publish_claim(issue_claim(Counter), claims, ordinal, sizes.tiles)
        while index >= 0:
            pending = issue_claim(Counter)
            stage, phase = fetch_tile(
                index, ordinal, q_desc, k_desc, v_desc, rings, stage, phase, sizes, SPEC
            )
            ordinal += 1
            index = publish_claim(pending, claims, ordinal, sizes.tiles)
    else:
        for ordinal in range(count_static_tiles(sizes)):
            index = static_tile(ordinal, sizes)
            stage, phase = fetch_tile(
                index, ordinal, q_desc, k_desc, v_desc, rings, stage, phase, sizes, SPEC
            )


@gluon.jit
def skip_key_blocks(blocks, rings, stage, phase, SPEC: gl.constexpr):
    """Release blocks of keys that were loaded for other consumers' rows, and that this one's do not see.

    Waiting for each one first keeps this consumer's arrivals in the right phase.
    """
    for _ in range(blocks):
        mbarrier.wait(rings.k.full.index(stage), phase)
        mbarrier.arrive(rings.k.empty.index(stage))
        mbarrier.wait(rings.v.full.index(stage), phase)
        mbarrier.arrive(rings.v.empty.index(stage))
        stage, phase = next_position(stage, phase, SPEC.STAGES)
    return stage, phase


@gluon.jit
def issue_qk(rings, slot, stage, phase, SEEN: gl.constexpr, SPEC: gl.constexpr):
    """Issue q k^T for the first SEEN keys of `stage`, asynchronously: float32 (ROWS, SEEN)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SEEN, 16])
    q = tile_at(rings.q.tiles, slot, 0, ROWS, SPEC.HEAD_DIM)
    k = tile_at(rings.k.tiles, stage, 0, SEEN, SPEC.HEAD_DIM)
    nothing = gl.zeros([ROWS, SEEN], gl.float32, layout)
    mbarrier.wait(rings.k.full.index(stage), phase)
    return multiply_parts(q, k, nothing, False)


@gluon.jit
def issue_pv(p, accs, rings, stage, phase, SPEC: gl.constexpr):
    """Issue accs + p v for the values of `stage`, asynchronously. p: packed, as `pack` returns it."""
    v = tile_at(rings.v.tiles, stage, 0, SPEC.BLOCK_N, SPEC.HEAD_DIM)
    p = unpack(p, rings.v.tiles[0].dtype, accs[0].type.layout)
    if not SPEC.EXP_BEFORE_WAIT:
        mbarrier.wait(rings.v.full.index(stage), phase)
    return multiply_parts_into(p, v, accs)


@gluon.jit
def pipelined_step(
    accs, p, row_max, row_sum, rings, slot, stage, phase,
    exp2_scale, alibi, first_row, first_key, head, batch, first_seen, end_seen, sizes,
    SPEC: gl.constexpr,
):  # fmt: skip
    """One pipelined step: accs += p v for the block at `stage`, overlapped with scores and softmax of the next block.

    first_key: of the next block. first_seen, end_seen: the first visible key of each row, and one past the last, or
    None if all rows see the block from its first key on, or to its last.

    Returns the new accs (rescaled to the new maximum), the next block's packed p, the softmax state, and its stage.
    """
    next_stage, next_phase = next_position(stage, phase, SPEC.STAGES)
    scores = issue_qk(rings, slot, next_stage, next_phase, SPEC.BLOCK_N, SPEC)
    if SPEC.DROP is not None:
        # Drawn between two waits, across which ptxas moves nothing; else it would draw before Q K^T, or after its
        # end. At width 128 the first wait costs registers, and up to 20 B are spilled.
        if rings.q.tiles[0].shape[4] == 64:
            mbarrier.wait(rings.k.full.index(next_stage), next_phase)
        draw = Draw(gl.load(sizes.Seed), batch, head, first_row, first_key)
        words = draw_words(draw, ROWS, SPEC.BLOCK_N)
    accs = issue_pv(p, accs, rings, stage, phase, SPEC)
    scores = warpgroup_mma_wait(parts_of(SPEC.HEAD_DIM), [scores])
    mbarrier.arrive(rings.k.empty.index(next_stage))
    scores = modify_scores(scores, exp2_scale, alibi, first_key, SPEC)
    if not SPEC.ALIGNED:
        scores = mask_scores(scores, first_row, first_key, sizes, SPEC)
    if first_seen is not None:
        scores = mask_before(scores, first_seen, first_key)
    if end_seen is not None:
        scores = mask_after(scores, end_seen, first_key)
    new_p, row_max, row_sum, rescale = softmax(
        scores, row_max, row_sum, score_exp2_scale(exp2_scale, alibi, SPEC)
    )
    if SPEC.DROP is not None:
        new_p = drop(new_p, words, SPEC.DROP)
    if SPEC.EXP_BEFORE_WAIT:
        # ptxas moves nothing across this wait. Without it the exponentials sink below the next wait, the one for P V.
        # Which is faster changes with the schedule and with how out is stored: 0.94 to 1.12 (spec.py, LOG.md).
        mbarrier.wait(rings.v.full.index(next_stage), next_phase)
    accs = wait_for_sums(accs)
    mbarrier.arrive(rings.v.empty.index(stage))
    accs = rescale_sums(accs, rescale)
    # Packed only now: packing before that wait makes ptxas serialise the wgmmas (C7513).
    return accs, pack(new_p, rings.v.tiles[0].dtype), row_max, row_sum, next_stage, next_phase


@gluon.jit
def attend(
    index, ordinal, rings, stage, phase, output, sizes, exp2_scale, WHICH: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """Attention for this consumer's 64 rows, from WHICH * 64 on, of the index-th tile of queries.

    ordinal: how many tiles this program did before; it selects the Q slot and phase. Returns the K/V ring position.
    """
    dtype: gl.constexpr = rings.q.tiles[0].dtype
    SEEN: gl.constexpr = SPEC.BLOCK_N // 2 if SPEC.HALVED and WHICH == 0 else SPEC.BLOCK_N
    tile_row, head, batch = decode_tile(index, sizes, SPEC)
    first_row = tile_row + WHICH * ROWS
    alibi = alibi_of(head, first_row, sizes)
    if SPEC.LISTED:
        List = list_of(tile_row // SPEC.BLOCK_N, head, batch, sizes.blocks)
        blocks = count_visited(List)
        last_key = gl.load(List + blocks) * SPEC.BLOCK_N
    else:
        end = key_end(batch, sizes)
        if SPEC.DROP is not None and (SPEC.HEAD_DIM > 128 or not SPEC.CAUSAL):
            end = opaque(end)  # or 12 B are spilled at width 128, and 4 at 256
        blocks = count_key_blocks(first_row + ROWS, batch, end, sizes, SPEC)
        skipped = count_key_blocks(tile_row + ROWS * SPEC.CONSUMERS, batch, end, sizes, SPEC) - blocks
        stage, phase = skip_key_blocks(skipped, rings, stage, phase, SPEC)
        last_key = (blocks - 1) * SPEC.BLOCK_N  # first key of the last block
    slot = q_slot(ordinal, WHICH, SPEC)
    mbarrier.wait(rings.q.full.index(slot), q_phase(ordinal, WHICH, SPEC))

    scores = issue_qk(rings, slot, stage, phase, SEEN, SPEC)
    # Released here rather than below, the slot gets its next Q sooner: 0.92 to 1.00 of the time if tiles are
    # scheduled statically, up to 1.01 if dynamically (LOG.md).
    if SPEC.OUT_BY_TMA and not SPEC.DYNAMIC:
        release_stored(ordinal, rings, WHICH, SPEC)
    words: gl.constexpr = None
    if SPEC.DROP is not None:
        words = draw_words(Draw(gl.load(sizes.Seed), batch, head, first_row, last_key), ROWS, SEEN)
    scores = warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(rings.k.empty.index(stage))
    scores = modify_scores(scores, exp2_scale, alibi, last_key, SPEC)
    if not SPEC.BY_QUERY:
        scores = mask_scores(scores, first_row, last_key, sizes, SPEC)
    if SPEC.BOUNDED:
        rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores.type.layout))
        first_seen = first_keys(rows, batch, sizes.bounds)
        scores = mask_before(scores, first_seen, last_key)
    if SPEC.BY_QUERY:
        end_seen = end_keys(rows, batch, sizes.bounds)
        scores = mask_after(scores, end_seen, last_key)
    if sizes.KvLengths is not None:
        if not SPEC.BY_QUERY:
            scores = mask_padding(scores, end - last_key)
        mbarrier.wait(rings.v.full.index(stage), phase)
        clear_rows(rings.v.tiles, stage, end - last_key, SPEC.BLOCK_N)
    p, row_max, row_sum = first_softmax(scores, score_exp2_scale(exp2_scale, alibi, SPEC), words, dtype, SPEC)
    if SEEN < SPEC.BLOCK_N:
        p, row_max, row_sum = widen(p, row_max, row_sum, dtype)
    if SPEC.OUT_BY_TMA and SPEC.DYNAMIC:
        release_stored(ordinal, rings, WHICH, SPEC)
    accs = no_sums(ROWS, SPEC.HEAD_DIM)
    if SPEC.EXP_BEFORE_WAIT:
        mbarrier.wait(rings.v.full.index(stage), phase)
    unmasked = blocks - 1  # how many blocks still to come need no mask
    if SPEC.BOUNDED:
        begin = first_key_block(first_row, batch, sizes, SPEC)
        if SPEC.BY_QUERY:
            end_of_first = end_keys(first_row, batch, sizes.bounds) // SPEC.BLOCK_N
            unmasked = gl.minimum(unmasked, gl.maximum(end_of_first, begin))
            for block in range(blocks - 2, unmasked - 1, -1):
                first_key = block * SPEC.BLOCK_N
                accs, p, row_max, row_sum, stage, phase = pipelined_step(
                    accs, p, row_max, row_sum, rings, slot, stage, phase,
                    exp2_scale, alibi, first_row, first_key, head, batch, first_seen, end_seen, sizes, SPEC,
                )  # fmt: skip
            blocks = unmasked + 1  # the last block that has been visited is the first one of these
        begin_of_last = first_keys(gl.minimum(first_row + ROWS, sizes.q_len) - 1, batch, sizes.bounds)
        unmasked = gl.minimum(
            gl.maximum(unmasked - gl.cdiv(begin_of_last, SPEC.BLOCK_N), 0), unmasked - begin
        )
    for passed in range(unmasked):
        first_key = (blocks - 2 - passed) * SPEC.BLOCK_N
        accs, p, row_max, row_sum, stage, phase = pipelined_step(
            accs, p, row_max, row_sum, rings, slot, stage, phase,
            exp2_scale, alibi, first_row, first_key, head, batch, None, None, sizes, SPEC,
        )  # fmt: skip
    if SPEC.BOUNDED:
        for block in range(blocks - 2 - unmasked, begin - 1, -1):
            first_key = block * SPEC.BLOCK_N
            accs, p, row_max, row_sum, stage, phase = pipelined_step(
                accs, p, row_max, row_sum, rings, slot, stage, phase,
                exp2_scale, alibi, first_row, first_key, head, batch, first_seen, None, sizes, SPEC,
            )  # fmt: skip
    if not SPEC.OUT_BY_TMA:
        mbarrier.arrive(rings.q.empty.index(slot))
    accs = wait_for_sums(issue_pv(p, accs, rings, stage, phase, SPEC))
    mbarrier.arrive(rings.v.empty.index(stage))
    if recomputes_tile(SPEC):
        tile_row, head, batch = decode_tile(opaque(index), sizes, SPEC)
        first_row, slot = tile_row + WHICH * ROWS, q_slot(opaque(ordinal), WHICH, SPEC)
    tile = rings.q.tiles[0].index(slot)
    store_output(tile, accs, row_max, row_sum, output, first_row, head, batch, sizes, SPEC)
    stage, phase = next_position(stage, phase, SPEC.STAGES)
    if SPEC.BOUNDED:
        skipped = begin - first_key_block(tile_row, batch, sizes, SPEC)
        stage, phase = skip_key_blocks(skipped, rings, stage, phase, SPEC)
    return stage, phase


@gluon.jit
def consume(rings, claims, output, sizes, exp2_scale, WHICH: gl.constexpr, SPEC: gl.constexpr):
    """A consumer warpgroup: rows WHICH * 64 to WHICH * 64 + 63 of each tile of queries."""
    stage = 0
    phase = 0
    if SPEC.DYNAMIC:
        ordinal = 0
        index = read_claim(claims, ordinal)
        while index >= 0:
            stage, phase = attend(index, ordinal, rings, stage, phase, output, sizes, exp2_scale, WHICH, SPEC)
            ordinal += 1
            index = read_claim(claims, ordinal)
            arrive(claims.empty.index((ordinal - 1) % CLAIM_STAGES))  # read a whole tile ago
    else:
        # A counted loop: one that runs until no tile is left took 1.01 to 1.03 of the time, without a mask (LOG.md).
        for ordinal in range(count_static_tiles(sizes)):
            index = static_tile(ordinal, sizes)
            stage, phase = attend(index, ordinal, rings, stage, phase, output, sizes, exp2_scale, WHICH, SPEC)
    if SPEC.OUT_BY_TMA:
        tma.store_wait(0)  # a program's shared memory ends with it


@gluon.jit(do_not_specialize=NUMBERS)
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, Out, Lse, OutLow, Counter, DocumentStart, KeyEnd, KeyBlocks, KvLengths, Seed, Sinks,
    Slopes, stride_ob, stride_oh, stride_om,
    q_len, kv_len, heads, batches, heads_per_group, tiles, left, right, stride_lb, stride_lh, width,
    scale, SPEC: gl.constexpr,
):  # fmt: skip
    """out = softmax(q k^T * scale) v, and lse. Grid: (programs,), one for each SM but no more than there are tiles.

    The descriptors move (1, 1, 64, box_width) of Q and (1, 1, BLOCK_N, box_width) of K and V. Out: a descriptor as
    of Q if SPEC.OUT_BY_TMA, else a pointer. Lse: float32 (batch, heads, q_len), contiguous. OutLow: what rounding
    took from out, laid out as Out, or None. Counter: int32 0, the tile counter, if SPEC.DYNAMIC (scheduler.py).
    DocumentStart, left: if SPEC.BOUNDED, KeyEnd or right: if SPEC.BY_QUERY (bounds.py). KeyBlocks, stride_lb,
    stride_lh, width: lists of blocks of keys, if SPEC.LISTED (block_masks.py). KvLengths: int32 (batch,), or None.
    Seed: int64, if SPEC.DROP. Sinks, Slopes (of ALiBi): (heads,), or None.
    """
    q = make_tiles(q_desc, SPEC.Q_SLOTS, 1, SPEC.HEAD_DIM)
    k = make_tiles(k_desc, SPEC.STAGES, SPEC.CONSUMERS, SPEC.HEAD_DIM)
    v = make_tiles(v_desc, SPEC.STAGES, SPEC.CONSUMERS, SPEC.HEAD_DIM)
    rings = Rings(q, k, v)
    bounds: gl.constexpr = None
    if SPEC.BOUNDED:
        padding: gl.constexpr = None
        if right is not None:
            padding = KvLengths
        keys = kv_len if SPEC.BY_QUERY else None
        bounds = Bounds(DocumentStart, None, left, q_len, KeyEnd, None, right, keys, padding)
    blocks: gl.constexpr = None
    if SPEC.LISTED:
        blocks = Blocks(KeyBlocks, stride_lb, stride_lh, width)
    sizes = ForwardSizes(
        q_len, kv_len, heads, batches, heads_per_group, tiles, bounds, blocks, KvLengths, Seed, Slopes
    )  # fmt: skip
    if SPEC.HEAD_DIM % 16 != 0:  # Triton looks for multiples of 16 only, and stores single elements otherwise
        stride_ob, stride_oh, stride_om = stride_ob // 8 * 8, stride_oh // 8 * 8, stride_om // 8 * 8
    output = Output(Out, OutLow, stride_ob, stride_oh, stride_om, Lse, Sinks)
    # Never create a barrier that no warp uses: Triton reuses its memory for other data (compile_report checks this).
    claims: gl.constexpr = None
    if SPEC.DYNAMIC:
        claims = make_claims(SPEC.CONSUMERS)
    exp2_scale = scale * LOG2_E
    fence_async_shared()  # make the initialised barriers visible to TMA
    if SPEC.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (rings, claims, output, sizes, exp2_scale, gl.constexpr(0), SPEC)),
                (consume, (rings, claims, output, sizes, exp2_scale, gl.constexpr(1), SPEC)),
                (produce, (q_desc, k_desc, v_desc, Counter, rings, claims, sizes, SPEC)),
            ],
            [4, 1],
            [SPEC.REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (rings, claims, output, sizes, exp2_scale, gl.constexpr(0), SPEC)),
                (consume, (rings, claims, output, sizes, exp2_scale, gl.constexpr(1), SPEC)),
                (consume, (rings, claims, output, sizes, exp2_scale, gl.constexpr(2), SPEC)),
                (produce, (q_desc, k_desc, v_desc, Counter, rings, claims, sizes, SPEC)),
            ],
            [4, 4, 1],
            [SPEC.REGISTERS, SPEC.REGISTERS, 24],
        )
