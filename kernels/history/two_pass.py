"""Attention in two passes over the keys: the first computes each query's softmax statistics online (Milakov and
Gimelshein 2018, arXiv 1805.02867), the second recomputes the scores and multiplies final probabilities by V.

Row softmax is impossible in one pass, but attention is not, which is FlashAttention's step beyond this: it rescales
the output as the statistics change. The backward takes two passes as well: delta = rowsum(P * dP) must be complete
before dS = P * (dP - delta). FlashAttention gets delta from a row-wise product, rowsum(dO * O).
"""

import torch
import triton
import triton.language as tl

from ..arguments import check_scale
from ..flash.operators import empty_like
from ..flash.portable.forward import LOWEST
from ..flash.portable.memory import load_rows, load_vector, store_rows
from ..flash.portable.tiles import Tile
from ..operators import NAMESPACE
from ..registry import AttentionError
from .inputs import compiled_for, prepared, strides, tile_of
from .scores import last_key, seen

Tensor = torch.Tensor
# largest head_dim served -> tile
FORWARD = {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 1)}
BACKWARD = {64: Tile(64, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)}


def two_pass_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None, **features: object
) -> Tensor:
    """softmax(q k^T * scale) v in two passes over the keys. Arguments and errors as `naive_attention`; other features
    are refused.

    In the backward one program processes a whole head and accumulates dK and dV in global memory, in float32.
    Gradients are bitwise repeatable.
    """
    q, k, v = prepared("two_pass", q, k, v, causal, features)
    return two_pass_forward(q, k, v, causal, check_scale(scale, q.shape[-1]))[0]


@torch.library.custom_op(f"{NAMESPACE}::two_pass_forward", mutates_args=())
def two_pass_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out like q; lse, the log-sum-exp of each query's scores in base 2, float32 (batch, heads, q_len))."""
    return forward_in(None, q, k, v, causal, scale)


