"""Flash attention as a function: checks, the two custom operators, and their gradient.

The operators are opaque to torch.compile (`fullgraph=True` takes them whole) and live in a namespace named after this
package, so that a checkout's `kernels` and an installed `tilegpt.kernels` can share a process.
"""

import functools
import os
from contextlib import AbstractContextManager, nullcontext

import torch
import triton

from ..arguments import BLOCK_MASK_SIZE, check_dropout, check_features, check_inputs, check_scale
from ..registry import AttentionError
from . import refuses_inputs
from .backward import dkdv_kernel, dq_kernel
from .forward import forward_kernel
from .tiles import Tile, specify, tile_for

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAMESPACE = __package__.replace(".", "_")
Tensor = torch.Tensor


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
    return_lse: bool = False,
    precise_delta: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v without ever holding the scores; arguments and result as `naive_attention`.

    q, k and v may have any strides whose last is 1: views of a packed qkv go in without a copy. Beyond inputs and
    outputs it keeps 4 bytes a query for the log-sum-exp, and 4 more during the backward; with documents 8 bytes a
    token, with a block mask two int32 lists of its tiles. Gradients are bit for bit repeatable. float32 is computed
    in full precision, without tensor cores. The kernels visit no tile that a mask hides. A CUDA graph needs
    dropout_seed as a tensor on the device: another one is captured as a constant.
    precise_delta also keeps what rounding took from the output, as large as the output, so that delta =
    rowsum(dO * O) does not inherit a rounding that can lean one way (arXiv 2510.04212).

    Raises:
        AttentionError: an argument that is not supported, by name.
    """
    check_inputs(q, k, v)
    check_dropout(dropout_p, dropout_seed)
    check_features(
        q, k, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        cu_seqlens=cu_seqlens, kv_lengths=kv_lengths, block_mask=block_mask,
    )  # fmt: skip
    reason = refuses_inputs(q.device, q.dtype, q.shape[-1], INTERPRETED)
    if reason is not None:
        raise AttentionError(f"attention=flash: {reason}")
    if max(q.shape[:2]) > 65535:  # they are grid axes of the launch
        raise AttentionError(f"attention=flash takes batch and heads up to 65535, got {tuple(q.shape[:2])}")
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise AttentionError("attention=flash has no gradient for alibi_slopes; attention=naive does")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1:
            raise AttentionError(
                f"{name}'s last stride must be 1, got {tensor.stride()}; pass {name}.contiguous()"
            )
    # One number a head or a batch, which the kernels read as contiguous.
    alibi_slopes, sinks, kv_lengths = (
        x if x is None else x.contiguous() for x in (alibi_slopes, sinks, kv_lengths)
    )
    left, right = window or (-1, -1)
    seed = _seed(dropout_seed, q.device) if dropout_p else None
    starts, ends = _documents(cu_seqlens, q.shape[0], q.shape[2]) if cu_seqlens is not None else (None, None)
    blocks = (None, None)
    if block_mask is not None:
        blocks = _block_lists(block_mask, q.shape[2], k.shape[2], causal, left, right)
    out, lse, _ = _Flash.apply(
        q, k, v, seed, alibi_slopes, sinks, starts, ends, kv_lengths, *blocks,
        causal, check_scale(scale, q.shape[-1]), dropout_p, left, right, softcap, precise_delta,
    )  # fmt: skip
    return (out, lse) if return_lse else out


@torch.library.custom_op(f"{NAMESPACE}::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    document_starts: Tensor | None,
    document_ends: Tensor | None,
    kv_lengths: Tensor | None,
    key_blocks: Tensor | None,
    query_blocks: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    left: int,
    right: int,
    softcap: float,
    precise_delta: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out like q; lse float32 (batch, heads, q_len), natural log-sum-exp of the scaled scores; out_low.

    out_low: with precise_delta what rounding took from out, like out; otherwise empty.

    document_starts, document_ends: int32 (batch, q_len), first and last + 1 token of each token's document.
    key_blocks, query_blocks: see `_block_lists`.
    """
    batch, heads, q_len, _ = q.shape
    out, lse, out_low = _outputs(q, precise_delta)
    if out.numel() == 0:
        return out, lse, out_low
    given = (alibi_slopes, document_starts, kv_lengths)
    tile, options = _launch("forward", q, k, given, causal, dropout_p, left, right, softcap)
    with _on_device(q):
        forward_kernel[triton.cdiv(q_len, tile.block_m), heads, batch](
            q, k, v, out, out_low if precise_delta else None, lse,
            seed, alibi_slopes, sinks, document_starts, document_ends, kv_lengths, key_blocks,
            *_strides(q, k, v, out), *_block_strides(key_blocks),
            q_len, k.shape[2], scale,
            *_row_strides(q, k, v, out),
            **options,
        )  # fmt: skip
    return out, lse, out_low


