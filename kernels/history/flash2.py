"""FlashAttention-2 as printed (Dao 2023, arXiv 2307.08691): Algorithm 1 forward, Algorithm 2 backward. Also with one
of its changes undone, to be timed: which statistics are saved, when the output is divided, what the warps split.

Queries are in the outer loop forward, keys backward, one program each. dQ is summed by atomic additions, as printed,
so its last bits vary; `kernels.flash` has a kernel of its own for dQ.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..arguments import check_scale
from ..flash.operators import empty_like
from ..flash.portable.forward import LOWEST
from ..flash.portable.memory import load_rows, load_vector, store_rows, tile_of
from ..flash.portable.tiles import Tile
from .flash1 import first_query
from .inputs import compiled_for, prepared, strides
from .inputs import tile_of as chosen
from .scores import last_key, seen

Tensor = torch.Tensor
# largest head_dim served -> tile
FORWARD = {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 2)}
BACKWARD = {64: Tile(64, 64, 8, 1), 128: Tile(32, 64, 8, 1), 256: Tile(16, 32, 8, 1)}


@dataclass(frozen=True)
class Way:
    """What is as in FlashAttention-2, and what is not.

    Attributes:
        lse: the log-sum-exp alone is saved for the backward; else the softmax's maximum and sum (section 3.1).
        once: the output is divided by the sum at the end; else in every step (section 3.1).
        split_keys: each warp has its own keys of a tile, and the results are added through shared memory; else its
            own queries (section 3.3: split-K, split-Q).
        tile: the forward's; None: that of `FORWARD`.
    """

    lse: bool = True
    once: bool = True
    split_keys: bool = False
    tile: Tile | None = None


PRINTED = Way()
# At head_dim 64. With two warps, since Hopper's wgmma takes four and splits queries. A warp with its own keys holds
# the products of all queries; with 64 queries these take more registers than there are.
SPLIT_QUERIES = Way(tile=Tile(64, 32, 2, 2))
SPLIT_KEYS = tuple(Way(split_keys=True, tile=Tile(rows, 32, 2, 2)) for rows in (64, 32, 16))


def flash2_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None, way: Way = PRINTED
) -> Tensor:
    """softmax(q k^T * scale) v. Arguments and errors as `naive_attention`, which also computes other features."""
    q, k, v = prepared("flash2", q, k, v, causal, {})
    return _Attention.apply(q, k, v, causal, check_scale(scale, q.shape[-1]), way)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale, way):
        out, *saved = forward(q, k, v, causal, scale, way)
        ctx.save_for_backward(q, k, v, out, *saved)
        ctx.rules = causal, scale
        return out

    @staticmethod
    def backward(ctx, d_out):
        return *backward(d_out, *ctx.saved_tensors, rules=ctx.rules), None, None, None


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, way: Way) -> tuple[Tensor, ...]:
    """out like q; of each query its log-sum-exp, or maximum and sum: base 2, float32 (batch, heads, q_len)."""
    out, (batch, heads, q_len, _) = empty_like(q), q.shape
    saved = [q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(1 if way.lse else 2)]
    tile = way.tile or chosen(FORWARD, q)
    if out.numel():
        tensors = (q, k, v, out)
        numbers = (*strides(*tensors), q_len, k.shape[2], scale)
        options = {"ONCE": way.once, "SLICES": tile.warps if way.split_keys else 1}
        grid = (triton.cdiv(q_len, tile.block_m), heads, batch)
        first, second = saved if len(saved) == 2 else (*saved, None)
        forward_kernel[grid](*tensors, first, second, *numbers, **options, **compiled_for(tile, q, causal))
    return out, *saved


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *saved: Tensor, rules: tuple[bool, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous."""
    dq, dk, dv = q.new_zeros(q.shape, dtype=torch.float32), k.new_zeros(k.shape), v.new_zeros(v.shape)
    d_out, (batch, heads, q_len, _), (causal, scale) = d_out.contiguous(), q.shape, rules
    tile = chosen(BACKWARD, q)
    if q.numel() and k.numel():
        delta = torch.empty_like(saved[0])
        options = compiled_for(tile, q, causal)
        grid = (triton.cdiv(q_len, tile.block_m), heads, batch)
        delta_kernel[grid](out, d_out, delta, *strides(out, d_out), q_len, **options)
        tensors = (q, k, v, d_out, dq, dk, dv)
        numbers = (*strides(*tensors), q_len, k.shape[2], scale)
        first, second = saved if len(saved) == 2 else (*saved, None)
        grid = (triton.cdiv(k.shape[2], tile.block_n), heads, batch)
        backward_kernel[grid](*tensors, delta, first, second, *numbers, **options)
    return dq.to(q.dtype), dk, dv


