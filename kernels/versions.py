"""Which releases of torch and triton our kernels run with, and what to do about others: one line each.

    torch 2.11 and later, with the triton that it was built with; with another a line on stderr says so
    the Hopper kernels: a pair with which flash has passed its GPU tests; with others the portable kernels run

`python -m kernels.compile_report --with newest` compares these with the newest releases.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys

import torch

# torch -> the triton that it requires, from the oldest that pyproject.toml admits to the newest.
PAIRS = {
    "2.11": "3.6.0",
    "2.12.0": "3.7.0",
    "2.12": "3.7.1",  # its other releases
    "2.13": "3.7.1",
    "2.14": "3.8.0",
    "2.15": "3.9.0",
}
# Gluon is experimental and its API changes: with these the GPU tests of flash passed on a Hopper GPU (docs/gpu.md).
VERIFIED = {"2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0"}
# The Hopper kernels compile from this release on: hopper/primitives.py knows what has changed since.
OLDEST_GLUON = (3, 7)
# Said of what needs a GPU.
INTERPRET = " (TRITON_INTERPRET=1, set before triton is imported, interprets it, slowly)"


def numbers_of(version: str) -> tuple[int, ...]:
    """Major and minor of a version: (2, 13) of "2.13.0+cu130"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def kernels_lack() -> str | None:
    """What our Triton kernels would need of the installed torch and triton, or None. Imports triton.

    If the two may serve but are not a pair that we know, a line on stderr says so, once.
    """
    if lacking := no_triton():
        return lacking
    import triton

    oldest, (_, own) = next(iter(PAIRS)), _own_pair()
    if numbers_of(torch.__version__) < numbers_of(oldest):
        return f"torch {oldest} or newer, not {torch.__version__} (pip install -U torch)"
    if numbers_of(triton.__version__) < numbers_of(own):
        return f"triton {own} or newer with torch {torch.__version__}, not {triton.__version__} ({remedy()})"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    # Triton's own functions are what they were made when it was imported.
    if interpreted and isinstance(triton.language.cdiv, triton.JITFunction):
        return "TRITON_INTERPRET=1 to be set before triton is imported (in a notebook: restart, and set it first)"
    if interpreted and numbers_of(triton.__version__) < (3, 7):
        import numpy  # whose arrays that interpreter converts to numbers, to count a loop

        if numbers_of(numpy.__version__) >= (2, 4):
            return (
                f"numpy before 2.4 in the interpreter of triton {triton.__version__}, not {numpy.__version__} "
                "(pip install 'numpy<2.4')"
            )
    if not has_gluon():  # Triton's C extension imports it to specialise a launch, whatever the kernel
        return (
            f"a triton with Gluon, which this triton {triton.__version__} is without ({remedy(again=True)})"
        )
    if unknown := unknown_pair():
        say_once(f"tilegpt: {unknown}; the portable kernels run ({_install(_verified_pair())})")
    return None


def no_triton() -> str | None:
    """The triton that is needed if none can be imported, with the remedy; None if one can."""
    if importlib.util.find_spec("triton") is None:
        return f"triton, which is not installed ({remedy()})"
    try:
        import triton  # noqa: F401
    except (ImportError, OSError) as error:
        return f"triton, which cannot be imported: {_first_sentence(error)} ({remedy(again=True)})"
    return None


def unknown_pair() -> str | None:
    """What to say if torch and triton are not a pair that we know, without the remedy; or None. Imports triton."""
    import triton

    installed = torch.__version__, triton.__version__
    if [*map(numbers_of, installed)] == [*map(numbers_of, _own_pair())]:
        return None
    return "torch {} and triton {} are not known to work together".format(*installed)


def gluon_lacks() -> str | None:
    """What the Hopper kernels would need of a triton that the others run with, or None. Imports triton."""
    import triton

    if triton.__version__ not in VERIFIED.values():
        return f"triton {' or '.join(VERIFIED.values())}, not {triton.__version__} ({_install(_verified_pair())})"
    if VERIFIED.get(_minor(torch.__version__)) != triton.__version__:
        pair = f"torch {torch.__version__} and triton {triton.__version__}"
        return f"a pair that is verified, not {pair} ({_install(_verified_pair())})"
    return None


