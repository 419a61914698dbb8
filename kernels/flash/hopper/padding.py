"""Key padding in the Hopper kernels: kv_lengths, the number of keys of each batch. Beside documents and windows the
bounds by query end where it begins (bounds.py).

The forward visits no block of keys that is all padding, but for one, masked, of a tile that sees no key. The backward
passes over its work item, whose dK and dV `clear_kernel` sets to 0; above head_dim 128 the item has no step
(wide_dkdv.py). A block where padding begins has the bounds of its last key in use (`last_key_before`).

Padding may hold anything, and 0 times NaN is NaN. So where a sum over keys multiplies rows of K and V beyond the last
key, they are set to 0 in shared memory by every warpgroup that does. Since all write the same numbers, none waits for
another.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

CLEARED = gl.constexpr(32)  # rows at a time, to take few registers


@gluon.jit
def key_end(batch, sizes):
    """One past the last key of a batch."""
    end = sizes.kv_len
    if sizes.KvLengths is not None:
        end = gl.minimum(gl.load(sizes.KvLengths + batch), end)
    return end


@gluon.jit
def last_key_before(end, batch, sizes):
    """The last key before `end` that is not padding. Its bounds are those of the block of keys that ends there: with
    those of padding, a block where that begins would have steps for queries that see none of its keys."""
    end = gl.minimum(end, key_end(batch, sizes))
    if sizes.KvLengths is not None:
        end = gl.maximum(end, 1)  # of a batch without keys, whose blocks are passed over
    return end - 1


@gluon.jit
def mask_padding(scores, keys_left):
    """scores (queries, keys), with -inf from key `keys_left` on."""
    keys = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))[None, :]
    own = keys & 6  # subtracted, a thread's columns are constants and take no registers
    return gl.where(keys - own < keys_left - own, scores, float("-inf"))


@gluon.jit
def padded_bias(zeros, first, keys_left):
    """zeros (keys, queries), with -inf from key `keys_left` on. first: the first key."""
    keys = first + gl.arange(0, zeros.shape[0], layout=gl.SliceLayout(1, zeros.type.layout))[:, None]
    return gl.where(keys < keys_left, zeros, float("-inf"))


@gluon.jit
def clear_padding(tile, keys_left):
    """Set the rows of a tile of K or V from `keys_left` on to 0, for wgmma."""
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    if keys_left < ROWS:
        for first in gl.static_range(0, ROWS, CLEARED):
            part = tile.slice(first, CLEARED)
            keys = first + gl.arange(0, CLEARED, layout=gl.SliceLayout(1, layout))[:, None]
            part.store(gl.where(keys < keys_left, part.load(layout), 0.0))
        fence_async_shared()
        gl.barrier()


@triton.jit(do_not_specialize=["kv_len", "left"])
def clear_kernel(
    DK, DV, KvLengths, RowStart, RowEnd, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, kv_len,
    left, KEYS: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Set dK and dV to 0 in blocks of KEYS keys that are all padding, or have no step (`claim_keys`): by RowStart and
    RowEnd, the bounds of keys by query, or by left, of a window beside padding (bounds.py), which may hide the first
    keys from all queries. Each is None without. Grid (ceil(kv_len / KEYS), heads, batch)."""
    block, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if RowStart is None:
        passed_over = block * KEYS >= tl.load(KvLengths + batch)
        if left is not None:
            passed_over = passed_over | (
                tl.minimum((block + 1) * KEYS, tl.load(KvLengths + batch)) + left <= 0
            )
    else:
        end = tl.minimum((block + 1) * KEYS, kv_len)
        if KvLengths is not None:
            end = tl.maximum(tl.minimum(end, tl.load(KvLengths + batch)), 1)  # as `last_key_before`
        begin = tl.load(RowStart + batch * kv_len + block * KEYS) // BLOCK_M
        passed_over = begin >= tl.cdiv(tl.load(RowEnd + batch * kv_len + end - 1), BLOCK_M)
        if KvLengths is not None:
            passed_over = passed_over | (block * KEYS >= tl.load(KvLengths + batch))
    if passed_over:
        keys = block * KEYS + tl.arange(0, KEYS)[:, None]
        dims = tl.arange(0, WIDTH)[None, :]
        inside = (keys < kv_len) & (dims < HEAD_DIM)
        zeros = tl.zeros([KEYS, WIDTH], DK.dtype.element_ty)
        DK += batch * stride_kb + head * stride_kh
        DV += batch * stride_vb + head * stride_vh
        tl.store(DK + keys.to(tl.int64) * stride_kn + dims, zeros, mask=inside)
        tl.store(DV + keys.to(tl.int64) * stride_vn + dims, zeros, mask=inside)
