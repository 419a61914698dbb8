"""How a kernel gets onto the device, in microseconds.

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

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
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
    key: tuple[object, ...] | None,
    prepare: Callable[[], Launch],
    moved: tuple[Tensor, ...] = (),
    describe: Callable[..., tuple[object, ...]] | None = None,
) -> None:
    """Launch a kernel on the current stream of the device of the first pointer.

    Args:
        pointers: its first arguments, but for the TMA descriptors, which are before them.
        key: all that `prepare` and `describe` depend on, but for the types of `pointers` and the strides of `moved`;
            None: this launch is not to be remembered.
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
    reusable = REUSES and key is not None and bits % 16 == 0 and not _is_watched()
    if reusable:
        key = (device, *key, *types, *[x.stride() for x in moved])
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


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