@torch.library.custom_op(f"{NAMESPACE}::flash_backward", mutates_args=())
def flash_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    out_low: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor | None,
    alibi_slopes: Tensor | None,
    document_starts: Tensor | None,
    document_ends: Tensor | None,
    kv_lengths: Tensor | None,
    key_blocks: Tensor | None,
    query_blocks: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    left: int,
    right: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq like q, dk like k, dv like v, delta like lse) for the gradients of out and, if it has one, of lse."""
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    dq, dk, dv, delta = _empty_like(q), _empty_like(k), _empty_like(v), _empty_rows(q)
    if d_out.stride(-1) != 1:  # a gradient that was expanded from fewer elements
        d_out = d_out.contiguous()
    if d_lse is not None:
        d_lse = d_lse.contiguous()
    rules = (seed, alibi_slopes, document_starts, document_ends, kv_lengths)
    constant_rules = ((alibi_slopes, document_starts, kv_lengths), causal, dropout_p, left, right, softcap)
    with _on_device(q):
        if dq.numel():
            tile, options = _launch("dq", q, k, *constant_rules)
            dq_kernel[triton.cdiv(q_len, tile.block_m), heads, batch](
                q, k, v, out, out_low, d_out, lse, d_lse, delta, dq, *rules, key_blocks,
                *_strides(q, k, v, out, d_out, dq), *_block_strides(key_blocks),
                q_len, kv_len, scale,
                *_row_strides(q, k, v, out, d_out, dq),
                **options,
            )  # fmt: skip
        if dk.numel():
            tile, options = _launch("dkdv", q, k, *constant_rules)
            dkdv_kernel[triton.cdiv(kv_len, tile.block_n), kv_heads, batch](
                q, k, v, d_out, lse, delta, dk, dv, *rules, query_blocks,
                *_strides(q, k, v, d_out, dk, dv), *_block_strides(query_blocks),
                q_len, kv_len, scale,
                *_row_strides(q, k, v, d_out, dk, dv),
                **options,
            )  # fmt: skip
    return dq, dk, dv, delta


@flash_forward.register_fake
def _(q, *rest):
    return _outputs(q, precise_delta=rest[-1])


@flash_backward.register_fake
def _(d_out, d_lse, out, lse, out_low, q, k, v, *rest):
    return _empty_like(q), _empty_like(k), _empty_like(v), _empty_rows(q)


def _save(ctx, inputs, output):
    q, k, v, seed, alibi_slopes, sinks, starts, ends, kv_lengths, *blocks = inputs[:11]
    *ctx.constant_rules, precise_delta = inputs[11:]
    out, lse, out_low = output
    rules = (seed, alibi_slopes, starts, ends, kv_lengths, *blocks)
    ctx.save_for_backward(sinks, out, lse, out_low if precise_delta else None, q, k, v, *rules)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_lse, d_out_low):
    nothing = (None,) * (9 + len(ctx.constant_rules))
    if d_out is None and d_lse is None:
        return None, None, None, *nothing
    sinks, out, lse, *tensors = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    dq, dk, dv, delta = flash_backward(d_out, d_lse, out, lse, *tensors, *ctx.constant_rules)
    if sinks is None:
        return dq, dk, dv, *nothing
    # A sink is a score like another, P = exp(sink - lse), whose value is 0: dS = P * (0 - delta).
    d_sinks = -(torch.exp(sinks.float()[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
    return dq, dk, dv, None, None, d_sinks, *nothing[3:]


def _second_backward(ctx, *gradients):
    raise AttentionError("attention=flash has no second derivative; use attention=naive")


# For those who call the operator itself, and for opcheck.
flash_forward.register_autograd(_backward, setup_context=_save)


class _Flash(torch.autograd.Function):
    """The same gradient without what register_autograd does in Python on each call: on a CPU host, with the launch
    itself stubbed out, a forward that will need gradients took 82 us instead of 166."""

    @staticmethod
    def forward(ctx, *inputs):
        results = flash_forward(*inputs)
        _save(ctx, inputs, results)
        return results

    @staticmethod
    def backward(ctx, *gradients):
        return _backward(ctx, *gradients)


flash_backward.register_autograd(_second_backward)


def _seed(seed: int | Tensor, device: torch.device) -> Tensor:
    if isinstance(seed, Tensor):
        return seed.to(device)
    return torch.full(
        (), seed, dtype=torch.int64, device=device
    )  # a fill, where a copy would wait for the device


def _documents(cu_seqlens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """First and last + 1 token of each token's document, counted from the start of its row: int32 (batch, length)."""
    tokens = torch.arange(batch * length, dtype=torch.int32, device=cu_seqlens.device)
    # Offsets that do not end at batch * length give wrong documents, but never an index out of range on the device.
    document = torch.searchsorted(cu_seqlens, tokens, right=True).clamp(1, cu_seqlens.shape[0] - 1)
    row_start = tokens // length * length
    starts, ends = cu_seqlens[document - 1] - row_start, cu_seqlens[document] - row_start
    return starts.clamp(min=0).view(batch, length), ends.clamp(max=length).view(batch, length)


