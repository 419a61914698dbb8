"""Launching Triton kernels with a few microseconds of host time.

Triton inspects every argument of a launch in Python to select the compiled kernel. A launch that agrees with an
earlier one in everything that Triton specialises on goes straight to that kernel instead (LOG.md has the savings),
provided that Triton's private parts are those that `triton_private` knows.
"""

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver

from .triton_private import can_encode, can_launch, encode, without_encoding

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# On AMD, Triton also specialises on the size of a tensor.
REUSES = not INTERPRETED and torch.version.hip is None and can_launch()
Tensor = torch.Tensor
# All figures, for accuracy and for time, were taken with multiplications fused with additions. Triton 3.10 will do so
# only on request; 3.9 warns of it.
FUSION = {"enable_fp_fusion": True}

# (kernel, 3-d grid, arguments after the pointers, Triton options)
Launch = tuple[triton.runtime.KernelInterface, tuple[int, int, int], tuple[object, ...], dict[str, Any]]
Pointers = tuple[Tensor, *tuple[Tensor | None, ...]]


class Known(NamedTuple):
    """A cached launch that can be repeated with other addresses."""

    run: Callable[..., None]  # Triton's launcher; takes grid, stream, function, metadata, hooks, arguments
    grid: tuple[int, int, int]
    function: int
    metadata: tuple[int, ...]
    numbers: tuple[object, ...]
    descriptors: tuple[dict[str, object], ...]  # Triton's metadata of each TMA descriptor
    serial: int  # unique


_known: dict[tuple[object, ...], Known] = {}
# (serial of a Known, addresses) -> its encoded TMA descriptors: a model's layers differ only in addresses, which
# recur in every step. 1 KB each.
_encoded: dict[tuple[int, ...], list[object]] = {}
LIMIT = 4096  # entries in either; an evicted one only costs a slow launch
_serials = itertools.count()


def launch(
    pointers: Pointers,
    key: tuple[object, ...] | None,
    prepare: Callable[[], Launch],
    moved: tuple[Tensor, ...] = (),
    describe: Callable[..., tuple[object, ...]] = lambda: (),
) -> None:
    """Launch a kernel on the current stream of the device of the first pointer.

    Args:
        pointers: its first arguments after the TMA descriptors; None for an absent tensor.
        key: everything that `prepare` and `describe` depend on, besides the dtypes of `pointers` and the strides of
            `moved`; None: do not cache this launch.
        prepare: returns what to launch; not called when the launch is cached.
        moved: the tensors that TMA moves, 16-byte aligned. describe: returns their descriptors.
    """
    device = pointers[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton uses the current device; -1 is the CPU
            return launch(pointers, key, prepare, moved, describe)
    # Triton specialises on dtypes, and on whether pointers and integers are multiples of 16. Here integers are
    # compared by value, and launches with a pointer that is not a multiple of 16 are left to Triton.
    types: list[torch.dtype | None] = []
    addresses: list[int | None] = []
    bits = 0
    for tensor in pointers:
        if tensor is None:
            types.append(None)
            addresses.append(None)
        else:
            types.append(tensor.dtype)
            address = tensor.data_ptr()
            addresses.append(address)
            bits |= address
    cache_key = None
    if REUSES and key is not None and bits % 16 == 0 and not _is_watched() and (not moved or can_encode()):
        cache_key = (device, *key, *types, *[x.stride() for x in moved])
        if (known := _known.get(cache_key)) is not None:
            maps = _encode(known, moved, describe) if moved else ()
            stream = driver.active.get_current_stream(device)
            hooks = None, None, None  # enter and exit hooks, and their metadata
            # Addresses, not tensors: for a tensor, Triton asks the driver whether it is on the device.
            arguments = *maps, *addresses, *known.numbers
            known.run(*known.grid, stream, known.function, known.metadata, *hooks, *arguments)
            return None
    kernel, grid, numbers, options = prepare()
    descriptors = describe(*moved) if moved else ()
    compiled = kernel[grid](*descriptors, *pointers, *numbers, **FUSION, **options)
    if cache_key is not None:
        if len(_known) >= LIMIT:
            _known.clear()
        _known[cache_key] = _known_of(compiled, grid, numbers, bool(moved))
    return None


def _known_of(compiled: Any, grid: tuple[int, int, int], numbers: tuple[object, ...], encodes: bool) -> Known:
    run, descriptors = compiled.run, ()
    if encodes:
        run = without_encoding(run)  # Triton encodes the descriptors in every launch
        descriptors = compiled.metadata.tensordesc_meta
    return Known(run, grid, compiled.function, compiled.packed_metadata, numbers, descriptors, next(_serials))


def _encode(
    known: Known, moved: tuple[Tensor, ...], describe: Callable[..., tuple[object, ...]]
) -> list[object]:
    """The launcher arguments for the TMA descriptors, encoded once per set of addresses."""
    cache_key = (known.serial, *[x.data_ptr() for x in moved])
    arguments = _encoded.get(cache_key)
    if arguments is None:
        described = zip(describe(*moved), known.descriptors, strict=True)
        arguments = [each for pair in described for each in encode(*pair)]
        if len(_encoded) >= LIMIT:
            _encoded.clear()
        _encoded[cache_key] = arguments
    return arguments


def _is_watched() -> bool:
    """Whether launch hooks are installed, for example by a profiler."""
    runtime = triton.knobs.runtime
    # A hook chain has `calls`, which is empty for Triton's default.
    return bool(
        getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
    )


@functools.cache
def sm_count(device: torch.device) -> int:
    """Number of streaming multiprocessors (SMs); 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
