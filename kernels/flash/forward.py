"""The forward kernel: FlashAttention-2 order (Dao 2023, Algorithm 1).

One program owns BLOCK_M queries and walks over the keys they see, BLOCK_N at a time. The accumulator is divided by
the softmax sum once, at the end; exponentials are base 2, with scale * log2(e) folded into one multiply-add.
"""

import triton
import triton.language as tl

from .masking import tiles_to_visit, visible_keys
from .memory import load_rows, store_rows

LN_2 = tl.constexpr(0.6931471805599453)
# Where the running maximum starts: below every score, and finite, so that a row that has seen only masked scores
# (-inf) computes exp2(-inf - LOWEST) = 0 where -inf - -inf would be NaN.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    Out,
    Lse,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_ob,
    stride_oh,
    q_len,
    kv_len,
    scale_log2,
    stride_qm: tl.constexpr,
    stride_kn: tl.constexpr,
    stride_vn: tl.constexpr,
    stride_om: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (ceil(q_len / BLOCK_M), heads, batch). Lse: float32 (batch, heads, q_len), contiguous."""
    # Which queries. The last tiles of a causal head see the most keys, so they start first.
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
    Lse += (batch * tl.num_programs(1) + head) * q_len

    q = load_rows(Q, first_row, q_len, stride_qm, HEAD_DIM, BLOCK_D, BLOCK_M, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    # Which keys. The masked edge goes first: the other way round ptxas serialises the tensor cores (C7515).
    first_0, last_0 = visible_keys(first_row, q_len, kv_len, CAUSAL)
    first_1, last_1 = visible_keys(tl.minimum(first_row + BLOCK_M, q_len) - 1, q_len, kv_len, CAUSAL)
    _, full, tail, end = tiles_to_visit(first_0, last_0, first_1, last_1, kv_len, BLOCK_N)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, K, V, first_row, tail, end, q_len, kv_len, scale_log2, True,
        stride_kn, stride_vn, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q, K, V, first_row, full, tail, q_len, kv_len, scale_log2, False,
        stride_kn, stride_vn, CAUSAL, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
    )  # fmt: skip

    # A row that saw nothing has row_sum 0: out 0, lse -inf.
    blind = row_sum == 0
    row_sum = tl.where(blind, 1.0, row_sum)
    store_rows(Out, acc / row_sum[:, None], first_row, q_len, stride_om, HEAD_DIM, BLOCK_D, BLOCK_M)
    lse = tl.where(blind, float("-inf"), (row_max + tl.log2(row_sum)) * LN_2)
    rows = first_row + tl.arange(0, BLOCK_M)
    tl.store(Lse + rows, lse, mask=rows < q_len)


@triton.jit
def attend(
    acc,
    row_max,
    row_sum,
    q,
    K,
    V,
    first_row,
    begin,
    end,
    q_len,
    kv_len,
    scale_log2,
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
    """Take the keys [begin, end) into the online softmax; begin is a multiple of BLOCK_N."""
    for first_key in range(begin, end, BLOCK_N):
        k = load_rows(K, first_key, kv_len, stride_kn, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            _, last = visible_keys(first_row + tl.arange(0, BLOCK_M), q_len, kv_len, CAUSAL)
            keys = first_key + tl.arange(0, BLOCK_N)
            scores = tl.where(keys[None, :] < last[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        v = load_rows(V, first_key, kv_len, stride_vn, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum
