"""Launching the portable kernels: tile, grid and compile-time arguments."""

import functools

import torch
import triton

from ...launch import Launch, launch
from ..masks import list_strides
from . import tiles
from .backward import dkdv_kernel, dq_kernel
from .forward import forward_kernel

KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}
Tensor = torch.Tensor


def launch_flash(
    kernel: str,
    pointers: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    blocks: Tensor | None,
    q: Tensor,
    k: Tensor,
    scale: float,
    rules: tuple[float, ...],
) -> None:
    """Launch "forward", "dq" or "dkdv".

    Args:
        pointers: the kernel's tensors, in its argument order. strided: those whose strides are arguments too.
        blocks: the block lists among them, or None.
        rules: causal, dropout_p, left, right, softcap, and whether alibi_slopes, documents and kv_lengths are given.
    """
    strides = [x.stride() for x in strided]

    def prepare() -> Launch:
        (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
        causal, *others = rules
        tile = tiles.tile_for(kernel, architecture(q.device), head_dim, q.dtype, causal, kv_len)
        grid = (triton.cdiv(q_len, tile.block_m), heads, batch)
        if kernel == "dkdv":
            grid = (triton.cdiv(kv_len, tile.block_n), kv_heads, batch)
        numbers = (
            *[stride for each in strides for stride in each[:2]],
            *list_strides(blocks)[:2],
            q_len,
            kv_len,
            scale,
            *[each[2] for each in strides],
            tiles.specify(tile, head_dim, causal, heads // kv_heads, *others),
        )
        return KERNELS[kernel], grid, numbers, {"num_warps": tile.warps, "num_stages": tile.stages}

    key = None
    if not tiles.are_forced():
        listed = None if blocks is None else (blocks.shape, blocks.stride())
        key = (kernel, q.shape, k.shape, scale, rules, listed, *strides)
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
