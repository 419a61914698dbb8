"""Where a run ran: the facts a reader needs to trust or repeat its numbers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch


def environment(device: torch.device) -> dict[str, object]:
    """Command, versions, device and commit, as environment.json has them."""
    record: dict[str, object] = {
        "command": [Path(sys.executable).name, *sys.argv],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "device": str(device),
        "device_name": device_name(device),
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "commit": _commit(),
        # Environment variables that affect how fast it ran.
        **{name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "TRITON_INTERPRET")},
    }
    if device.type == "cuda":
        record |= {"driver": _driver(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        record["ptxas"] = _ptxas_version()
    return record


def _triton_version() -> str | None:
    """Of the Triton that is imported: the metadata may be that of another one, later on the path."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _ptxas_version() -> str | None:
    """Of the assembler that Triton calls, its own or TRITON_PTXAS_PATH's: registers and spills depend on it."""
    try:
        from triton import knobs

        return knobs.nvidia.ptxas.version
    except (ImportError, AttributeError, RuntimeError):
        return None


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


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _commit() -> str | None:
    """The checkout's commit, with `+changes` where the working tree differs from it."""
    commit = _output("git", "rev-parse", "HEAD")
    return commit and commit + ("+changes" if _output("git", "status", "--porcelain", "-uno") else "")


def _driver() -> str | None:
    versions = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions and versions.splitlines()[0]
