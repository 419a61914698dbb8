"""Flash attention as a function: checks, the two custom operators, and their gradient.

The operators are opaque to torch.compile (`fullgraph=True` takes them whole) and live in a namespace named after this
package, so that a checkout's `kernels` and an installed `tilegpt.kernels` can share a process.
"""

import functools
import os
from contextlib import AbstractContextManager, nullcontext

import torch
import triton

from ..arguments import check_dropout, check_inputs, check_scale
from ..registry import AttentionError, used_features
from . import refuses_inputs
from .backward import LOG2_E, dkdv_kernel, dq_kernel
from .forward import forward_kernel
from .tiles import Tile, constants, tile_for

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAMESPACE = __package__.replace(".", "_")


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    return_lse: bool = False,
    **features: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scale) v without ever holding the scores; arguments and result as `naive_attention`.

    q, k and v may have any strides whose last is 1: views of a packed qkv go in without a copy. Beyond inputs and
    outputs it keeps 4 bytes a query for the log-sum-exp, and 4 more during the backward. Gradients are bit for bit
    repeatable. float32 is computed in full precision, without tensor cores.

    Raises:
        AttentionError: an argument that is not supported, by name.
    """
    check_inputs(q, k, v)
    check_dropout(dropout_p, dropout_seed)
    reason = refuses_inputs(q.device, q.dtype, q.shape[-1], INTERPRETED)
    if reason is not None:
        raise AttentionError(f"attention=flash: {reason}")
    used = used_features({"dropout_p": dropout_p, **features})
    if used:
        raise AttentionError(f"attention=flash does not do {sorted(used)[0]}; attention=naive does")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1:
            raise AttentionError(
                f"{name}'s last stride must be 1, got {tensor.stride()}; pass {name}.contiguous()"
            )
    out, lse = flash_forward(q, k, v, causal, check_scale(scale, q.shape[-1]))
    return (out, lse) if return_lse else out


@torch.library.custom_op(f"{NAMESPACE}::flash_forward", mutates_args=())
def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like q, lse float32 (batch, heads, q_len): natural log-sum-exp of the scaled scores)."""
    batch, heads, q_len, _ = q.shape
    out, lse = _empty_like(q), _empty_rows(q)
    if out.numel() == 0:
        return out, lse
    tile, options = _launch("forward", q, k, causal)
    with _on_device(q):
        forward_kernel[triton.cdiv(q_len, tile.block_m), heads, batch](
            q, k, v, out, lse,
            *_strides(q, k, v, out),
            q_len, k.shape[2], scale * LOG2_E.value,
            *_row_strides(q, k, v, out),
            **options,
        )  # fmt: skip
    return out, lse


@torch.library.custom_op(f"{NAMESPACE}::flash_backward", mutates_args=())
def flash_backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq like q, dk like k, dv like v) for the gradients of out and, if it has one, of lse."""
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    dq, dk, dv, delta = _empty_like(q), _empty_like(k), _empty_like(v), _empty_rows(q)
    if d_out.stride(-1) != 1:  # a gradient that was expanded from fewer elements
        d_out = d_out.contiguous()
    if d_lse is not None:
        d_lse = d_lse.contiguous()
    with _on_device(q):
        if dq.numel():
            tile, options = _launch("dq", q, k, causal)
            dq_kernel[triton.cdiv(q_len, tile.block_m), heads, batch](
                q, k, v, out, d_out, lse, d_lse, delta, dq,
                *_strides(q, k, v, out, d_out, dq),
                q_len, kv_len, scale,
                *_row_strides(q, k, v, out, d_out, dq),
                **options,
            )  # fmt: skip
        if dk.numel():
            tile, options = _launch("dkdv", q, k, causal)
            dkdv_kernel[triton.cdiv(kv_len, tile.block_n), kv_heads, batch](
                q, k, v, d_out, lse, delta, dk, dv,
                *_strides(q, k, v, d_out, dk, dv),
                q_len, kv_len, scale,
                *_row_strides(q, k, v, d_out, dk, dv),
                **options,
            )  # fmt: skip
    return dq, dk, dv


@flash_forward.register_fake
def _(q, k, v, causal, scale):
    return _empty_like(q), _empty_rows(q)


@flash_backward.register_fake
def _(d_out, d_lse, q, k, v, out, lse, causal, scale):
    return _empty_like(q), _empty_like(k), _empty_like(v)


def _save(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, d_lse):
    if d_out is None and d_lse is None:
        return None, None, None, None, None
    q, k, v, out, lse = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    return *flash_backward(d_out, d_lse, q, k, v, out, lse, ctx.causal, ctx.scale), None, None


def _second_backward(ctx, *gradients):
    raise AttentionError("attention=flash has no second derivative; use attention=naive")


flash_forward.register_autograd(_backward, setup_context=_save)
flash_backward.register_autograd(_second_backward)


def _launch(kernel: str, q: torch.Tensor, k: torch.Tensor, causal: bool) -> tuple[Tile, dict[str, object]]:
    """The tile of a kernel and the keyword arguments every kernel takes."""
    head_dim = q.shape[3]
    tile = tile_for(kernel, _architecture(q.device), head_dim, q.dtype)
    options = constants(tile, head_dim, q.dtype, causal, q.shape[1] // k.shape[1])
    return tile, {**options, "num_warps": tile.warps, "num_stages": tile.stages}


@functools.cache
def _architecture(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _on_device(x: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the one of the tensors."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised, shaped as x, dense, with heads inside tokens where x has them so (a view of a packed qkv)."""
    batch, heads, length, head_dim = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, length, heads, head_dim).transpose(1, 2)
    return x.new_empty(batch, heads, length, head_dim)


def _empty_rows(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def _row_strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride(2) for tensor in tensors)
