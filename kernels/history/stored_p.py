"""Attention by one kernel that stores the probabilities, as Apex's FMHA did, which FlashAttention was compared with
(Dao et al. 2022, arXiv 2205.14135, Table 7): for short rows without a causal mask, as BERT has them.

The forward has all scores of a query before it needs the first probability, and writes each probability in 16 bits,
negative where dropout drops it. So the backward computes neither scores nor dropout's mask again:

    dP = dO V^T      dS = P * (Z dP - delta)      dQ = scale * dS K      dK = scale * dS^T Q      dV = (Z P)^T dO

with Z as in `flash.portable.backward`, but for the division by the share that is kept. delta is rowsum(Z P * dP), as
FMHA has it; where a program does not see the whole row it takes the equal rowsum(dO * O). Memory grows with the
square of the length. Above 128 keys a program does not have whole rows, and each pass has a product more than FMHA's:
the scores a second time, and dP. It is not registered: `reproduce attention` alone runs it.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..arguments import check_dropout, check_features, check_scale, seed_on
from ..flash.dispatch import refuses_inputs
from ..flash.dropout import is_kept
from ..flash.operators import empty_like
from ..flash.portable.forward import LOWEST
from ..flash.portable.launch import architecture
from ..flash.portable.memory import load_rows, store_rows
from ..flash.portable.score_mods import LOG2_E
from ..flash.portable.spec import rules_of, specify
from ..flash.portable.tiles import Tile
from ..launch import INTERPRETED, Launch, launch
from ..registry import AttentionError
from .inputs import prepared

Tensor = torch.Tensor
LONGEST = 512
BLOCK = tl.constexpr(128)  # the rows and columns of P are rounded up to multiples of it, and all are written
HEAD_DIM = 64
# At most so many keys -> tile; one of 128 keys by as many has whole rows. Raced on an H200 (kernels/log/history.md).
# The backward's up to 128 keys spills 24 B on sm_90 and takes 0.71 of the time of 8 warps, which do not spill: a
# rival is to be strong.
Tiles = dict[int, Tile]
FORWARD: Tiles = {128: Tile(64, 128, 4, 1), 512: Tile(64, 64, 4, 1)}
BACKWARD: Tiles = {128: Tile(32, 128, 4, 1), 512: Tile(64, 64, 4, 1)}


def options_of(kernel: triton.JITFunction, tile: Tile, whole: bool, gpu: int) -> dict[str, int]:
    """The compiler's options. whole: a tile has all keys. gpu: its compute capability, major * 10 + minor."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if kernel is backward_kernel and not whole and gpu >= 90:
        # Three programs fit on an SM, not two: 0.82 of the time on an H200. On sm_80 it would spill 668 B.
        options["maxnreg"] = 168
    return options


def refuses(device: torch.device, dtype: torch.dtype, head_dim: int, length: int) -> str | None:
    """The reason why it cannot take such a call, or None. length: the larger of q_len and kv_len."""
    if reason := refuses_inputs(device, dtype, head_dim, INTERPRETED):
        return reason
    if head_dim != HEAD_DIM:
        return f"it takes head_dim {HEAD_DIM}, not {head_dim}"
    if length > LONGEST:
        return f"it stores a probability for every query and key, and takes up to {LONGEST} of each, not {length}"
    if dtype is torch.float32 and not INTERPRETED:
        return "it takes float16 and bfloat16, and torch.float32 in the interpreter alone"
    return None


def stored_p_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    kv_lengths: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v. Arguments and errors as `naive_attention` with causal=False; what it takes of them is
    in `refuses`. Dropout drops what the others drop. Gradients are bitwise repeatable."""
    q, k, v = prepared("stored_p", q, k, v, False, {})
    check_dropout(dropout_p, dropout_seed)
    check_features(q, k, kv_lengths=kv_lengths)
    if reason := refuses(q.device, q.dtype, q.shape[3], max(q.shape[2], k.shape[2])):
        raise AttentionError(f"attention=stored_p: {reason}")
    seed = seed_on(q.device, dropout_seed) if dropout_p else None
    return _Attention.apply(q, k, v, seed, kv_lengths, check_scale(scale, q.shape[3]), dropout_p)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, seed, kv_lengths, *rules):
        out, p = forward(q, k, v, seed, kv_lengths, *rules)
        ctx.save_for_backward(q, k, v, out, p, kv_lengths)
        ctx.rules = rules
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        return *backward(d_out, *ctx.saved_tensors, *ctx.rules), None, None, None, None


def forward(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, kv_lengths: Tensor | None, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out like q; the probabilities, of q's dtype and negative where dropped, (batch, heads, rows, columns)."""
    (batch, heads, q_len, _), kv_len = q.shape, k.shape[2]
    rows = rounded(q_len)
    out, p = empty_like(q), q.new_empty(batch, heads, rows, rounded(kv_len))
    if not p.numel():
        return out.zero_(), p

    def programs(tile: Tile) -> int:
        return rows // tile.block_m

    pointers = (q, k, v, out, p, seed, kv_lengths)
    _launch(forward_kernel, FORWARD, pointers, (q, k, v, out), scale, dropout_p, programs)
    return out, p


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, p: Tensor, kv_lengths: Tensor | None, scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv, contiguous."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if not p.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    d_out, columns = d_out.contiguous(), p.shape[3]

    def programs(tile: Tile) -> int:
        queries = 0 if columns <= tile.block_n else triton.cdiv(q.shape[2], tile.block_m)
        return triton.cdiv(columns, tile.block_n) + queries

    tensors = (q, k, v, out, d_out, dq, dk, dv)
    pointers = (*tensors[:4], p, *tensors[4:], kv_lengths)
    _launch(backward_kernel, BACKWARD, pointers, tensors, scale, dropout_p, programs)
    return dq, dk, dv


