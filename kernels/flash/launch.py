"""How a kernel gets onto the device: its tile, its compile-time arguments, and the launch itself.

Triton reads every argument of a launch in Python to find out which compiled kernel it means. A launch that differs
from an earlier one in nothing Triton looks at goes straight to that one's kernel instead: LOG.md has what it saves.
"""

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import triton

from . import tiles
from .backward import dkdv_kernel, dq_kernel
from .forward import forward_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}
# For AMD Triton also looks at how large a tensor is.
REUSES = not INTERPRETED and torch.version.hip is None
Tensor = torch.Tensor

# A launch that Triton has done -> its kernel on its grid, and the numbers it took behind the pointers.
_known: dict[tuple[object, ...], tuple[Callable[..., None], tuple[object, ...]]] = {}
KNOWN_LIMIT = 4096  # to forget one only costs a slow launch

# A kernel, its grid of three, its arguments behind the pointers, and Triton's options.
Launch = tuple[triton.runtime.KernelInterface, tuple[int, int, int], tuple[object, ...], dict[str, int]]


def launch(
    pointers: tuple[Tensor | None, ...],
    key: tuple[object, ...],
    prepare: Callable[[], Launch],
    descriptors: tuple[object, ...] = (),
) -> None:
    """Launch a kernel on the current stream of the device of the first pointer.

    Args:
        pointers: its first arguments, but for the TMA descriptors, which are before them.
        key: all that `prepare` and what the descriptors move at a time depend on, but for the types of the pointers.
        prepare: what to launch; not asked when the launch is known.
    """
    # Triton looks at types, and at whether pointers and numbers are multiples of 16. Here numbers are compared as
    # they are, and a pointer that is no multiple of 16 is left to Triton.
    types, addresses, bits = [], [], 0
    for tensor in pointers:
        if tensor is None:
            types.append(None)
            addresses.append(None)
        else:
            types.append(tensor.dtype)
            addresses.append(tensor.data_ptr())
            bits |= addresses[-1]
    device = pointers[0].get_device()
    key = (device, *key, *types)
    reusable = REUSES and bits % 16 == 0 and not tiles.are_forced()
    with _on_device(device):
        if reusable and (known := _known.get(key)) is not None:
            run, numbers = known
            # Of a tensor Triton would ask the driver whether it is on the device; of an address it does not.
            run(*descriptors, *addresses, *numbers)
            return
        kernel, grid, numbers, options = prepare()
        compiled = kernel[grid](*descriptors, *pointers, *numbers, **options)
        if reusable:
            if len(_known) >= KNOWN_LIMIT:
                _known.clear()
            _known[key] = compiled[grid], numbers


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
        pointers: the kernel's tensors, in its order. strided: those of them whose strides it takes.
        blocks: the block lists among them.
        rules: causal, dropout_p, left, right, softcap, and whether there are ALiBi slopes, documents and lengths.
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
            *_block_strides(blocks),
            q_len,
            kv_len,
            scale,
            *[each[2] for each in strides],
            tiles.specify(tile, head_dim, causal, heads // kv_heads, *others),
        )
        return KERNELS[kernel], grid, numbers, {"num_warps": tile.warps, "num_stages": tile.stages}

    listed = None if blocks is None else (blocks.shape, blocks.stride())
    launch(pointers, (kernel, q.shape, k.shape, scale, rules, listed, *strides), prepare)


@functools.cache
def architecture(device: torch.device) -> int:
    """Compute capability, major * 10 + minor; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _on_device(device: int) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the one of the tensors. -1 is the CPU."""
    if device >= 0 and device != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()


def _block_strides(lists: Tensor | None) -> tuple[int, ...]:
    """From one batch and head to the next; 0 where they share a mask."""
    if lists is None:
        return 0, 0
    return tuple(0 if lists.shape[dim] == 1 else lists.stride(dim) for dim in (0, 1))
