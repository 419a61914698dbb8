"""The backward kernels: probabilities recomputed from the saved log-sum-exp, no atomics, bit for bit repeatable.

With P = exp(S - lse), dP = dO V^T and delta = rowsum(dO * O) (FlashAttention, Dao et al. 2022, Algorithm 4):

    dS = P * (dP - delta)        dQ = scale * dS K        dK = scale * dS^T Q        dV = P^T dO

Two kernels, because dQ sums over keys and dK, dV over queries: seven matrix products instead of five buy that no two
programs write the same memory. `dq_kernel` goes first and leaves delta for `dkdv_kernel`, which works on the
transposes S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T enter the next product as they are, untransposed.
"""

import triton
import triton.language as tl

from .forward import LOWEST
from .masking import tiles_to_visit, visible_keys, visible_rows
from .memory import load_rows, load_vector, store_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dq_kernel(
    Q,
    K,
    V,
    Out,
    DOut,
    Lse,
    DLse,
    Delta,
    DQ,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_ob,
    stride_oh,
    stride_dob,
    stride_doh,
    stride_dqb,
    stride_dqh,
    q_len,
    kv_len,
    scale,
    stride_qm: tl.constexpr,
    stride_kn: tl.constexpr,
    stride_vn: tl.constexpr,
    stride_om: tl.constexpr,
    stride_dom: tl.constexpr,
    stride_dqm: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ, and delta on the way. Grid (ceil(q_len / BLOCK_M), heads, batch). DLse, Delta: as the forward's Lse."""
    # Which queries; as in the forward, the tiles that see the most keys first.
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile
    first_row = tile * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head // GROUP * stride_kh
    V += batch * stride_vb + head // GROUP * stride_vh
    Out += batch * stride_ob + head * stride_oh
    DOut += batch * stride_dob + head * stride_doh
    DQ += batch * stride_dqb + head * stride_dqh
    Lse += (batch * tl.num_programs(1) + head) * q_len
    Delta += (batch * tl.num_programs(1) + head) * q_len

    # delta needs the whole row of O and dO; both kernels need it for every score of the row.
    q = load_rows(Q, first_row, q_len, stride_qm, HEAD_DIM, BLOCK_D, BLOCK_M, True)
    out = load_rows(Out, first_row, q_len, stride_om, HEAD_DIM, BLOCK_D, BLOCK_M, True)
    d_out = load_rows(DOut, first_row, q_len, stride_dom, HEAD_DIM, BLOCK_D, BLOCK_M, True)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if DLse is not None:  # d lse / d S = P, so a gradient of lse joins dS = P * (dP - delta) through delta
        DLse += (batch * tl.num_programs(1) + head) * q_len
        delta -= load_vector(DLse, first_row, q_len, BLOCK_M)
    rows = first_row + tl.arange(0, BLOCK_M)
    tl.store(Delta + rows, delta, mask=rows < q_len)
    lse_log2 = tl.maximum(load_vector(Lse, first_row, q_len, BLOCK_M) * LOG2_E, LOWEST)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    first_0, last_0 = visible_keys(first_row, q_len, kv_len, CAUSAL)
    first_1, last_1 = visible_keys(tl.minimum(first_row + BLOCK_M, q_len) - 1, q_len, kv_len, CAUSAL)
    _, full, tail, end = tiles_to_visit(first_0, last_0, first_1, last_1, kv_len, BLOCK_N)
    dq = add_dq(
        dq, q, d_out, lse_log2, delta, K, V, first_row, tail, end, q_len, kv_len, scale, True,
        stride_kn, stride_vn, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    dq = add_dq(
        dq, q, d_out, lse_log2, delta, K, V, first_row, full, tail, q_len, kv_len, scale, False,
        stride_kn, stride_vn, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    store_rows(DQ, dq * scale, first_row, q_len, stride_dqm, HEAD_DIM, BLOCK_D, BLOCK_M)


@triton.jit
def add_dq(
    dq,
    q,
    d_out,
    lse_log2,
    delta,
    K,
    V,
    first_row,
    begin,
    end,
    q_len,
    kv_len,
    scale,
    MASKED: tl.constexpr,
    stride_kn: tl.constexpr,
    stride_vn: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dS K over the keys [begin, end); begin is a multiple of BLOCK_N."""
    for first_key in range(begin, end, BLOCK_N):
        k = load_rows(K, first_key, kv_len, stride_kn, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED)
        v = load_rows(V, first_key, kv_len, stride_vn, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            _, last = visible_keys(first_row + tl.arange(0, BLOCK_M), q_len, kv_len, CAUSAL)
            keys = first_key + tl.arange(0, BLOCK_N)
            scores = tl.where(keys[None, :] < last[:, None], scores, float("-inf"))
        p = tl.exp2(scores * (scale * LOG2_E) - lse_log2[:, None])
        dp = tl.dot(d_out, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def dkdv_kernel(
    Q,
    K,
    V,
    DOut,
    Lse,
    Delta,
    DK,
    DV,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_dob,
    stride_doh,
    stride_dkb,
    stride_dkh,
    stride_dvb,
    stride_dvh,
    q_len,
    kv_len,
    scale,
    stride_qm: tl.constexpr,
    stride_kn: tl.constexpr,
    stride_vn: tl.constexpr,
    stride_dom: tl.constexpr,
    stride_dkn: tl.constexpr,
    stride_dvn: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK and dV, summed over the query heads that share them. Grid (ceil(kv_len / BLOCK_N), kv_heads, batch)."""
    # Which keys. The first tiles of a causal head are seen by the most queries and already start first.
    first_key = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    Q += batch * stride_qb + kv_head * GROUP * stride_qh
    K += batch * stride_kb + kv_head * stride_kh
    V += batch * stride_vb + kv_head * stride_vh
    DOut += batch * stride_dob + kv_head * GROUP * stride_doh
    DK += batch * stride_dkb + kv_head * stride_dkh
    DV += batch * stride_dvb + kv_head * stride_dvh
    Lse += (batch * tl.num_programs(1) + kv_head) * GROUP * q_len
    Delta += (batch * tl.num_programs(1) + kv_head) * GROUP * q_len

    k = load_rows(K, first_key, kv_len, stride_kn, HEAD_DIM, BLOCK_D, BLOCK_N, True)
    v = load_rows(V, first_key, kv_len, stride_vn, HEAD_DIM, BLOCK_D, BLOCK_N, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    # Which queries see them: first the causal edge, then those that see all of the tile. Rows beyond q_len load as
    # zeros and add nothing, so they need no mask.
    first_0, _ = visible_rows(first_key, q_len, kv_len, CAUSAL)
    first_1, _ = visible_rows(tl.minimum(first_key + BLOCK_N, kv_len) - 1, q_len, kv_len, CAUSAL)
    begin = tl.maximum(first_0, 0) // BLOCK_M * BLOCK_M
    full = tl.cdiv(tl.maximum(first_1, 0), BLOCK_M) * BLOCK_M
    for _ in range(GROUP):
        if CAUSAL:
            dk, dv = add_dkdv(
                dk, dv, k, v, Q, DOut, Lse, Delta, first_key, begin, full, q_len, kv_len, scale, True,
                stride_qm, stride_dom, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
            )  # fmt: skip
        dk, dv = add_dkdv(
            dk, dv, k, v, Q, DOut, Lse, Delta, first_key, full, q_len, q_len, kv_len, scale, False,
            stride_qm, stride_dom, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
        Q += stride_qh
        DOut += stride_doh
        Lse += q_len
        Delta += q_len
    store_rows(DK, dk * scale, first_key, kv_len, stride_dkn, HEAD_DIM, BLOCK_D, BLOCK_N)
    store_rows(DV, dv, first_key, kv_len, stride_dvn, HEAD_DIM, BLOCK_D, BLOCK_N)


@triton.jit
def add_dkdv(
    dk,
    dv,
    k,
    v,
    Q,
    DOut,
    Lse,
    Delta,
    first_key,
    begin,
    end,
    q_len,
    kv_len,
    scale,
    MASKED: tl.constexpr,
    stride_qm: tl.constexpr,
    stride_dom: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dS^T Q and P^T dO over the queries [begin, end); begin is a multiple of BLOCK_M."""
    for first_row in range(begin, end, BLOCK_M):
        q = load_rows(Q, first_row, q_len, stride_qm, HEAD_DIM, BLOCK_D, BLOCK_M, True)
        d_out = load_rows(DOut, first_row, q_len, stride_dom, HEAD_DIM, BLOCK_D, BLOCK_M, True)
        lse_log2 = load_vector(Lse, first_row, q_len, BLOCK_M) * LOG2_E
        delta = load_vector(Delta, first_row, q_len, BLOCK_M)
        scores_t = tl.dot(k, q.T, input_precision=PRECISION)
        if MASKED:
            first, _ = visible_rows(first_key + tl.arange(0, BLOCK_N), q_len, kv_len, CAUSAL)
            rows = first_row + tl.arange(0, BLOCK_M)
            scores_t = tl.where(rows[None, :] >= first[:, None], scores_t, float("-inf"))
            lse_log2 = tl.maximum(lse_log2, LOWEST)
        p_t = tl.exp2(scores_t * (scale * LOG2_E) - lse_log2[None, :])
        dv = tl.dot(p_t.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
        dp_t = tl.dot(v, d_out.T, input_precision=PRECISION)
        ds_t = p_t * (dp_t - delta[None, :])
        dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv
