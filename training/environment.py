"""The facts of environment.json: command, versions, device and commit, to trust or repeat a run's numbers by."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

# They affect speed or memory. Torch reads its allocator's by either name.
VARIABLES = ("OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_INTERPRET")
DRIVER = Path("/proc/driver/nvidia/version")


def environment(device: torch.device) -> dict[str, object]:
    """Command, versions, device and commit, as environment.json has them; None for what cannot be found out."""
    facts: dict[str, Callable[[], object]] = {
        "command": lambda: [Path(sys.executable).name, *sys.argv],
        "python": platform.python_version,
        "platform": platform.platform,
        "torch": lambda: torch.__version__,
        "triton": _triton_version,
        "device": lambda: str(device),
        "device_name": lambda: device_name(device),
        "cpu_count": os.cpu_count,
        "cpu_threads": torch.get_num_threads,
        "commit": _commit,
        **{name: partial(os.environ.get, name) for name in VARIABLES},
    }
    if device.type == "cuda":
        facts |= {
            "driver": _driver,
            "cuda": lambda: torch.version.cuda,
            "cudnn": torch.backends.cudnn.version,  # it raises where another version than torch's is loaded
            # The NCCL that is loaded. NCCL_VERSION, where an image sets it, is of the image's own.
            "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version())),
            "ptxas": _ptxas_version,
        }
    return {name: _or_none(fact) for name, fact in facts.items()}


def _or_none(fact: Callable[[], object]) -> object:
    """A record never ends a run."""
    try:
        return fact()
    except Exception:
        return None


def _triton_version() -> str:
    """The version of the Triton that is imported: the package metadata may be of another one, later on the path."""
    import triton

    return triton.__version__


def _ptxas_version() -> str:
    """The version of the ptxas that Triton calls, its own or TRITON_PTXAS_PATH's, on which register spills depend."""
    from triton import knobs

    return knobs.nvidia.ptxas.version


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({_cpu_name()})"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _output(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent, check=True
    )
    return done.stdout.strip()


def _commit() -> str:
    """The checkout's commit, with `+changes` where the working tree differs from it."""
    commit = _output("git", "rev-parse", "HEAD")
    return commit + ("+changes" if _output("git", "status", "--porcelain", "-uno") else "")


def _driver() -> str:
    """The driver's version, from its kernel module if possible: nvidia-smi took over 10 s with 96 processes."""
    words = DRIVER.read_text().split() if DRIVER.exists() else []
    if told := [word for word in words if re.fullmatch(r"\d+(\.\d+)+", word)]:
        return told[0]
    versions = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0]