def has_gluon() -> bool:
    """Whether triton is installed, and Gluon in it."""
    try:
        return importlib.util.find_spec("triton.experimental.gluon") is not None
    except ModuleNotFoundError:  # not even triton.experimental
        return False


def no_cuda() -> str | None:
    """Why this torch has no CUDA device, with the remedy; None if it has one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        # With == pip would take +cpu again, where an index or a folder has it.
        again = f"pip install --force-reinstall torch==={_release()}"
        remedy = f"for one with it: {again}, from PyPI, not an index of CPU builds"
        return f"torch {torch.__version__} is built without CUDA ({remedy})"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        why = f"{_first_sentence(error)} (install or update the NVIDIA driver)"
        return f"torch {torch.__version__} finds no usable CUDA driver: {why}"
    return "torch sees no CUDA device (is CUDA_VISIBLE_DEVICES empty?)"


def cuda_not(device_type: str, how_else: str = "") -> str:
    """What a kernel that cannot run on such a device needs; for a CPU also why there is no CUDA device.

    how_else: how it runs there all the same, in parentheses.
    """
    because = f": {lacking}" if device_type == "cpu" and (lacking := no_cuda()) else ""
    return f"a CUDA device, not {device_type}{how_else}{because}"


def mismatched_libraries() -> str | None:
    """What is wrong with the CUDA libraries that this torch has loaded, with the remedy; None if nothing.

    If the runtime is older than torch's own but has all that torch loads, a line on stderr says so, once.
    """
    remedy = f"(pip install --force-reinstall torch=={_release()}, without LD_LIBRARY_PATH)"
    try:
        torch.backends.cudnn.version()  # compares with what torch was built with
    except RuntimeError as error:
        return f"{_first_sentence(error)} {remedy}"
    if older := _older_runtime():  # whatever it lacks fails later, or never
        say_once(
            f"tilegpt: torch {torch.__version__} has loaded the CUDA runtime {older}, older than its own {remedy}"
        )
    return None


def _older_runtime() -> str | None:
    """The version of the CUDA runtime that is loaded, if older than the one that torch was built with; or None."""
    built, loaded = numbers_of(torch.version.cuda or "0.0"), ctypes.c_int()
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{built[0]}", os.RTLD_NOLOAD)
    except (AttributeError, OSError):  # not Unix, or linked statically
        return None
    if runtime.cudaRuntimeGetVersion(ctypes.byref(loaded)):
        return None
    major, minor = loaded.value // 1000, loaded.value % 1000 // 10
    return f"{major}.{minor}" if (major, minor) < built else None


def remedy(again: bool = False) -> str:
    """The command that installs the triton of this torch, or the newest pair. again: over the same release too."""
    return _install(_own_pair(), again)


def _install(pair: tuple[str, str], again: bool = False) -> str:
    """The command that installs a pair; its torch only where this is another."""
    number, triton = pair
    also = "" if numbers_of(number) == numbers_of(torch.__version__) else f" torch=={number}.*"
    return f"pip install {'--force-reinstall ' * again}triton=={triton}{also}"


def _own_pair() -> tuple[str, str]:
    """This torch and the triton that it requires; for a release that is not in PAIRS, the newest pair."""
    names = _release(), _minor(torch.__version__)
    return next(((each, PAIRS[each]) for each in names if each in PAIRS), list(PAIRS.items())[-1])


def _verified_pair() -> tuple[str, str]:
    """The pair for the Hopper kernels that is nearest to this torch, and not older if there is one."""
    this, pairs = numbers_of(torch.__version__), list(VERIFIED.items())
    return next((pair for pair in pairs if numbers_of(pair[0]) >= this), pairs[-1])


def _release() -> str:
    return torch.__version__.partition("+")[0]


def _minor(version: str) -> str:
    return ".".join(map(str, numbers_of(version)))


@functools.cache
def say_once(line: str) -> None:
    """Print a line to stderr, once in a process."""
    print(line, file=sys.stderr)


def _first_sentence(error: Exception) -> str:
    return re.split(r"\.\s|\n", str(error))[0].rstrip(".")
