"""The forward kernel: FlashAttention-2 order (Dao 2023, Algorithm 1).

Each program owns BLOCK_M queries and loops over the keys they see, BLOCK_N at a time. The accumulator is divided by
the softmax sum once, at the end. Exponentials are base 2, with scale * log2(e) folded into one multiply-add.
"""

import triton
import triton.language as tl

from ..dropout import is_kept
from .masks import BLOCK_MASK_SIZE, block_list, listed, split_by_mask, visible_keys
from .memory import load_rows, store_rows
from .score_mods import LOG2_E, modify_scores, score_exp2_scale
from .spec import rules_of

LN_2 = tl.constexpr(0.6931471805599453)
# Initial value of the running maximum: below every score, but finite, so that a row with only masked scores (-inf) so
# far computes exp2(-inf - LOWEST) = 0 instead of -inf - -inf = NaN.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def forward_kernel(
    Q, K, V, Out, OutLow, Lse, Seed, Slopes, Sinks, DocumentStart, DocumentEnd, KvLengths, Blocks,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_ob, stride_oh, stride_blocks_b,
    stride_blocks_h,
    q_len, kv_len, scale,
    stride_qm: tl.constexpr, stride_kn: tl.constexpr, stride_vn: tl.constexpr, stride_om: tl.constexpr,
    SPEC: tl.constexpr,
):  # fmt: skip
    """out and lse, and with OutLow the rounding error of out. Grid (ceil(q_len / BLOCK_M), heads, batch).

    Lse: float32 (batch, heads, q_len), contiguous: natural log-sum-exp of the scaled scores. OutLow: like Out.
    """
    # Which queries. Under the causal mask the last tiles see the most keys, so they start first.
    index = tl.program_id(0)
    if SPEC.CAUSAL:
        index = tl.num_programs(0) - 1 - index
    first_row = index * SPEC.BLOCK_M
    head = tl.program_id(1)
    batch = tl.program_id(2)
    rules = rules_of(
        batch, head, Seed, Slopes, DocumentStart, DocumentEnd, KvLengths, q_len, kv_len, scale
    )  # fmt: skip
    batch_64, q_head, kv_head = batch.to(tl.int64), head.to(tl.int64), (head // SPEC.GROUP).to(tl.int64)
    Q += batch_64 * stride_qb + q_head * stride_qh
    K += batch_64 * stride_kb + kv_head * stride_kh
    V += batch_64 * stride_vb + kv_head * stride_vh
    Out += batch_64 * stride_ob + q_head * stride_oh
    Lse += (batch_64 * tl.num_programs(1) + head) * q_len

    if SPEC.BLOCK_D > 64:
        # Rows are counted from the tile's first, unlike in the store of out: if both used one mask, its predicates
        # would stay live through the loops, and d128 on sm_90 spills up to 28 B with a feature.
        first_64, left = first_row.to(tl.int64), q_len - first_row
        q = load_rows(Q + first_64 * stride_qm, 0, left, stride_qm, SPEC, SPEC.BLOCK_M, True)
    else:  # nothing spills; two masks cost d64 with dropout 130 registers instead of 128: three CTAs, not four
        q = load_rows(Q, first_row, q_len, stride_qm, SPEC, SPEC.BLOCK_M, True)
    acc = tl.zeros([SPEC.BLOCK_M, SPEC.BLOCK_D], tl.float32)
    row_max = tl.full([SPEC.BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([SPEC.BLOCK_M], tl.float32)
    if Sinks is not None:  # as if every row had already seen one key, whose value is 0
        sink = tl.load(Sinks + head).to(tl.float32) * LOG2_E
        row_max = tl.maximum(row_max, sink)
        row_sum += tl.exp2(sink - row_max)  # 1, or 0 for a sink of -inf, which means none

    # Which keys. The masked edges go first: in the opposite order ptxas serialises the wgmmas (C7515).
    keys = rules.kv_end
    first_0, last_0 = visible_keys(first_row, rules, SPEC)
    first_1, last_1 = visible_keys(tl.minimum(first_row + SPEC.BLOCK_M, q_len) - 1, rules, SPEC)
    begin, full, tail, end = split_by_mask(first_0, last_0, first_1, last_1, keys, SPEC.BLOCK_N)
    BlockList = None
    if Blocks is not None:  # visit the listed blocks, all of them masked
        BlockList = block_list(Blocks, stride_blocks_b, stride_blocks_h, batch, head, first_row, kv_len, 1)
        tail = 0
        end = tl.load(BlockList) * BLOCK_MASK_SIZE
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, K, V, first_row, tail, end, BlockList, keys,
        rules, SPEC, True, stride_kn, stride_vn,
    )  # fmt: skip
    if Blocks is None and (SPEC.LEFT >= 0 or SPEC.DOCUMENTS):
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q, K, V, first_row, begin, full, None, keys,
            rules, SPEC, True, stride_kn, stride_vn,
        )  # fmt: skip
    if Blocks is None:
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q, K, V, first_row, full, tail, None, keys,
            rules, SPEC, False, stride_kn, stride_vn,
        )  # fmt: skip

    # A fully masked row has row_sum 0: out 0, lse -inf.
    fully_masked = row_sum == 0
    row_sum = tl.where(fully_masked, 1.0, row_sum)
    share = row_sum * (1 - SPEC.DROPOUT_P) if SPEC.DROPOUT_P > 0 else row_sum
    out = acc / share[:, None]
    store_rows(Out, out, first_row, q_len, stride_om, SPEC, SPEC.BLOCK_M)
    if OutLow is not None:  # the rounding error of out, laid out as out is
        OutLow += batch_64 * stride_ob + q_head * stride_oh
        low = out - out.to(Out.dtype.element_ty).to(tl.float32)
        store_rows(OutLow, low, first_row, q_len, stride_om, SPEC, SPEC.BLOCK_M)
    lse = tl.where(fully_masked, float("-inf"), (row_max + tl.log2(row_sum)) * LN_2)
    rows = first_row + tl.arange(0, SPEC.BLOCK_M)
    tl.store(Lse + rows, lse, mask=rows < q_len)


