"""FlashAttention as first published (Dao et al. 2022, arXiv 2205.14135): Algorithm 2 forward, Algorithm 4 backward.

The outer loop is over tiles of keys and the inner one over tiles of queries. One program processes a whole head, and
the state of each query (output, softmax maximum and sum; in the backward its gradient) is written to memory and read
back for the next tile of keys. FlashAttention-2 exchanged the loops; `kernels.flash` does it that way.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from ..arguments import check_scale
from ..flash.operators import empty_like
from ..flash.portable import tiles
from ..flash.portable.forward import LOWEST
from ..flash.portable.memory import load_rows, load_vector, store_rows
from ..flash.portable.tiles import Tile
from ..operators import NAMESPACE
from ..registry import AttentionError
from .inputs import compiled_for, prepared, strides, tile_of
from .scores import seen

Tensor = torch.Tensor
# largest head_dim served -> tile
FORWARD = {64: Tile(128, 128, 8, 1), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 1)}
BACKWARD = {64: Tile(32, 128, 8, 1), 128: Tile(32, 64, 8, 1), 256: Tile(16, 16, 8, 1)}
# Tiles that sm_90's registers hold, or nearly. The first of each is the one above, the fastest on Hopper (LOG.md,
# which says what the backward's 64x32 at 128 did).
CANDIDATES = {
    ("forward", 64): (
        FORWARD[64],
        Tile(64, 64, 4, 2),
        Tile(64, 128, 4, 2),
        Tile(64, 128, 8, 2),
        Tile(128, 64, 8, 2),
    ),
    ("forward", 128): (FORWARD[128], Tile(64, 64, 8, 2), Tile(64, 64, 4, 1)),
    ("backward", 64): (BACKWARD[64], Tile(64, 32, 8, 1), Tile(32, 64, 8, 2)),
    ("backward", 128): (BACKWARD[128], Tile(32, 32, 8, 1)),
}
_forced: dict[str, Tile] = {}
# Context: run "forward" and "backward" with the tiles that it is given by these names, to find the fastest.
forced = partial(tiles.forced, _forced)


def flash1_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None, **features: object
) -> Tensor:
    """softmax(q k^T * scale) v by FlashAttention's first algorithm. Arguments and errors as `naive_attention`; other
    features are refused.

    The output is written to memory once for every tile of keys, rounded to its dtype each time, as the paper counts
    it; the gradient of q is accumulated there in float32. Gradients are bitwise repeatable.
    """
    q, k, v = prepared("flash1", q, k, v, causal, features)
    return flash1_forward(q, k, v, causal, check_scale(scale, q.shape[-1]))[0]


@torch.library.custom_op(f"{NAMESPACE}::flash1_forward", mutates_args=())
def flash1_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out like q; the softmax maximum (base 2) and sum of each query, float32 (batch, heads, q_len)."""
    return forward_with(_forced.get("forward") or tile_of(FORWARD, q), q, k, v, causal, scale)


