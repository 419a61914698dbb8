"""Decoding: attention of a few new tokens to a cache of keys, split over the keys (flash-decoding, Dao et al. 2023).

With one query a head, a program for each head and row leaves most of a GPU idle while it reads a long cache. Here a
program reads a part of a row's keys for one key head, with all query heads that share it in one tile, and a second
kernel joins the parts: each part's output is weighted by e^(its lse - the lse of all). Forward only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import check_features, check_inputs, check_scale, check_tensor
from ..launch import INTERPRETED, launch, sm_count
from ..operators import operator
from ..registry import AttentionError
from .dispatch import refuses_inputs
from .operators import forward_flops
from .portable.forward import LOWEST
from .portable.masks import visible_keys
from .portable.score_mods import LOG2_E, modify_scores, score_exp2_scale
from .portable.spec import Rules, specify
from .portable.tiles import Tile

BLOCK_N = 64  # keys that a program reads at a time, or a power of two fewer
LARGEST_TILE = 64  # queries of a key head: those of all heads that share it
PROGRAMS = 4  # per SM, as the split of the keys aims for
MOST_PARTS = 128


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    parts: int | None = None,
) -> Tensor:
    """Attention of each row's last tokens to all of its tokens, causal. Autocast casts nothing here: it would copy
    the cache for every token.

    Args:
        q: (batch, heads, q_len, head_dim): the queries of the last q_len tokens, as a rule 1.
        k, v: (batch, kv_heads, room, head_dim), a cache, which holds those tokens too; what lies beyond them may be
            anything finite.
        lengths: int32 (batch,), on q's device: how many tokens a row has. A row without tokens gives 0.
        scale, softcap, sinks: as in `kernels.arguments`. window: how many tokens before its own a query sees.
        parts: into how many the keys are split; None: as many as fill the GPU.

    Returns:
        Like q. There is no gradient.

    Raises:
        AttentionError: names the argument that is not supported.
    """
    check_inputs(q, k, v)
    check_features(q, k, softcap=softcap, sinks=sinks)
    if window is not None and (not isinstance(window, int) or window < 0):
        raise AttentionError(f"window must be a count of keys before the query's own, got {window}")
    batch, heads, q_len, head_dim = q.shape
    if reason := refuses_inputs(q.device, q.dtype, head_dim, INTERPRETED):
        raise AttentionError(f"decode_attention: {reason}")
    check_tensor("lengths", lengths, q.device, torch.int32)
    if lengths.shape != (batch,):
        raise AttentionError(f"lengths must be ({batch},), got {tuple(lengths.shape)}")
    if heads // k.shape[1] * q_len > LARGEST_TILE:
        raise AttentionError(
            f"decode_attention takes up to {LARGEST_TILE} queries a key head, not {heads // k.shape[1] * q_len}; "
            "for longer prompts use attention=flash"
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise AttentionError("decode_attention has no gradient: call it under torch.no_grad()")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    sinks = sinks if sinks is None else sinks.contiguous()
    left = -1 if window is None else window
    scale = check_scale(scale, head_dim)
    return decode(q, k, v, lengths.contiguous(), sinks, scale, left, softcap or 0.0, parts or 0)


def _parts(device: torch.device, pairs: int, room: int) -> int:
    """Into how many parts the keys are split, so that there are PROGRAMS programs per SM."""
    wanted = -(-PROGRAMS * sm_count(device) // max(pairs, 1))
    return max(1, min(wanted, -(-room // BLOCK_N), MOST_PARTS))


def tile_of(rows: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile for that many queries of a key head. With 4 warps one of 64 x 128 spills on sm_80. In float32 64 x 256
    with 64 keys would need 208 KB of shared memory, and sm_80 has 163."""
    block_m = max(16, 1 << (rows - 1).bit_length())
    keys = 16 if dtype is torch.float32 and head_dim > 128 else BLOCK_N
    return Tile(block_m, keys, 8 if block_m * head_dim >= 8192 else 4, 2)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    scale: float,
    left: int,
    softcap: float,
    parts: int,
) -> Tensor:
    """The operator; parts 0: as many as fill the GPU."""
    out = q.new_empty(q.shape)
    (batch, heads, q_len, head_dim), (kv_heads, room) = q.shape, k.shape[1:3]
    if not out.numel():
        return out
    group, parts = heads // kv_heads, parts or _parts(q.device, batch * kv_heads, room)
    tile = tile_of(group * q_len, head_dim, q.dtype)
    spec = specify(tile, head_dim, True, group, left=left, softcap=softcap)
    partial = q.new_empty((parts, batch, heads, q_len, head_dim), dtype=torch.float32)
    lse = q.new_empty((parts, batch, heads, q_len), dtype=torch.float32)
    chunk = -(-max(-(-room // parts), 1) // BLOCK_N) * BLOCK_N
    strides = [stride for x in (q, k, v) for stride in x.stride()[:3]]
    numbers = (*strides, q_len, room, chunk, scale, spec)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    launch(
        (q, k, v, partial, lse, lengths),
        ("decode", q.shape, k.shape, parts, *numbers[:9], scale, left, softcap),
        lambda: (decode_kernel, (parts, kv_heads, batch), numbers, options),
    )
    joined = (parts, batch * heads * q_len, heads, q_len, head_dim, spec.BLOCK_D.value)
    launch(
        (partial, lse, sinks, out),
        ("join", joined),
        lambda: (join_kernel, (joined[1], 1, 1), joined, {"num_warps": 2}),
    )
    return out


decode = operator(decode, lambda q, *rest: q.new_empty(q.shape), flops=forward_flops)


@triton.jit(do_not_specialize=["q_len", "room", "chunk"])
def decode_kernel(
    Q, K, V, Partial, Lse, Lengths,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    q_len, room, chunk, scale,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Output and lse (base 2) of one part of the keys. Grid (parts, kv_heads, batch).

    Partial: float32 (parts, batch, heads, q_len, head_dim). Lse: likewise without head_dim; -inf for a part of which
    a query sees nothing.
    """
    part, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.minimum(tl.load(Lengths + batch), room)
    rules = Rules(q_len, length, length, scale, scale, batch, batch, kv_head, batch, batch)
    # Row r of the tile is query r % q_len of the group's head r // q_len.
    index, dims = tl.arange(0, SPEC.BLOCK_M), tl.arange(0, SPEC.BLOCK_D)
    head, row = kv_head * SPEC.GROUP + index // q_len, index % q_len
    used, inside = index < q_len * SPEC.GROUP, dims < SPEC.HEAD_DIM
    batch_64, kv_head_64 = batch.to(tl.int64), kv_head.to(tl.int64)
    of_rows = head.to(tl.int64) * stride_qh + row * stride_qm
    q = tl.load(
        Q + batch_64 * stride_qb + of_rows[:, None] + dims[None, :],
        mask=used[:, None] & inside[None, :],
        other=0.0,
    )
    K += batch_64 * stride_kb + kv_head_64 * stride_kh
    V += batch_64 * stride_vb + kv_head_64 * stride_vh
    acc = tl.zeros([SPEC.BLOCK_M, SPEC.BLOCK_D], tl.float32)
    row_max = tl.full([SPEC.BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([SPEC.BLOCK_M], tl.float32)
    first, last = visible_keys(row[:, None], rules, SPEC)
    earliest = visible_keys(q_len * 0, rules, SPEC)[0]
    begin = tl.maximum(part * chunk, earliest // SPEC.BLOCK_N * SPEC.BLOCK_N)
    for step in range(begin, tl.minimum((part + 1) * chunk, length), SPEC.BLOCK_N):
        keys = step + tl.arange(0, SPEC.BLOCK_N)
        here = (keys < length)[:, None] & inside[None, :]
        keys_64 = keys.to(tl.int64)[:, None]
        k = tl.load(K + keys_64 * stride_kn + dims[None, :], mask=here, other=0.0)
        v = tl.load(V + keys_64 * stride_vn + dims[None, :], mask=here, other=0.0)
        products = tl.dot(q, k.T, input_precision="ieee")
        scores, _ = modify_scores(products, row[:, None], keys[None, :], rules, SPEC)
        seen = (keys[None, :] >= first) & (keys[None, :] < last)
        scores = tl.where(seen, scores * score_exp2_scale(rules, SPEC), float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    saw_none = row_sum == 0
    row_sum = tl.where(saw_none, 1.0, row_sum)
    heads = tl.num_programs(1) * SPEC.GROUP
    place = ((part * tl.num_programs(2) + batch).to(tl.int64) * heads + head) * q_len + row
    tl.store(Lse + place, tl.where(saw_none, float("-inf"), row_max + tl.log2(row_sum)), mask=used)
    tl.store(
        Partial + place[:, None] * SPEC.HEAD_DIM + dims[None, :],
        acc / row_sum[:, None],
        mask=used[:, None] & inside[None, :],
    )


@triton.jit
def join_kernel(
    Partial, Lse, Sinks, Out,
    PARTS: tl.constexpr, rows, heads, q_len, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Out (rows, head_dim), rows being (batch, heads, q_len): the parts' outputs weighted by their softmax sums.
    Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    total_max = tl.full([], LOWEST, tl.float32)
    for part in range(PARTS):
        total_max = tl.maximum(total_max, tl.load(Lse + part * rows + row))
    if Sinks is not None:
        sink = tl.load(Sinks + row // q_len % heads).to(tl.float32) * LOG2_E
        total_max = tl.maximum(total_max, sink)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for part in range(PARTS):
        share = tl.exp2(tl.load(Lse + part * rows + row) - total_max)
        values = tl.load(Partial + (part * rows + row) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        acc += share * values
        total += share
    if Sinks is not None:
        total += tl.exp2(sink - total_max)
    out = acc / tl.where(total == 0, 1.0, total)
    tl.store(Out + row * HEAD_DIM + dims, out.to(Out.dtype.element_ty), mask=dims < HEAD_DIM)