@triton.jit
def attend(
    acc, row_max, row_sum, q,
    K, V,
    first_row, begin, end,
    BlockList,
    kv_len, rules,
    SPEC: tl.constexpr,
    MASKED: tl.constexpr,
    stride_kn: tl.constexpr, stride_vn: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [begin, end), or those positions of BlockList; begin is a multiple of BLOCK_N. Returns
    the updated acc, not yet divided by row_sum, row_max, in units of log2, and row_sum."""
    for step in range(begin, end, SPEC.BLOCK_N):
        first_key = listed(step, BlockList)
        row_index, key_index = tl.arange(0, SPEC.BLOCK_M)[:, None], tl.arange(0, SPEC.BLOCK_N)[None, :]
        rows, keys = first_row + row_index, first_key + key_index
        k = load_rows(K, first_key, kv_len, stride_kn, SPEC, SPEC.BLOCK_N, MASKED)
        scores, _ = modify_scores(tl.dot(q, k.T, input_precision="ieee"), rows, keys, rules, SPEC)
        if MASKED:
            first, last = visible_keys(rows, rules, SPEC)
            scores = tl.where(keys < last, scores, float("-inf"))
            if SPEC.LEFT >= 0 or SPEC.DOCUMENTS:
                scores = tl.where(keys >= first, scores, float("-inf"))
        exp2_scale = score_exp2_scale(rules, SPEC)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * exp2_scale)
        p = tl.exp2(scores * exp2_scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)  # the softmax sum includes dropped elements
        if SPEC.DROPOUT_P > 0:
            keep = is_kept(first_row, row_index, first_key, key_index, rules, SPEC)
            # Not 0.0: a predicated multiply needs neither a select nor another register.
            p = tl.where(keep, p, p * 0)
        acc = acc * rescale[:, None]
        v = load_rows(V, first_key, kv_len, stride_vn, SPEC, SPEC.BLOCK_N, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum
