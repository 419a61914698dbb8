"""How a kernel gets onto the device: its tile, its compile-time arguments, and the launch itself.

Triton reads every argument of a launch in Python to find out which compiled kernel it means. A launch that differs
from an earlier one in nothing Triton looks at goes straight to that one's kernel instead: LOG.md has what it saves.
"""

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from .backward import dkdv_kernel, dq_kernel
from .forward import forward_kernel
from .tiles import specify, tile_for

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}
# For AMD Triton also looks at how large a tensor is.
REUSES = not INTERPRETED and torch.version.hip is None
Tensor = torch.Tensor

# What Triton looks at -> (compiled kernel, its SPEC, the tile's rows of the axis that the grid cuts).
_compiled: dict[tuple[object, ...], tuple[Callable[..., Callable[..., None]], object, int]] = {}
COMPILED_LIMIT = 4096  # layouts; one that is dropped only costs a slow launch


def launch(
    kernel: str,
    pointers: tuple[Tensor | None, ...],
    strided: tuple[Tensor, ...],
    blocks: Tensor | None,
    q: Tensor,
    k: Tensor,
    scale: float,
    rules: tuple[float, ...],
) -> None:
    """Run "forward", "dq" or "dkdv" on the current stream of q's device.

    Args:
        pointers: the kernel's tensors, in its order. strided: those of them whose strides it takes.
        blocks: the block lists among them.
        rules: causal, dropout_p, left, right, softcap, and whether there are ALiBi slopes, documents and lengths.
    """
    batch, heads, q_len, head_dim = q.shape
    _, kv_heads, kv_len, _ = k.shape
    cut, cut_heads = (kv_len, kv_heads) if kernel == "dkdv" else (q_len, heads)
    strides = [x.stride() for x in strided]
    block_strides = (0, 0) if blocks is None else _block_strides(blocks)
    arguments = (
        *pointers,
        *[stride for of in strides for stride in of[:2]],
        *block_strides,
        q_len,
        kv_len,
        scale,
        *[of[2] for of in strides],
    )
    # Triton looks at types, and whether pointers and integers are multiples of 16 or 1; not at the lengths. Strides
    # are compared as they are, and a pointer that is no multiple of 16 is left to it.
    types, addresses = [], 0
    for tensor in pointers:
        if tensor is None:
            types.append(None)
        else:
            types.append(tensor.dtype)
            addresses |= tensor.data_ptr()
    group = heads // kv_heads
    key = (kernel, q.get_device(), head_dim, group, rules, *types, *strides, *block_strides)
    with on_device(q):
        if addresses % 16 == 0 and (known := _compiled.get(key)) is not None:
            compiled, spec, rows = known
            compiled[-(-cut // rows), cut_heads, batch](*arguments, spec)
            return
        tile = tile_for(kernel, architecture(q.device), head_dim, q.dtype)
        spec = specify(tile, head_dim, rules[0], group, *rules[1:])
        rows = tile.block_n if kernel == "dkdv" else tile.block_m
        compiled = KERNELS[kernel][-(-cut // rows), cut_heads, batch](
            *arguments, SPEC=spec, num_warps=tile.warps, num_stages=tile.stages
        )
    if REUSES and addresses % 16 == 0:
        if len(_compiled) >= COMPILED_LIMIT:
            _compiled.clear()
        _compiled[key] = compiled, spec, rows


@functools.cache
def architecture(device: torch.device) -> int:
    """Compute capability, major * 10 + minor; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the one of the tensors."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def _block_strides(lists: Tensor) -> tuple[int, ...]:
    """From one batch and head to the next; 0 where they share a mask."""
    return tuple(0 if lists.shape[dim] == 1 else lists.stride(dim) for dim in (0, 1))
