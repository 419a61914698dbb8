"""How a kernel gets onto the device: its tile, its compile-time arguments, and the launch itself.

Triton reads every argument of a launch in Python to find out which compiled kernel it means. A launch that differs
from an earlier one in nothing Triton looks at goes straight to that one's kernel instead: LOG.md has what it saves.
"""

import copy
import functools
import itertools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from triton.runtime import driver

from . import tiles
from .backward import dkdv_kernel, dq_kernel
from .forward import forward_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}
# For AMD Triton also looks at how large a tensor is.
REUSES = not INTERPRETED and torch.version.hip is None
Tensor = torch.Tensor

# A kernel, its grid of three, its arguments behind the pointers, and Triton's options.
Launch = tuple[triton.runtime.KernelInterface, tuple[int, int, int], tuple[object, ...], dict[str, int]]


class Known(NamedTuple):
    """A launch that Triton has done, ready for other addresses."""

    run: Callable[..., None]  # Triton's launcher, which takes what follows, and then a kernel's arguments
    grid: tuple[int, int, int]
    function: int
    metadata: tuple[int, ...]
    numbers: tuple[object, ...]
    descriptors: tuple[dict[str, object], ...]  # what Triton says of each TMA descriptor
    serial: int  # no other has had it


_known: dict[tuple[object, ...], Known] = {}
# By the serial of a Known and addresses, its TMA descriptors as the launcher takes them: a model's layers differ in
# addresses alone, and meet them again in each step. 1 KB each.
_encoded: dict[tuple[int, ...], list[object]] = {}
LIMIT = 4096  # of either; to forget one only costs a slow launch
_serials = itertools.count()


def launch(
    pointers: tuple[Tensor | None, ...],
    key: tuple[object, ...],
    prepare: Callable[[], Launch],
    moved: tuple[Tensor, ...] = (),
    describe: Callable[..., tuple[object, ...]] | None = None,
) -> None:
    """Launch a kernel on the current stream of the device of the first pointer.

    Args:
        pointers: its first arguments, but for the TMA descriptors, which are before them.
        key: all that `prepare` and `describe` depend on, but for the types of `pointers` and the strides of `moved`.
        prepare: what to launch; not asked when the launch is known.
        moved: the tensors that TMA moves, at multiples of 16 bytes. describe: their descriptors.
    """
    device = pointers[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device. -1 is the CPU
            return launch(pointers, key, prepare, moved, describe)
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
    key = (device, *key, *types, *[x.stride() for x in moved])
    reusable = REUSES and bits % 16 == 0 and not tiles.are_forced() and not _is_watched()
    if reusable and (known := _known.get(key)) is not None:
        maps = _encode(known, moved, describe) if moved else ()
        stream = driver.active.get_current_stream(device)
        hooks = None, None, None  # and what they would be told
        # Of a tensor Triton would ask the driver whether it is on the device; of an address it does not.
        arguments = *maps, *addresses, *known.numbers
        known.run(*known.grid, stream, known.function, known.metadata, *hooks, *arguments)
        return None
    kernel, grid, numbers, options = prepare()
    descriptors = describe(*moved) if moved else ()
    compiled = kernel[grid](*descriptors, *pointers, *numbers, **options)
    if reusable:
        if len(_known) >= LIMIT:
            _known.clear()
        _known[key] = _known_of(compiled, grid, numbers, bool(moved))
    return None


def _known_of(compiled: object, grid: tuple[int, ...], numbers: tuple[object, ...], encodes: bool) -> Known:
    run, descriptors = compiled.run, ()
    if encodes:
        # Triton wraps its launcher in one that encodes the descriptors of every launch.
        run = copy.copy(run)
        run.launch = driver.active.utils.launch
        descriptors = compiled.metadata.tensordesc_meta
    return Known(run, grid, compiled.function, compiled.packed_metadata, numbers, descriptors, next(_serials))


def _encode(
    known: Known, moved: tuple[Tensor, ...], describe: Callable[..., tuple[object, ...]]
) -> list[object]:
    """The arguments that Triton's launcher makes of TMA descriptors, each encoded once for an address."""
    place = (known.serial, *[x.data_ptr() for x in moved])
    arguments = _encoded.get(place)
    if arguments is None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        described = zip(describe(*moved), known.descriptors, strict=True)
        arguments = [each for pair in described for each in make_tensordesc_arg(*pair)]
        if len(_encoded) >= LIMIT:
            _encoded.clear()
        _encoded[place] = arguments
    return arguments


def _is_watched() -> bool:
    """Whether someone, as a profiler, wants Triton to tell of launches."""
    runtime = triton.knobs.runtime
    # A chain of hooks has `calls`; of Triton's own it may be empty.
    return bool(
        getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
    )


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


def _block_strides(lists: Tensor | None) -> tuple[int, ...]:
    """From one batch and head to the next; 0 where they share a mask."""
    if lists is None:
        return 0, 0
    return tuple(0 if lists.shape[dim] == 1 else lists.stride(dim) for dim in (0, 1))
