"""The two private parts of Triton that `launch` calls, and whether this release of Triton still has them unchanged.

Where one has changed, a line on stderr says which, and the launches that need it go through Triton's public launch.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import triton
from triton.runtime import driver

from .versions import remedy

# What the launcher of a compiled kernel takes before the kernel's arguments. (3.6 names the first five only.)
LAUNCHER = (
    *("gridX", "gridY", "gridZ", "stream", "function"),
    *("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"),
)
# Host time by which the public launch is slower; LOG.md says how it was measured.
COSTS = "at 6 us more of the host's time a launch, 40 to 140 if it has TMA descriptors"


def _says_what_moved(part: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Decorator of a check that `part` is as we know it: done once, reported if it fails."""

    def decorate(check: Callable[[], bool]) -> Callable[[], bool]:
        @functools.cache
        def known() -> bool:
            try:
                found = check()
            except (ImportError, AttributeError, ValueError):  # the part is not there at all
                found = False
            if not found:
                print(
                    f"tilegpt: triton {triton.__version__} has changed its {part}: launching without it, {COSTS} "
                    f"({remedy()})",
                    file=sys.stderr,
                )
            return found

        return known

    return decorate


@_says_what_moved("launcher (CudaLauncher.__call__)")
def can_launch() -> bool:
    """Whether `compiled.run(*grid, stream, function, metadata, None, None, None, *arguments)` launches."""
    from triton.backends.nvidia.driver import CudaLauncher

    _, *named, rest = inspect.signature(CudaLauncher.__call__).parameters.values()
    return tuple(each.name for each in named) == LAUNCHER[: len(named)] and rest.kind is rest.VAR_POSITIONAL


@_says_what_moved("encoding of TMA descriptors (make_tensordesc_arg, CudaLauncher.launch)")
def can_encode() -> bool:
    """Whether `encode` and `without_encoding` do what they say."""
    from triton.backends.nvidia.driver import CudaLauncher

    made, called = CudaLauncher.__init__.__code__.co_names, CudaLauncher.__call__.__code__.co_names
    return {"utils", "wrap_handle_tensordesc"} <= set(made) and "launch" in called and _ignored() is not None


@functools.cache
def _ignored() -> tuple[None, ...] | None:
    """What `make_tensordesc_arg` ignores after descriptor and metadata: nothing before 3.8, one argument since."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    first, *others = inspect.signature(make_tensordesc_arg).parameters
    return {("metadata",): (), ("metadata", "_"): (None,)}.get(tuple(others)) if first == "arg" else None


def encode(descriptor: object, metadata: dict[str, object]) -> list[object]:
    """What Triton's launcher passes to its C part for a TMA descriptor: the encoded map, shape and strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, metadata, *(_ignored() or ()))


def without_encoding(launcher: Any) -> Any:
    """The launcher of a compiled kernel, to be called with what `encode` returns in place of TMA descriptors."""
    launcher = copy.copy(launcher)
    launcher.launch = driver.active.utils.launch
    return launcher