def forward_in(
    programs: int | None, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The forward with a given number of programs per head, which share its tiles of queries; None: one per tile."""
    out, lse = results = _forward_like(q)
    batch, heads, q_len, _ = q.shape
    if out.numel():
        tile, tensors = tile_of(FORWARD, q), (q, k, v, out)
        grid = (programs or triton.cdiv(q_len, tile.block_m), heads, batch)
        numbers = (*strides(*tensors), q_len, k.shape[2], scale)
        forward_kernel[grid](*tensors, lse, *numbers, **compiled_for(tile, q, causal))
    return results


@torch.library.custom_op(f"{NAMESPACE}::two_pass_backward", mutates_args=())
def two_pass_backward(
    d_out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous."""
    dq = q.new_empty(q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (k, v))
    d_out = d_out.contiguous()
    batch, heads, q_len, _ = q.shape
    if dq.numel():
        tensors = (q, k, v, d_out, dq, dk, dv)
        numbers = (*strides(*tensors), q_len, k.shape[2], scale)
        options = compiled_for(tile_of(BACKWARD, q), q, causal)
        backward_kernel[heads, batch](*tensors, lse, *numbers, **options)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@two_pass_forward.register_fake
def _forward_like(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@two_pass_backward.register_fake
def _backward_like(
    d_out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rules: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *ctx.rules = inputs
    ctx.save_for_backward(output[1], q, k, v)


def _gradients(ctx, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *two_pass_backward(d_out, *ctx.saved_tensors, *ctx.rules), None, None


def _refuse(ctx, *gradients: Tensor) -> None:
    raise AttentionError("attention=two_pass has no second derivative; use attention=naive")


two_pass_forward.register_autograd(_gradients, setup_context=_save)
two_pass_backward.register_autograd(_refuse)


@triton.jit
def forward_kernel(
    Q, K, V, Out, Lse,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om,
    q_len, kv_len, scale, SPEC: tl.constexpr,
):  # fmt: skip
    """Grid (programs, heads, batch), round-robin over tiles of queries. Three matrix products per tile."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head * stride_kh
    V += batch * stride_vb + head * stride_vh
    Out += batch * stride_ob + head * stride_oh
    Lse += (batch * tl.num_programs(1) + head) * q_len
    step = tl.num_programs(0) * SPEC.BLOCK_M
    for first_row in range(tl.program_id(0) * SPEC.BLOCK_M, q_len, step):
        rows = first_row + tl.arange(0, SPEC.BLOCK_M)
        q = load_rows(Q, first_row, q_len, stride_qm, SPEC, SPEC.BLOCK_M, True)
        end = last_key(first_row + SPEC.BLOCK_M - 1, q_len, kv_len, SPEC)

        row_max = tl.full([SPEC.BLOCK_M], LOWEST, tl.float32)
        row_sum = tl.zeros([SPEC.BLOCK_M], tl.float32)
        for first_key in range(0, end, SPEC.BLOCK_N):
            k = load_rows(K, first_key, kv_len, stride_kn, SPEC, SPEC.BLOCK_N, True)
            scores = scores_of(q, k, rows, first_key, q_len, kv_len, scale, SPEC)
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            row_sum = row_sum * tl.exp2(row_max - new_max) + tl.sum(tl.exp2(scores - new_max[:, None]), 1)
            row_max = new_max

        # A fully masked query keeps a sum of 0; its probabilities are exp2(-inf) = 0.
        lse = row_max + tl.log2(tl.where(row_sum == 0, 1.0, row_sum))
        acc = tl.zeros([SPEC.BLOCK_M, SPEC.BLOCK_D], tl.float32)
        for first_key in range(0, end, SPEC.BLOCK_N):
            k = load_rows(K, first_key, kv_len, stride_kn, SPEC, SPEC.BLOCK_N, True)
            v = load_rows(V, first_key, kv_len, stride_vn, SPEC, SPEC.BLOCK_N, True)
            p = tl.exp2(scores_of(q, k, rows, first_key, q_len, kv_len, scale, SPEC) - lse[:, None])
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        store_rows(Out, acc, first_row, q_len, stride_om, SPEC, SPEC.BLOCK_M)
        tl.store(Lse + rows, lse, mask=rows < q_len)


@triton.jit
def backward_kernel(
    Q, K, V, DOut, DQ, DK, DV, Lse,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    q_len, kv_len, scale, SPEC: tl.constexpr,
):  # fmt: skip
    """Grid (heads, batch). Seven matrix products per tile, on transposed scores; DK and DV are float32, initially 0.

    No product takes the transpose of another's result as an operand, which Triton 3.6.0 miscompiles on Hopper.
    """
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head * stride_kh
    V += batch * stride_vb + head * stride_vh
    DOut += batch * stride_dob + head * stride_doh
    DQ += batch * stride_dqb + head * stride_dqh
    DK += batch * stride_dkb + head * stride_dkh
    DV += batch * stride_dvb + head * stride_dvh
    Lse += (batch * tl.num_programs(0) + head) * q_len
    for first_row in range(0, q_len, SPEC.BLOCK_M):
        rows = first_row + tl.arange(0, SPEC.BLOCK_M)
        q = load_rows(Q, first_row, q_len, stride_qm, SPEC, SPEC.BLOCK_M, True)
        d_out = load_rows(DOut, first_row, q_len, stride_dom, SPEC, SPEC.BLOCK_M, True)
        lse = load_vector(Lse, first_row, q_len, SPEC.BLOCK_M)
        end = last_key(first_row + SPEC.BLOCK_M - 1, q_len, kv_len, SPEC)

        delta = tl.zeros([SPEC.BLOCK_M], tl.float32)
        for first_key in range(0, end, SPEC.BLOCK_N):
            k = load_rows(K, first_key, kv_len, stride_kn, SPEC, SPEC.BLOCK_N, True)
            v = load_rows(V, first_key, kv_len, stride_vn, SPEC, SPEC.BLOCK_N, True)
            dv = load_rows(DV, first_key, kv_len, stride_dvn, SPEC, SPEC.BLOCK_N, True)
            p_t = tl.exp2(scores_t_of(q, k, rows, first_key, q_len, kv_len, scale, SPEC) - lse[None, :])
            delta += tl.sum(p_t * tl.dot(v, d_out.T, input_precision="ieee"), 0)
            dv = tl.dot(p_t.to(d_out.dtype), d_out, dv, input_precision="ieee")
            store_rows(DV, dv, first_key, kv_len, stride_dvn, SPEC, SPEC.BLOCK_N)

        dq_t = tl.zeros([SPEC.BLOCK_D, SPEC.BLOCK_M], tl.float32)
        for first_key in range(0, end, SPEC.BLOCK_N):
            k = load_rows(K, first_key, kv_len, stride_kn, SPEC, SPEC.BLOCK_N, True)
            v = load_rows(V, first_key, kv_len, stride_vn, SPEC, SPEC.BLOCK_N, True)
            dk = load_rows(DK, first_key, kv_len, stride_dkn, SPEC, SPEC.BLOCK_N, True)
            p_t = tl.exp2(scores_t_of(q, k, rows, first_key, q_len, kv_len, scale, SPEC) - lse[None, :])
            ds_t = p_t * (tl.dot(v, d_out.T, input_precision="ieee") - delta[None, :])
            ds_t = ds_t.to(q.dtype)  # before the scale, so that float16 keeps what is small
            dk += tl.dot(ds_t, q, input_precision="ieee") * scale
            dq_t = tl.dot(k.T, ds_t, dq_t, input_precision="ieee")
            store_rows(DK, dk, first_key, kv_len, stride_dkn, SPEC, SPEC.BLOCK_N)
        store_rows(DQ, dq_t.T * scale, first_row, q_len, stride_dqm, SPEC, SPEC.BLOCK_M)
        tl.debug_barrier()  # the next queries add to what these threads wrote


@triton.jit
def scores_of(q, k, rows, first_key, q_len, kv_len, scale, SPEC: tl.constexpr):
    """(BLOCK_M, BLOCK_N) scores in base 2."""
    keys = first_key + tl.arange(0, SPEC.BLOCK_N)
    products = tl.dot(q, k.T, input_precision="ieee")
    return seen(products, rows[:, None], keys[None, :], q_len, kv_len, scale, SPEC)


@triton.jit
def scores_t_of(q, k, rows, first_key, q_len, kv_len, scale, SPEC: tl.constexpr):
    """(BLOCK_N, BLOCK_M) scores in base 2."""
    keys = first_key + tl.arange(0, SPEC.BLOCK_N)
    products_t = tl.dot(k, q.T, input_precision="ieee")
    return seen(products_t, rows[None, :], keys[:, None], q_len, kv_len, scale, SPEC)