def rounded(length: int) -> int:
    """Up to whole BLOCKs."""
    return triton.cdiv(length, BLOCK.value) * BLOCK.value


def _launch(
    kernel: triton.JITFunction,
    tiles: Tiles,
    pointers: tuple[Tensor, Tensor, *tuple[Tensor | None, ...]],
    strided: tuple[Tensor, ...],
    scale: float,
    dropout_p: float,
    programs: Callable[[Tile], int],
) -> None:
    """Launch with the tile for so many keys.

    Args:
        pointers: the kernel's tensors, q and k first. strided: those whose strides it gets.
        programs: of a head.
    """
    (batch, heads, q_len, head_dim), kv_len = pointers[0].shape, pointers[1].shape[2]
    tile = next(each for most, each in tiles.items() if kv_len <= most)
    strides = [x.stride() for x in strided]

    def prepare() -> Launch:
        whole = rounded(kv_len) <= tile.block_n
        numbers = (
            *[stride for each in strides for stride in each[:2]],
            q_len,
            kv_len,
            scale,
            *[each[2] for each in strides],
            whole,
            specify(tile, head_dim, False, dropout_p=dropout_p),
        )
        return (
            kernel,
            (programs(tile), heads, batch),
            numbers,
            options_of(kernel, tile, whole, architecture(pointers[0].device)),
        )

    key = (kernel.__name__, q_len, kv_len, scale, dropout_p, *strides, batch, heads, tile)
    launch(pointers, key, prepare)


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def forward_kernel(
    Q, K, V, Out, P, Seed, KvLengths,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_ob, stride_oh,
    q_len, kv_len, scale,
    stride_qm: tl.constexpr, stride_kn: tl.constexpr, stride_vn: tl.constexpr, stride_om: tl.constexpr,
    WHOLE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """out and P. Grid (tiles of P's rows, heads, batch). WHOLE: a tile has all keys."""
    head, batch = tl.program_id(1), tl.program_id(2)
    rules = rules_of(batch, head, Seed, None, None, None, KvLengths, q_len, kv_len, scale)
    batch_64, head_64 = batch.to(tl.int64), head.to(tl.int64)
    Q += batch_64 * stride_qb + head_64 * stride_qh
    K += batch_64 * stride_kb + head_64 * stride_kh
    V += batch_64 * stride_vb + head_64 * stride_vh
    Out += batch_64 * stride_ob + head_64 * stride_oh
    P = head_of_p(P, batch_64, head_64, q_len, kv_len)
    first_row, columns = tl.program_id(0) * SPEC.BLOCK_M, tl.cdiv(kv_len, BLOCK) * BLOCK
    q = load_rows(Q, first_row, q_len, stride_qm, SPEC, SPEC.BLOCK_M, True)
    acc = tl.zeros([SPEC.BLOCK_M, SPEC.BLOCK_D], tl.float32)
    if WHOLE:
        scores = scores_of(q, K, 0, stride_kn, rules, SPEC)
        p = tl.exp2(scores - tl.maximum(tl.max(scores, 1), LOWEST)[:, None])
        row_sum = tl.sum(p, 1)
        p = p / tl.where(row_sum == 0, 1.0, row_sum)[:, None]  # 0 where no key is seen
        acc = weigh(acc, p, V, P, first_row, 0, stride_vn, rules, SPEC)
    else:  # the scores again, once the sum of the row is known
        row_max = tl.full([SPEC.BLOCK_M], LOWEST, tl.float32)
        row_sum = tl.zeros([SPEC.BLOCK_M], tl.float32)
        for first_key in range(0, columns, SPEC.BLOCK_N):
            scores = scores_of(q, K, first_key, stride_kn, rules, SPEC)
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            row_sum = row_sum * tl.exp2(row_max - new_max) + tl.sum(tl.exp2(scores - new_max[:, None]), 1)
            row_max = new_max
        lse = row_max + tl.log2(tl.where(row_sum == 0, 1.0, row_sum))
        # One stage: beside the store of P, ptxas serialises the wgmmas of a pipelined loop (C7515).
        for first_key in tl.range(0, columns, SPEC.BLOCK_N, num_stages=1):
            p = tl.exp2(scores_of(q, K, first_key, stride_kn, rules, SPEC) - lse[:, None])
            acc = weigh(acc, p, V, P, first_row, first_key, stride_vn, rules, SPEC)
    store_rows(Out, acc / (1 - SPEC.DROPOUT_P), first_row, q_len, stride_om, SPEC, SPEC.BLOCK_M)


@triton.jit
def scores_of(q, K, first_key, stride_kn, rules, SPEC: tl.constexpr):
    """(BLOCK_M, BLOCK_N) scores in base 2; -inf for padding."""
    k = load_rows(K, first_key, rules.kv_end, stride_kn, SPEC, SPEC.BLOCK_N, True)
    # An addend: with the scale one FMA an element, where a choice takes an instruction more.
    hidden = tl.where(first_key + tl.arange(0, SPEC.BLOCK_N) < rules.kv_end, 0.0, float("-inf"))
    return tl.dot(q, k.T, input_precision="ieee") * (rules.scale * LOG2_E) + hidden[None, :]


@triton.jit
def weigh(acc, p, V, P, first_row, first_key, stride_vn, rules, SPEC: tl.constexpr):
    """acc + P V over the tile's keys, without what dropout drops; stores P, its sign bit set where it does."""
    v = load_rows(V, first_key, rules.kv_end, stride_vn, SPEC, SPEC.BLOCK_N, True)
    if SPEC.DROPOUT_P > 0:
        row_index, key_index = tl.arange(0, SPEC.BLOCK_M)[:, None], tl.arange(0, SPEC.BLOCK_N)[None, :]
        p = tl.where(is_kept(first_row, row_index, first_key, key_index, rules, SPEC), p, -p)
    p = p.to(P.dtype.element_ty)
    tl.store(tile_of_p(P, first_row, first_key, rules.kv_len, SPEC), p)
    return tl.dot(kept_of(p), v, acc, input_precision="ieee")


@triton.jit
def kept_of(p):
    """The probabilities of P, those that dropout drops replaced by 0."""
    return tl.where(p < 0, 0.0, p).to(p.dtype)  # NaN stays


@triton.jit
def head_of_p(P, batch, head, q_len, kv_len):
    """Pointer to the probabilities of a head."""
    area = (tl.cdiv(q_len, BLOCK) * BLOCK).to(tl.int64) * (tl.cdiv(kv_len, BLOCK) * BLOCK)
    return P + (batch * tl.num_programs(1) + head) * area


@triton.jit
def tile_of_p(P, first_row, first_key, kv_len, SPEC: tl.constexpr):
    """Pointers to the probabilities of BLOCK_M queries and BLOCK_N keys of a head."""
    rows, keys = first_row + tl.arange(0, SPEC.BLOCK_M), first_key + tl.arange(0, SPEC.BLOCK_N)
    return P + rows[:, None] * (tl.cdiv(kv_len, BLOCK) * BLOCK) + keys[None, :]


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def backward_kernel(
    Q, K, V, Out, P, DOut, DQ, DK, DV, KvLengths,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_ob, stride_oh, stride_dob, stride_doh,
    stride_dqb, stride_dqh, stride_dkb, stride_dkh, stride_dvb, stride_dvh,
    q_len, kv_len, scale,
    stride_qm: tl.constexpr, stride_kn: tl.constexpr, stride_vn: tl.constexpr, stride_om: tl.constexpr,
    stride_dom: tl.constexpr, stride_dqm: tl.constexpr, stride_dkn: tl.constexpr, stride_dvn: tl.constexpr,
    WHOLE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Grid (programs, heads, batch). WHOLE: a tile has all keys, and the one program of a head computes all. Else
    the first programs of a head compute dK and dV of a tile of keys each, the others dQ of a tile of queries each, at
    the price of a fifth product; what they read of P twice is then in the cache.

    As elsewhere, 16 bits get dS before the scale; the division by what dropout keeps is left for the end.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    Q += batch * stride_qb + head * stride_qh
    K += batch * stride_kb + head * stride_kh
    V += batch * stride_vb + head * stride_vh
    Out += batch * stride_ob + head * stride_oh
    DOut += batch * stride_dob + head * stride_doh
    DQ += batch * stride_dqb + head * stride_dqh
    DK += batch * stride_dkb + head * stride_dkh
    DV += batch * stride_dvb + head * stride_dvh
    P = head_of_p(P, batch, head, q_len, kv_len)
    kv_end = kv_len if KvLengths is None else tl.minimum(tl.load(KvLengths + batch), kv_len)
    KEPT: tl.constexpr = 1 - SPEC.DROPOUT_P
    tile, columns = tl.program_id(0), tl.cdiv(kv_len, BLOCK) * BLOCK
    key_tiles = tl.cdiv(columns, SPEC.BLOCK_N)
    if WHOLE or tile < key_tiles:
        first_key = tile * SPEC.BLOCK_N
        k = load_rows(K, first_key, kv_end, stride_kn, SPEC, SPEC.BLOCK_N, True)
        v = load_rows(V, first_key, kv_end, stride_vn, SPEC, SPEC.BLOCK_N, True)
        dk = tl.zeros([SPEC.BLOCK_N, SPEC.BLOCK_D], tl.float32)
        dv = tl.zeros([SPEC.BLOCK_N, SPEC.BLOCK_D], tl.float32)
        for first_row in range(0, q_len, SPEC.BLOCK_M):
            q = load_rows(Q, first_row, q_len, stride_qm, SPEC, SPEC.BLOCK_M, True)
            d_out = load_rows(DOut, first_row, q_len, stride_dom, SPEC, SPEC.BLOCK_M, True)
            if not WHOLE:  # before the products, whose results then need no room yet
                delta = row_delta(Out, d_out, first_row, q_len, stride_om, SPEC) * KEPT
            p_t = tl.load(tile_of_p(P, first_row, first_key, kv_len, SPEC).T)
            kept_t = kept_of(p_t)
            dv = tl.dot(kept_t, d_out, dv, input_precision="ieee")
            dp_t = kept_t.to(tl.float32) * tl.dot(v, d_out.T, input_precision="ieee")
            if WHOLE:
                delta = tl.sum(dp_t, 0)
            ds_t = dp_t - tl.abs(p_t.to(tl.float32)) * delta[None, :]
            ds_t = ds_t.to(q.dtype)
            dk = tl.dot(ds_t, q, dk, input_precision="ieee")
            if WHOLE:
                dq_t = tl.dot(k.T, ds_t, input_precision="ieee")
                store_rows(DQ, dq_t.T * (scale / KEPT), first_row, q_len, stride_dqm, SPEC, SPEC.BLOCK_M)
        real = (first_key + tl.arange(0, SPEC.BLOCK_N) < kv_end)[:, None]  # 0 * NaN of dO or P is NaN
        dv, dk = tl.where(real, dv / KEPT, 0.0), tl.where(real, dk * (scale / KEPT), 0.0)
        store_rows(DV, dv, first_key, kv_len, stride_dvn, SPEC, SPEC.BLOCK_N)
        store_rows(DK, dk, first_key, kv_len, stride_dkn, SPEC, SPEC.BLOCK_N)
    else:
        first_row = (tile - key_tiles) * SPEC.BLOCK_M
        d_out = load_rows(DOut, first_row, q_len, stride_dom, SPEC, SPEC.BLOCK_M, True)
        delta = row_delta(Out, d_out, first_row, q_len, stride_om, SPEC) * KEPT
        dq = tl.zeros([SPEC.BLOCK_M, SPEC.BLOCK_D], tl.float32)
        for first_key in range(0, columns, SPEC.BLOCK_N):
            k = load_rows(K, first_key, kv_end, stride_kn, SPEC, SPEC.BLOCK_N, True)
            v = load_rows(V, first_key, kv_end, stride_vn, SPEC, SPEC.BLOCK_N, True)
            p = tl.load(tile_of_p(P, first_row, first_key, kv_len, SPEC)).to(tl.float32)
            dp = tl.dot(d_out, v.T, input_precision="ieee")
            ds = tl.maximum(p, 0.0) * dp - tl.abs(p) * delta[:, None]
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
        store_rows(DQ, dq * (scale / KEPT), first_row, q_len, stride_dqm, SPEC, SPEC.BLOCK_M)


@triton.jit
def row_delta(Out, d_out, first_row, q_len, stride_om, SPEC: tl.constexpr):
    """rowsum(dO * O), which is rowsum(Z P * dP) / (1 - p), p being the share that dropout drops."""
    out = load_rows(Out, first_row, q_len, stride_om, SPEC, SPEC.BLOCK_M, True).to(tl.float32)
    return tl.sum(out * d_out.to(tl.float32), 1)