def _block_lists(
    mask: Tensor, q_len: int, kv_len: int, causal: bool, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """A block mask as lists, without what the causal mask and the window hide anyway.

    Returns:
        int32 (batch or 1, heads or 1, query blocks, 1 + key blocks): for each 128 queries the number of key blocks to
        visit, then which; and the same with queries and keys exchanged.
    """
    first_row = torch.arange(mask.shape[2], device=mask.device)[:, None] * BLOCK_MASK_SIZE + (kv_len - q_len)
    first_key = torch.arange(mask.shape[3], device=mask.device) * BLOCK_MASK_SIZE
    last_row, last_key = first_row + BLOCK_MASK_SIZE - 1, first_key + BLOCK_MASK_SIZE - 1
    if causal or right >= 0:
        mask = mask & (first_key <= last_row + (0 if causal else right))
    if left >= 0:
        mask = mask & (last_key >= first_row - left)

    def lists(mask: Tensor) -> Tensor:
        which = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return torch.cat([mask.sum(-1, keepdim=True), which], -1).to(torch.int32)

    return lists(mask), lists(mask.transpose(2, 3))


def _launch(
    kernel: str, q: Tensor, k: Tensor, given: tuple[Tensor | None, ...], causal: bool, *rules: float
) -> tuple[Tile, dict[str, object]]:
    """The tile of a kernel and the keyword arguments every kernel takes. given: ALiBi slopes, documents, lengths."""
    tile = tile_for(kernel, _architecture(q.device), q.shape[3], q.dtype)
    flags = (tensor is not None for tensor in given)
    spec = specify(tile, q.shape[3], causal, q.shape[1] // k.shape[1], *rules, *flags)
    return tile, {"SPEC": spec, "num_warps": tile.warps, "num_stages": tile.stages}


@functools.cache
def _architecture(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the one of the tensors."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def _empty_like(x: Tensor) -> Tensor:
    """Uninitialised, shaped as x, dense, with heads inside tokens where x has them so (a view of a packed qkv)."""
    batch, heads, length, head_dim = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, length, heads, head_dim).transpose(1, 2)
    return x.new_empty(batch, heads, length, head_dim)


def _outputs(q: Tensor, precise_delta: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised out, lse and out_low."""
    return _empty_like(q), _empty_rows(q), _empty_like(q) if precise_delta else q.new_empty(0)


def _empty_rows(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def _row_strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride(2) for tensor in tensors)


def _block_strides(lists: Tensor | None) -> tuple[int, int]:
    """From one batch and head to the next; 0 where they share a mask."""
    if lists is None:
        return 0, 0
    return tuple(0 if lists.shape[dim] == 1 else lists.stride(dim) for dim in (0, 1))