@triton.jit
def forward_kernel(
    Q, K, V, Out, Saved, RowSum,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om,
    q_len, kv_len, scale, ONCE: tl.constexpr, SLICES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Algorithm 1. Grid (tiles of queries, heads, batch). Saved: the log-sum-exp, or with RowSum the maximum."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head * stride_kh
    V += batch * stride_vb + head * stride_vh
    Out += batch * stride_ob + head * stride_oh
    state = (batch * tl.num_programs(1) + head) * q_len
    first_row = tl.program_id(0) * SPEC.BLOCK_M
    rows = first_row + tl.arange(0, SPEC.BLOCK_M)
    q = load_rows(Q, first_row, q_len, stride_qm, SPEC, SPEC.BLOCK_M, True)
    acc = tl.zeros([SPEC.BLOCK_M, SPEC.BLOCK_D], tl.float32)
    row_max = tl.full([SPEC.BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([SPEC.BLOCK_M], tl.float32)
    for first_key in range(0, last_key(first_row + SPEC.BLOCK_M - 1, q_len, kv_len, SPEC), SPEC.BLOCK_N):
        if SLICES == 1:
            k = load_rows(K, first_key, kv_len, stride_kn, SPEC, SPEC.BLOCK_N, True)
            v = load_rows(V, first_key, kv_len, stride_vn, SPEC, SPEC.BLOCK_N, True)
            keys = first_key + tl.arange(0, SPEC.BLOCK_N)
            products = tl.dot(q, k.T, input_precision="ieee")
            scores = seen(products, rows[:, None], keys[None, :], q_len, kv_len, scale, SPEC)
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            p = tl.exp2(scores - new_max[:, None])
            tile_sum = tl.sum(p, 1)
        else:  # a product for each slice of the keys, and Triton gives each product to one warp
            k = load_slices(K, first_key, kv_len, stride_kn, SPEC, SLICES)
            v = load_slices(V, first_key, kv_len, stride_vn, SPEC, SLICES)
            each = tl.broadcast_to(q[None, :, :], [SLICES, SPEC.BLOCK_M, SPEC.BLOCK_D])
            products = tl.dot(each, tl.permute(k, (0, 2, 1)), input_precision="ieee")
            keys = first_key + slice_rows(SPEC, SLICES)[:, None, :]
            scores = seen(products, rows[None, :, None], keys, q_len, kv_len, scale, SPEC)
            new_max = tl.maximum(row_max, tl.max(tl.max(scores, 2), 0))
            p = tl.exp2(scores - new_max[None, :, None])
            tile_sum = tl.sum(tl.sum(p, 2), 0)
        before = row_sum * tl.exp2(row_max - new_max)
        rescale = tl.exp2(row_max - new_max) if ONCE else before
        row_max, row_sum = new_max, before + tile_sum
        if SLICES == 1:
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        else:
            acc = acc * rescale[:, None] + tl.sum(tl.dot(p.to(v.dtype), v, input_precision="ieee"), 0)
        if not ONCE:
            acc /= tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    share = tl.where(row_sum == 0, 1.0, row_sum)  # 0 for a query that sees no key
    if ONCE:
        acc /= share[:, None]
    store_rows(Out, acc, first_row, q_len, stride_om, SPEC, SPEC.BLOCK_M)
    if RowSum is not None:
        tl.store(Saved + state + rows, row_max, mask=rows < q_len)
        tl.store(RowSum + state + rows, row_sum, mask=rows < q_len)
    else:
        tl.store(Saved + state + rows, row_max + tl.log2(share), mask=rows < q_len)


@triton.jit
def slice_rows(SPEC: tl.constexpr, SLICES: tl.constexpr):
    """(SLICES, BLOCK_N / SLICES): the rows of a tile of keys."""
    SIZE: tl.constexpr = SPEC.BLOCK_N // SLICES
    return tl.arange(0, SLICES)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def load_slices(base, first, length, stride, SPEC: tl.constexpr, SLICES: tl.constexpr):
    """As load_rows: (SLICES, BLOCK_N / SLICES, BLOCK_D)."""
    rows, dims = slice_rows(SPEC, SLICES)[:, :, None], tl.arange(0, SPEC.BLOCK_D)[None, None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + dims
    return tl.load(pointers, mask=(first + rows < length) & (dims < SPEC.HEAD_DIM), other=0.0)


@triton.jit
def delta_kernel(
    Out, DOut, Delta, stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, q_len,
    SPEC: tl.constexpr,
):  # fmt: skip
    """D = rowsum(dO * O). Grid (tiles of queries, heads, batch)."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    Out += batch * stride_ob + head * stride_oh
    DOut += batch * stride_dob + head * stride_doh
    Delta += (batch * tl.num_programs(1) + head) * q_len
    first_row = tl.program_id(0) * SPEC.BLOCK_M
    out = load_rows(Out, first_row, q_len, stride_om, SPEC, SPEC.BLOCK_M, True).to(tl.float32)
    d_out = load_rows(DOut, first_row, q_len, stride_dom, SPEC, SPEC.BLOCK_M, True).to(tl.float32)
    rows = first_row + tl.arange(0, SPEC.BLOCK_M)
    tl.store(Delta + rows, tl.sum(out * d_out, 1), mask=rows < q_len)


@triton.jit
def backward_kernel(
    Q, K, V, DOut, DQ, DK, DV, Delta, Saved, RowSum,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    q_len, kv_len, scale, SPEC: tl.constexpr,
):  # fmt: skip
    """Algorithm 2. Grid (tiles of keys, heads, batch). DQ is float32, initially 0.

    No product takes the transpose of another's result as an operand, which Triton 3.6.0 miscompiles on Hopper.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head * stride_kh
    V += batch * stride_vb + head * stride_vh
    DOut += batch * stride_dob + head * stride_doh
    DQ += batch * stride_dqb + head * stride_dqh
    DK += batch * stride_dkb + head * stride_dkh
    DV += batch * stride_dvb + head * stride_dvh
    state = (batch * tl.num_programs(1) + head) * q_len
    first_key = tl.program_id(0) * SPEC.BLOCK_N
    k = load_rows(K, first_key, kv_len, stride_kn, SPEC, SPEC.BLOCK_N, True)
    v = load_rows(V, first_key, kv_len, stride_vn, SPEC, SPEC.BLOCK_N, True)
    dk_t = tl.zeros([SPEC.BLOCK_D, SPEC.BLOCK_N], tl.float32)
    dv_t = tl.zeros([SPEC.BLOCK_D, SPEC.BLOCK_N], tl.float32)
    keys, dims = first_key + tl.arange(0, SPEC.BLOCK_N), tl.arange(0, SPEC.BLOCK_D)
    for first_row in range(first_query(first_key, q_len, kv_len, SPEC), q_len, SPEC.BLOCK_M):
        q = load_rows(Q, first_row, q_len, stride_qm, SPEC, SPEC.BLOCK_M, True)
        d_out = load_rows(DOut, first_row, q_len, stride_dom, SPEC, SPEC.BLOCK_M, True)
        delta = load_vector(Delta + state, first_row, q_len, SPEC.BLOCK_M)
        saved = load_vector(Saved + state, first_row, q_len, SPEC.BLOCK_M)
        rows = first_row + tl.arange(0, SPEC.BLOCK_M)
        products = tl.dot(q, k.T, input_precision="ieee")
        scores = seen(products, rows[:, None], keys[None, :], q_len, kv_len, scale, SPEC)
        p = tl.exp2(scores - saved[:, None])
        if RowSum is not None:
            row_sum = load_vector(RowSum + state, first_row, q_len, SPEC.BLOCK_M)
            p /= tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        dv_t = tl.dot(d_out.T, p.to(d_out.dtype), dv_t, input_precision="ieee")
        ds = p * (tl.dot(d_out, v.T, input_precision="ieee") - delta[:, None])
        ds = ds.to(q.dtype)  # before the scale, so that float16 keeps what is small
        dk_t = tl.dot(q.T, ds, dk_t, input_precision="ieee")
        dq = tl.dot(ds, k, input_precision="ieee") * scale
        inside = (rows < q_len)[:, None] & (dims < SPEC.HEAD_DIM)[None, :]
        tl.atomic_add(
            tile_of(DQ, first_row, rows - first_row, dims, stride_dqm), dq, mask=inside, sem="relaxed"
        )
    store_rows(DK, dk_t.T * scale, first_key, kv_len, stride_dkn, SPEC, SPEC.BLOCK_N)
    store_rows(DV, dv_t.T, first_key, kv_len, stride_dvn, SPEC, SPEC.BLOCK_N)
