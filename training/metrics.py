"""What a run measures of itself: tokens per second, step time, MFU and peak memory."""

from __future__ import annotations

import gc
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from .distributed import World

# Dense bf16/fp16 tensor-core peak in TFLOP/s, no sparsity, from the vendors' datasheets. The words must begin what
# torch.cuda.get_device_name() says after "NVIDIA" and "GeForce"; the first that do count. A device that is not here
# gets no MFU rather than a wrong one.
PEAK_TFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "GH200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "A10G": 70,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
# Same words, another chip or a part of one.
OTHER_CHIPS = {"MIG", "Laptop", "D", "Ti", "SUPER", "Max"}


def peak_flops(device: torch.device) -> float | None:
    """Dense half-precision peak of `device` in FLOP/s, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).replace("-", " ")
    words = [word for word in name.split() if word not in {"NVIDIA", "GeForce"}]
    if OTHER_CHIPS & set(words):
        return None
    for known, tflops in PEAK_TFLOPS.items():
        if words[: len(known.split())] == known.split():
            return tflops * 1e12
    return None


@dataclass
class Throughput:
    """Tokens per second between two synchronised clock reads, without warm-up, evaluation and checkpoints.

    `mark` closes a window at a step; `resume` starts the next one, and drops what came since the last mark.
    """

    world: World
    # Steps that compile, allocate and pick algorithms.
    warmup_steps: int = 3
    _started: float | None = None
    _window_steps: int = 0
    total_steps: int = 0
    total_seconds: float = 0.0

    def step(self) -> None:
        """Count one optimizer step, just done or at least queued on the device."""
        if self.warmup_steps:
            self.warmup_steps -= 1
            if not self.warmup_steps:
                self.resume()
        else:
            self._window_steps += 1

    def mark(self) -> float | None:
        """Seconds per step since the last mark, with the device synchronised; None without a measured step."""
        if not self._window_steps:
            return None
        self.world.synchronize()
        now = time.perf_counter()
        seconds, steps = now - self._started, self._window_steps
        self.total_seconds += seconds
        self.total_steps += steps
        self._started, self._window_steps = now, 0
        return seconds / steps

    def resume(self) -> None:
        """Start the clock anew, after warm-up or after work that is not training."""
        self.world.synchronize()
        self._started, self._window_steps = time.perf_counter(), 0

    @property
    def seconds_per_step(self) -> float | None:
        """The mean over every measured window."""
        return self.total_seconds / self.total_steps if self.total_steps else None


def performance(
    seconds_per_step: float | None, tokens_per_step: int, flops_per_token: int, world: World
) -> dict[str, float]:
    """The perf/ metrics of a step time.

    perf/mfu is model FLOP/s over the devices' dense half-precision peak. Model FLOPs per token are
    6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B): full attention, no discount for causality, no recompute.
    """
    if seconds_per_step is None:
        return {}
    tokens_per_second = tokens_per_step / seconds_per_step
    metrics = {"perf/step_ms": seconds_per_step * 1e3, "perf/tokens_per_second": tokens_per_second}
    if peak := peak_flops(world.device):
        metrics["perf/mfu"] = tokens_per_second * flops_per_token / (peak * world.size)
    return metrics


def reset_peak_memory(device: torch.device) -> None:
    """Free what an earlier run of this process (a sweep's) left, so that the peak is this run's."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with suppress(OSError):  # without /proc the peak stays the process's
            Path("/proc/self/clear_refs").write_text("5")


def memory(device: torch.device) -> dict[str, float]:
    """Peak memory in GiB: the allocator's on CUDA, the process's resident set on a CPU."""
    if device.type == "cuda":
        return {
            "perf/peak_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "perf/peak_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        }
    return {"perf/peak_resident_gib": _peak_resident_bytes() / 2**30}


def _peak_resident_bytes() -> int:
    """Of this process since it began or reset_peak_memory. Linux's ru_maxrss would count a larger parent's."""
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