def forward_with(
    tile: Tile, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward with a given tile."""
    out, row_max, row_sum = results = _forward_like(q)
    batch, heads, q_len, _ = q.shape
    if not k.shape[2]:
        for x in results:
            x.zero_()
    elif out.numel():
        tensors = (q, k, v, out)
        numbers = (*strides(*tensors), q_len, k.shape[2], scale)
        forward_kernel[heads, batch](*tensors, row_max, row_sum, *numbers, **compiled_for(tile, q, causal))
    return results


@torch.library.custom_op(f"{NAMESPACE}::flash1_backward", mutates_args=())
def flash1_backward(
    d_out: Tensor,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous."""
    dq, dk, dv = q.new_empty(q.shape, dtype=torch.float32), k.new_empty(k.shape), v.new_empty(v.shape)
    d_out = d_out.contiguous()
    batch, heads, q_len, _ = q.shape
    if not k.shape[2]:
        dq.zero_()
    elif dk.numel():
        tensors = (q, k, v, out, d_out, dq, dk, dv)
        numbers = (*strides(*tensors), q_len, k.shape[2], scale)
        options = compiled_for(_forced.get("backward") or tile_of(BACKWARD, q), q, causal)
        backward_kernel[heads, batch](*tensors, row_max, row_sum, *numbers, **options)
    return dq.to(q.dtype), dk, dv


@flash1_forward.register_fake
def _forward_like(q: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    row_max, row_sum = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return empty_like(q), row_max, row_sum


@flash1_backward.register_fake
def _backward_like(
    d_out: Tensor,
    out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rules: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *ctx.rules = inputs
    ctx.save_for_backward(*output, q, k, v)


def _gradients(ctx, d_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return *flash1_backward(d_out, *ctx.saved_tensors, *ctx.rules), None, None


def _refuse(ctx, *gradients: Tensor) -> None:
    raise AttentionError("attention=flash1 has no second derivative; use attention=naive")


flash1_forward.register_autograd(_gradients, setup_context=_save)
flash1_backward.register_autograd(_refuse)


@triton.jit
def forward_kernel(
    Q, K, V, Out, RowMax, RowSum,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om,
    q_len, kv_len, scale, SPEC: tl.constexpr,
):  # fmt: skip
    """Algorithm 2. Grid (heads, batch). RowMax, RowSum: float32 (batch, heads, q_len)."""
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head * stride_kh
    V += batch * stride_vb + head * stride_vh
    Out += batch * stride_ob + head * stride_oh
    RowMax += (batch * tl.num_programs(0) + head) * q_len
    RowSum += (batch * tl.num_programs(0) + head) * q_len
    for first_key in range(0, kv_len, SPEC.BLOCK_N):
        k = load_rows(K, first_key, kv_len, stride_kn, SPEC, SPEC.BLOCK_N, True)
        v = load_rows(V, first_key, kv_len, stride_vn, SPEC, SPEC.BLOCK_N, True)
        written = tl.where(first_key > 0, q_len, 0)  # rows below this have state to read: none at first
        for first_row in range(first_query(first_key, q_len, kv_len, SPEC), q_len, SPEC.BLOCK_M):
            q = load_rows(Q, first_row, q_len, stride_qm, SPEC, SPEC.BLOCK_M, True)
            out = load_rows(Out, first_row, written, stride_om, SPEC, SPEC.BLOCK_M, True).to(tl.float32)
            row_max = load_vector(RowMax, first_row, written, SPEC.BLOCK_M, LOWEST)
            row_sum = load_vector(RowSum, first_row, written, SPEC.BLOCK_M)
            rows, keys = first_row + tl.arange(0, SPEC.BLOCK_M), first_key + tl.arange(0, SPEC.BLOCK_N)
            products = tl.dot(q, k.T, input_precision="ieee")
            scores = seen(products, rows[:, None], keys[None, :], q_len, kv_len, scale, SPEC)
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            p = tl.exp2(scores - new_max[:, None])
            before = row_sum * tl.exp2(row_max - new_max)
            new_sum = before + tl.sum(p, 1)
            share = tl.where(new_sum == 0, 1.0, new_sum)  # 0 for a query that has seen no key yet
            out = tl.dot(p.to(v.dtype), v, out * before[:, None], input_precision="ieee") / share[:, None]
            store_rows(Out, out, first_row, q_len, stride_om, SPEC, SPEC.BLOCK_M)
            tl.store(RowMax + rows, new_max, mask=rows < q_len)
            tl.store(RowSum + rows, new_sum, mask=rows < q_len)
        tl.debug_barrier()  # one thread may read what another wrote


@triton.jit
def backward_kernel(
    Q, K, V, Out, DOut, DQ, DK, DV, RowMax, RowSum,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, stride_dqb, stride_dqh, stride_dqm,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    q_len, kv_len, scale, SPEC: tl.constexpr,
):  # fmt: skip
    """Algorithm 4. Grid (heads, batch). Five matrix products per tile; DQ is float32.

    No product takes the transpose of another's result as an operand, which Triton 3.6.0 miscompiles on Hopper.
    """
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head * stride_kh
    V += batch * stride_vb + head * stride_vh
    Out += batch * stride_ob + head * stride_oh
    DOut += batch * stride_dob + head * stride_doh
    DQ += batch * stride_dqb + head * stride_dqh
    DK += batch * stride_dkb + head * stride_dkh
    DV += batch * stride_dvb + head * stride_dvh
    RowMax += (batch * tl.num_programs(0) + head) * q_len
    RowSum += (batch * tl.num_programs(0) + head) * q_len
    for first_key in range(0, kv_len, SPEC.BLOCK_N):
        k = load_rows(K, first_key, kv_len, stride_kn, SPEC, SPEC.BLOCK_N, True)
        v = load_rows(V, first_key, kv_len, stride_vn, SPEC, SPEC.BLOCK_N, True)
        dk_t = tl.zeros([SPEC.BLOCK_D, SPEC.BLOCK_N], tl.float32)
        dv_t = tl.zeros([SPEC.BLOCK_D, SPEC.BLOCK_N], tl.float32)
        written = tl.where(first_key > 0, q_len, 0)
        for first_row in range(first_query(first_key, q_len, kv_len, SPEC), q_len, SPEC.BLOCK_M):
            q = load_rows(Q, first_row, q_len, stride_qm, SPEC, SPEC.BLOCK_M, True)
            out = load_rows(Out, first_row, q_len, stride_om, SPEC, SPEC.BLOCK_M, True).to(tl.float32)
            d_out = load_rows(DOut, first_row, q_len, stride_dom, SPEC, SPEC.BLOCK_M, True)
            dq = load_rows(DQ, first_row, written, stride_dqm, SPEC, SPEC.BLOCK_M, True)
            row_max = load_vector(RowMax, first_row, q_len, SPEC.BLOCK_M)
            row_sum = load_vector(RowSum, first_row, q_len, SPEC.BLOCK_M)
            share = tl.where(row_sum == 0, 1.0, row_sum)  # 0 for rows beyond q_len too
            rows, keys = first_row + tl.arange(0, SPEC.BLOCK_M), first_key + tl.arange(0, SPEC.BLOCK_N)
            products = tl.dot(q, k.T, input_precision="ieee")
            scores = seen(products, rows[:, None], keys[None, :], q_len, kv_len, scale, SPEC)
            p = tl.exp2(scores - row_max[:, None]) / share[:, None]
            dv_t = tl.dot(d_out.T, p.to(d_out.dtype), dv_t, input_precision="ieee")
            delta = tl.sum(out * d_out.to(tl.float32), 1)
            ds = p * (tl.dot(d_out, v.T, input_precision="ieee") - delta[:, None])
            ds = ds.to(q.dtype)  # before the scale, so that float16 keeps what is small
            dk_t = tl.dot(q.T, ds, dk_t, input_precision="ieee")
            dq += tl.dot(ds, k, input_precision="ieee") * scale
            store_rows(DQ, dq, first_row, q_len, stride_dqm, SPEC, SPEC.BLOCK_M)
        store_rows(DK, dk_t.T * scale, first_key, kv_len, stride_dkn, SPEC, SPEC.BLOCK_N)
        store_rows(DV, dv_t.T, first_key, kv_len, stride_dvn, SPEC, SPEC.BLOCK_N)
        tl.debug_barrier()


@triton.jit
def first_query(first_key, q_len, kv_len, SPEC: tl.constexpr):
    """The first row that the inner loop visits for a tile of keys; 0 for the first tile: every row is written."""
    first = first_key * 0
    if SPEC.CAUSAL:
        first = tl.where(first_key > 0, tl.maximum(first_key - (kv_len - q_len), 0), 0)
    return first // SPEC.BLOCK_M * SPEC.BLOCK_M
