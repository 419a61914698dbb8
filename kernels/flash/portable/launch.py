"""Launches the portable kernels: chooses tile and grid, and makes their arguments."""

import functools

import torch
import triton

from ...launch import Launch, launch
from ..call import Options, Tensors
from ..masks import list_strides, queries_of_keys
from . import tiles
from .backward import dkdv_kernel, dq_kernel
from .forward import forward_kernel
from .spec import specify

KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}
Tensor = torch.Tensor
Masks = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    out_low: Tensor,
    lse: Tensor,
    tensors: Tensors,
    options: Options,
) -> None:
    """Write out, lse and, with precise_delta, out_low, as `flash_forward` describes them. q, k, v: not packed."""
    if not out.numel():
        return
    low = out_low if options.precise_delta else None
    pointers = (
        q, k, v, out, low, lse, tensors.seed, tensors.alibi_slopes, tensors.sinks, tensors.document_starts,
        tensors.document_ends, tensors.kv_lengths, tensors.key_blocks,
    )  # fmt: skip
    _launch("forward", pointers, (q, k, v, out), tensors.key_blocks, tensors, options)


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    out_low: Tensor | None,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    delta: Tensor,
    tensors: Tensors,
    options: Options,
) -> None:
    """Write the gradients dq, dk and dv, and delta, as `flash_backward` describes them. Nothing is packed."""
    if dq.numel():
        low = out_low if options.precise_delta else None
        pointers = (q, k, v, out, low, d_out, lse, d_lse, delta, dq, *_masks(tensors), tensors.key_blocks)
        _launch("dq", pointers, (q, k, v, out, d_out, dq), tensors.key_blocks, tensors, options)
    if dk.numel():
        if options.ragged:
            tensors = queries_of_keys(tensors, k.shape[2])
        others = (q, k, v, d_out, lse, delta, dk, dv, *_masks(tensors), tensors.query_blocks)
        _launch("dkdv", others, (q, k, v, d_out, dk, dv), tensors.query_blocks, tensors, options)


def _masks(tensors: Tensors) -> Masks:
    return (
        tensors.seed, tensors.alibi_slopes, tensors.document_starts, tensors.document_ends, tensors.kv_lengths
    )  # fmt: skip


def _launch(
    kernel: str,
    pointers: tuple[Tensor, Tensor, *tuple[Tensor | None, ...]],
    strided: tuple[Tensor, ...],
    blocks: Tensor | None,
    tensors: Tensors,
    options: Options,
) -> None:
    """Launch a kernel.

    Args:
        kernel: a key of KERNELS. pointers: its tensor arguments in their order, q and k first.
        strided: those whose strides are arguments too. blocks: those that are block lists, or None.
    """
    q, k = pointers[:2]
    strides = [x.stride() for x in strided]

    def prepare() -> Launch:
        (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
        tile = tiles.tile_for(kernel, architecture(q.device), head_dim, q.dtype, options.causal, kv_len)
        grid = (triton.cdiv(q_len, tile.block_m), heads, batch)
        if kernel == "dkdv":
            grid = (triton.cdiv(kv_len, tile.block_n), kv_heads, batch)
        numbers = (
            *[stride for each in strides for stride in each[:2]],
            *list_strides(blocks)[:2],
            q_len,
            kv_len,
            options.scale,
            *[each[2] for each in strides],
            specify(
                tile,
                head_dim,
                group=heads // kv_heads,
                **options.constants(),
                alibi=tensors.alibi_slopes is not None,
                documents=tensors.document_starts is not None,
                padded=tensors.kv_lengths is not None,
            ),
        )
        return KERNELS[kernel], grid, numbers, {"num_warps": tile.warps, "num_stages": tile.stages}

    key = None
    if not tiles.are_forced():
        listed = None if blocks is None else (blocks.shape, blocks.stride())
        key = (kernel, q.shape, k.shape, options, listed, *strides)
    launch(pointers, key, prepare)


@functools.cache
def architecture(device: torch.device) -> int:
    """The device's architecture as `tiles.tile_for` takes it."""
    if device.type != "cuda":
        return tiles.INTERPRETED
    if torch.version.hip is not None:  # PyTorch calls an AMD GPU "cuda" too, with a capability
        return tiles.AMD
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
