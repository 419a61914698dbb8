"""The backward kernels: probabilities recomputed from the saved log-sum-exp, no atomics, bitwise repeatable.

With P = exp(S - lse), dP = dO V^T and delta = rowsum(dO * O) (FlashAttention, Dao et al. 2022, Algorithm 4):

    dS = P * (dP - delta)        dQ = scale * dS K        dK = scale * dS^T Q        dV = P^T dO

Dropout with probability p turns dP into Z dP / (1 - p) and P^T dO into (Z P)^T dO / (1 - p), where Z is 1 for kept
elements and 0 otherwise. The division is deferred to the end: (1 - p) dS = P * (Z dP - (1 - p) delta) needs none per
element.

Two kernels, because dQ is a sum over keys, and dK and dV are sums over queries: at the price of seven matrix products
instead of five, no two programs write the same memory. `dq_kernel` runs first and leaves delta for `dkdv_kernel`,
which works on the transposes S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T enter the next product as they are.
"""

import triton
import triton.language as tl

from ..dropout import is_kept
from .forward import LOWEST
from .masks import BLOCK_MASK_SIZE, block_list, listed, split_by_mask, visible_keys, visible_rows
from .memory import load_rows, load_vector, store_rows
from .score_mods import LOG2_E, modify_scores, score_exp2_scale
from .spec import rules_of


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def dq_kernel(
    Q, K, V, Out, OutLow, DOut, Lse, DLse, Delta, DQ, Seed, Slopes, DocumentStart, DocumentEnd, KvLengths,
    Blocks,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_ob, stride_oh, stride_dob,
    stride_doh, stride_dqb, stride_dqh, stride_blocks_b, stride_blocks_h,
    q_len, kv_len, scale,
    stride_qm: tl.constexpr, stride_kn: tl.constexpr, stride_vn: tl.constexpr, stride_om: tl.constexpr,
    stride_dom: tl.constexpr, stride_dqm: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """dQ and delta. Grid (ceil(q_len / BLOCK_M), heads, batch). Lse, DLse, Delta: float32 (batch, heads, q_len)."""
    # Which queries. As in the forward, the tiles that see the most keys start first.
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
    DOut += batch_64 * stride_dob + q_head * stride_doh
    DQ += batch_64 * stride_dqb + q_head * stride_dqh
    statistics = (batch_64 * tl.num_programs(1) + head) * q_len

    # delta needs the whole row of O and dO; both kernels need it for every score of the row.
    q = load_rows(Q, first_row, q_len, stride_qm, SPEC, SPEC.BLOCK_M, True)
    out = load_rows(Out, first_row, q_len, stride_om, SPEC, SPEC.BLOCK_M, True).to(tl.float32)
    if OutLow is not None:
        OutLow += batch_64 * stride_ob + q_head * stride_oh
        out += load_rows(OutLow, first_row, q_len, stride_om, SPEC, SPEC.BLOCK_M, True).to(tl.float32)
    d_out = load_rows(DOut, first_row, q_len, stride_dom, SPEC, SPEC.BLOCK_M, True)
    delta = tl.sum(out * d_out.to(tl.float32), 1)
    if DLse is not None:  # d lse / d S = P, so a gradient of lse joins dS = P * (dP - delta) through delta
        # Except in a fully masked row. Its lse is constant, its d_lse may be NaN (logaddexp of -inf and -inf produces
        # one), and P = 0 times NaN would put NaN into the gradients of all keys.
        fully_masked = load_vector(Lse + statistics, first_row, q_len, SPEC.BLOCK_M) == float("-inf")
        delta -= tl.where(fully_masked, 0.0, load_vector(DLse + statistics, first_row, q_len, SPEC.BLOCK_M))
    rows = first_row + tl.arange(0, SPEC.BLOCK_M)
    tl.store(Delta + statistics + rows, delta, mask=rows < q_len)
    if SPEC.DROPOUT_P > 0:
        delta *= 1 - SPEC.DROPOUT_P
    lse_log2 = tl.maximum(load_vector(Lse + statistics, first_row, q_len, SPEC.BLOCK_M) * LOG2_E, LOWEST)
    dq = tl.zeros([SPEC.BLOCK_M, SPEC.BLOCK_D], tl.float32)

    # Which keys. The masked edges go first, as in the forward.
    keys = rules.kv_end
    first_0, last_0 = visible_keys(first_row, rules, SPEC)
    first_1, last_1 = visible_keys(tl.minimum(first_row + SPEC.BLOCK_M, q_len) - 1, rules, SPEC)
    begin, full, tail, end = split_by_mask(first_0, last_0, first_1, last_1, keys, SPEC.BLOCK_N)
    BlockList = None
    if Blocks is not None:
        BlockList = block_list(Blocks, stride_blocks_b, stride_blocks_h, batch, head, first_row, kv_len, 1)
        tail = 0
        end = tl.load(BlockList) * BLOCK_MASK_SIZE
    dq = add_dq(
        dq, q, d_out, lse_log2, delta, K, V, first_row, tail, end, BlockList, keys,
        rules, SPEC, True, stride_kn, stride_vn,
    )  # fmt: skip
    if Blocks is None and (SPEC.LEFT >= 0 or SPEC.DOCUMENTS):
        dq = add_dq(
            dq, q, d_out, lse_log2, delta, K, V, first_row, begin, full, None, keys,
            rules, SPEC, True, stride_kn, stride_vn,
        )  # fmt: skip
    if Blocks is None:
        dq = add_dq(
            dq, q, d_out, lse_log2, delta, K, V, first_row, full, tail, None, keys,
            rules, SPEC, False, stride_kn, stride_vn,
        )  # fmt: skip
    if SPEC.DROPOUT_P > 0:
        scale /= 1 - SPEC.DROPOUT_P
    store_rows(DQ, dq * scale, first_row, q_len, stride_dqm, SPEC, SPEC.BLOCK_M)


@triton.jit
def add_dq(
    dq, q, d_out, lse_log2, delta,
    K, V,
    first_row, begin, end,
    BlockList,
    kv_len, rules,
    SPEC: tl.constexpr,
    MASKED: tl.constexpr,
    stride_kn: tl.constexpr, stride_vn: tl.constexpr,
):  # fmt: skip
    """dq + dS K over keys [begin, end), or those positions of BlockList; begin is a multiple of BLOCK_N."""
    for step in range(begin, end, SPEC.BLOCK_N):
        first_key = listed(step, BlockList)
        row_index, key_index = tl.arange(0, SPEC.BLOCK_M)[:, None], tl.arange(0, SPEC.BLOCK_N)[None, :]
        rows, keys = first_row + row_index, first_key + key_index
        k = load_rows(K, first_key, kv_len, stride_kn, SPEC, SPEC.BLOCK_N, MASKED)
        v = load_rows(V, first_key, kv_len, stride_vn, SPEC, SPEC.BLOCK_N, MASKED)
        scores, derivative = modify_scores(tl.dot(q, k.T, input_precision="ieee"), rows, keys, rules, SPEC)
        if MASKED:
            first, last = visible_keys(rows, rules, SPEC)
            scores = tl.where(keys < last, scores, float("-inf"))
            if SPEC.LEFT >= 0 or SPEC.DOCUMENTS:
                scores = tl.where(keys >= first, scores, float("-inf"))
        p = tl.exp2(scores * score_exp2_scale(rules, SPEC) - lse_log2[:, None])
        dp = tl.dot(d_out, v.T, input_precision="ieee")
        if SPEC.DROPOUT_P > 0:  # in this order a predicated multiply-add, without a select
            keep = is_kept(first_row, row_index, first_key, key_index, rules, SPEC)
            ds = p * -delta[:, None]
            ds = tl.where(keep, ds + p * dp, ds) * derivative
        else:
            ds = p * (dp - delta[:, None]) * derivative
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def dkdv_kernel(
    Q, K, V, DOut, Lse, Delta, DK, DV, Seed, Slopes, DocumentStart, DocumentEnd, KvLengths, Blocks,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_dob, stride_doh, stride_dkb,
    stride_dkh, stride_dvb, stride_dvh, stride_blocks_b, stride_blocks_h,
    q_len, kv_len, scale,
    stride_qm: tl.constexpr, stride_kn: tl.constexpr, stride_vn: tl.constexpr, stride_dom: tl.constexpr,
    stride_dkn: tl.constexpr, stride_dvn: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """dK and dV, summed over the query heads that share them. Grid (ceil(kv_len / BLOCK_N), kv_heads, batch)."""
    # Which keys. Under the causal mask the first tiles are seen by the most queries, and they are the first to start.
    first_key = tl.program_id(0) * SPEC.BLOCK_N
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    batch_64, kv_head_64 = batch.to(tl.int64), kv_head.to(tl.int64)
    K += batch_64 * stride_kb + kv_head_64 * stride_kh
    V += batch_64 * stride_vb + kv_head_64 * stride_vh
    DK += batch_64 * stride_dkb + kv_head_64 * stride_dkh
    DV += batch_64 * stride_dvb + kv_head_64 * stride_dvh
    # The first query head of the group.
    head = kv_head * SPEC.GROUP
    Q += batch_64 * stride_qb + head.to(tl.int64) * stride_qh
    DOut += batch_64 * stride_dob + head.to(tl.int64) * stride_doh
    statistics = (batch_64 * tl.num_programs(1) * SPEC.GROUP + head) * q_len

    if SPEC.RAGGED:  # the bounds are by key: in each row as many as there are keys, not queries
        DocumentStart += batch_64 * (kv_len - q_len)
        DocumentEnd += batch_64 * (kv_len - q_len)
    keys = kv_len if KvLengths is None else tl.minimum(tl.load(KvLengths + batch), kv_len)
    k = load_rows(K, first_key, keys, stride_kn, SPEC, SPEC.BLOCK_N, True)
    v = load_rows(V, first_key, keys, stride_vn, SPEC, SPEC.BLOCK_N, True)
    dk = tl.zeros([SPEC.BLOCK_N, SPEC.BLOCK_D], tl.float32)
    dv = tl.zeros([SPEC.BLOCK_N, SPEC.BLOCK_D], tl.float32)

    for member in range(SPEC.GROUP):
        rules = rules_of(
            batch, head + member, Seed, Slopes, DocumentStart, DocumentEnd, KvLengths, q_len, kv_len, scale
        )  # fmt: skip
        # Which queries. Rows beyond q_len are loaded as zeros and contribute nothing, so they need no mask.
        whole = tl.cdiv(q_len, SPEC.BLOCK_M) * SPEC.BLOCK_M
        first_0, last_0 = visible_rows(first_key, whole, rules, SPEC)
        first_1, last_1 = visible_rows(tl.minimum(first_key + SPEC.BLOCK_N, kv_len) - 1, whole, rules, SPEC)
        begin, full, tail, end = split_by_mask(first_0, last_0, first_1, last_1, whole, SPEC.BLOCK_M)
        # Above head_dim 128 dK and dV leave registers for one loop: with a second, unmasked one, 32x64 spills 36 B.
        bounded: tl.constexpr = SPEC.CAUSAL or SPEC.LEFT >= 0 or SPEC.RIGHT >= 0 or SPEC.DOCUMENTS
        one_loop: tl.constexpr = bounded and SPEC.BLOCK_D > 128
        if one_loop:
            full = end
        BlockList = None
        if Blocks is not None:
            BlockList = block_list(
                Blocks, stride_blocks_b, stride_blocks_h, batch, head + member, first_key, q_len, 2
            )
            begin = 0
            full = tl.load(BlockList) * BLOCK_MASK_SIZE
        if SPEC.PADDED and first_key >= keys:  # the tile is all padding
            full = begin
            tail = begin
            end = begin
        if Blocks is not None or one_loop or SPEC.CAUSAL or SPEC.RIGHT >= 0 or SPEC.DOCUMENTS:
            dk, dv = add_dkdv(
                dk, dv, k, v, Q, DOut, Lse + statistics, Delta + statistics, first_key, begin, full, BlockList,
                rules, SPEC, True, stride_qm, stride_dom,
            )  # fmt: skip
        if Blocks is None and not one_loop and (SPEC.LEFT >= 0 or SPEC.DOCUMENTS):
            dk, dv = add_dkdv(
                dk, dv, k, v, Q, DOut, Lse + statistics, Delta + statistics, first_key, tail, end, None,
                rules, SPEC, True, stride_qm, stride_dom,
            )  # fmt: skip
        if Blocks is None and not one_loop:
            dk, dv = add_dkdv(
                dk, dv, k, v, Q, DOut, Lse + statistics, Delta + statistics, first_key, full, tail, None,
                rules, SPEC, False, stride_qm, stride_dom,
            )  # fmt: skip
        Q += stride_qh
        DOut += stride_doh
        statistics += q_len
    if SPEC.PADDED:  # padding was not masked, and a fully masked query may have put NaN there
        padding = (first_key + tl.arange(0, SPEC.BLOCK_N) >= keys)[:, None]
        dk = tl.where(padding, 0.0, dk)
        dv = tl.where(padding, 0.0, dv)
    if SPEC.DROPOUT_P > 0:
        dv /= 1 - SPEC.DROPOUT_P
        scale /= 1 - SPEC.DROPOUT_P
    # Rows are counted from the tile's first, unlike in the loads of K and V: if both used one mask, its predicates
    # would stay live through the loops, and d256 on sm_90 spills 32 B.
    first_64, left = first_key.to(tl.int64), kv_len - first_key
    store_rows(DV + first_64 * stride_dvn, dv, 0, left, stride_dvn, SPEC, SPEC.BLOCK_N)
    store_rows(DK + first_64 * stride_dkn, dk * scale, 0, left, stride_dkn, SPEC, SPEC.BLOCK_N)


@triton.jit
def add_dkdv(
    dk, dv, k, v,
    Q, DOut, Lse, Delta,
    first_key, begin, end,
    BlockList,
    rules,
    SPEC: tl.constexpr,
    MASKED: tl.constexpr,
    stride_qm: tl.constexpr, stride_dom: tl.constexpr,
):  # fmt: skip
    """dk + dS^T Q and dv + P^T dO over queries [begin, end), or those positions of BlockList; begin is a multiple of
    BLOCK_M."""
    for step in range(begin, end, SPEC.BLOCK_M):
        first_row = listed(step, BlockList)
        row_index, key_index = tl.arange(0, SPEC.BLOCK_M)[None, :], tl.arange(0, SPEC.BLOCK_N)[:, None]
        rows, keys = first_row + row_index, first_key + key_index
        q = load_rows(Q, first_row, rules.q_len, stride_qm, SPEC, SPEC.BLOCK_M, True)
        d_out = load_rows(DOut, first_row, rules.q_len, stride_dom, SPEC, SPEC.BLOCK_M, True)
        # Queries beyond q_len are zeros, so their scores are 0 and any finite lse would do. But ALiBi still adds its
        # bias there, and exp2(large - 0) * 0 is NaN, while exp2(large - inf) is 0. (Using inf always: 144 B spilled
        # on sm_100, d64, grouped heads.)
        if SPEC.ALIBI:
            lse_log2 = load_vector(Lse, first_row, rules.q_len, SPEC.BLOCK_M, float("inf")) * LOG2_E
        else:
            lse_log2 = load_vector(Lse, first_row, rules.q_len, SPEC.BLOCK_M) * LOG2_E
        delta = load_vector(Delta, first_row, rules.q_len, SPEC.BLOCK_M)
        scores_t, derivative = modify_scores(tl.dot(k, q.T, input_precision="ieee"), rows, keys, rules, SPEC)
        if MASKED:
            first, last = visible_rows(keys, rules.q_len, rules, SPEC)
            if SPEC.CAUSAL or SPEC.RIGHT >= 0 or SPEC.DOCUMENTS:
                scores_t = tl.where(rows >= first, scores_t, float("-inf"))
            if SPEC.LEFT >= 0 or SPEC.DOCUMENTS:
                scores_t = tl.where(rows < last, scores_t, float("-inf"))
            lse_log2 = tl.maximum(lse_log2, LOWEST)
        p_t = tl.exp2(scores_t * score_exp2_scale(rules, SPEC) - lse_log2[None, :])
        kept_t = p_t
        if SPEC.DROPOUT_P > 0:
            kept_t = tl.where(is_kept(first_row, row_index, first_key, key_index, rules, SPEC), p_t, 0.0)
        dv = tl.dot(kept_t.to(d_out.dtype), d_out, dv, input_precision="ieee")
        dp_t = tl.dot(v, d_out.T, input_precision="ieee")
        if SPEC.DROPOUT_P > 0:  # from the dropped P, so that no predicate stays live until dP
            ds_t = (kept_t * dp_t - p_t * (delta * (1 - SPEC.DROPOUT_P))[None, :]) * derivative
        else:
            ds_t = p_t * (dp_t - delta[None, :]) * derivative
        dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv
