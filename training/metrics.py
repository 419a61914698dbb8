"""The perf/ metrics: tokens per second, the time of a step and its phases, MFU, peak memory, the slowest rank."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch

from .distributed import World

# Dense bf16/fp16 tensor-core peak in TFLOP/s, no sparsity, from the vendors' datasheets. A device matches
# the first entry whose words its name begins with, "NVIDIA" and "GeForce" left out. A device that is not listed gets
# no MFU rather than a wrong one.
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
# A device with one of these words in its name is another chip than the entry's, or a part of one.
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


Batch = TypeVar("Batch")


class Throughput:
    """Measures the time of a step and of its phases, without warm-up, evaluation and checkpoints.

    A window: consecutive steps between two synchronised clock reads, so phases need no synchronisation of their own
    (see Phases). `mark` ends one and starts the next; `resume` starts anew, and drops the steps since the last mark.

    Times are dicts of mean seconds a step: `step`, and as parts of it `data` (until a batch is on the device),
    `forward_backward`, `blocks` (a sharded model's, in which no rank waits for parts), `attention` (where ranks share
    sequences and wait for each other, not with CUDA graphs; perf/ counts this and `blocks` as forward_backward),
    `exchange` (of gradients and parts, where nothing hides it: `replicated`, `time_blocks`) and `optimizer` (with
    unscaling and clipping). The remainder is logging and the loop itself.
    """

    def __init__(self, world: World, warmup_steps: int = 3) -> None:
        self.world = world
        # Steps that compile, allocate and pick algorithms.
        self.warmup_steps = warmup_steps
        self.total_steps = 0
        self.windows: list[float] = []  # seconds a step of each
        self._totals: Counter[str] = Counter()  # seconds
        self._window_steps = 0
        self._started = 0.0
        self._phases = Phases(world.device)

    def waiting(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on: the time until each arrives counts as `data`, what follows as `forward_backward`."""
        self._phases.begin("data")
        for batch in batches:
            self._phases.begin("forward_backward")
            yield batch
            self._phases.begin("data")

    def begins(self, phase: str) -> None:
        """Count the time from now on as `phase`, until another begins or the step ends."""
        self._phases.begin(phase)

    def attends(self) -> AbstractContextManager[None]:
        """Context: its time counts as `attention`, if it is part of a step; what follows, as the phase before."""
        return self._phases.within("attention")

    def step(self) -> None:
        """Count one optimizer step, just done or at least queued on the device."""
        self._phases.end()
        if self.warmup_steps:
            self.warmup_steps -= 1
            if not self.warmup_steps:
                self.resume()
        else:
            self._window_steps += 1

    def mark(self) -> dict[str, float] | None:
        """Times since the last mark, with the device synchronised; None without a measured step."""
        if not self._window_steps:
            return None
        self.world.synchronize()
        now = time.perf_counter()
        seconds, steps = {"step": now - self._started, **self._phases.read()}, self._window_steps
        self._totals.update(seconds)
        self.total_steps += steps
        self.windows.append(seconds["step"] / steps)
        self._started, self._window_steps = now, 0
        return {name: total / steps for name, total in seconds.items()}

    def resume(self) -> None:
        """Start the clock anew, after warm-up or after work that is not training."""
        self.world.synchronize()
        self._phases.read()
        self._started, self._window_steps = time.perf_counter(), 0

    @property
    def mean(self) -> dict[str, float] | None:
        """Times over every measured window."""
        return {name: total / self.total_steps for name, total in self._totals.items()} or None


class Phases:
    """Seconds by phase; a phase lasts from its `begin` to the next `begin` or `end`.

    On CUDA a phase is time on the stream: an event is recorded where it begins, and the host does not wait. `data` is
    then the time the device lost waiting for data, not the time the host waited while the device was busy. On a CPU
    it is the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._stamps: list[tuple[str | None, torch.cuda.Event | float]] = []
        self._spare: list[torch.cuda.Event] = []

    def begin(self, phase: str) -> None:
        self._stamps.append((phase, self._now()))

    def end(self) -> None:
        """Count the time from now on as no phase."""
        self._stamps.append((None, self._now()))

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Context: `phase` inside another, which then goes on. Outside any, as in an evaluation, nothing counts."""
        outer = self._stamps[-1][0] if self._stamps else None
        if outer:
            self.begin(phase)
        yield
        if outer:
            self.begin(outer)

    def read(self) -> dict[str, float]:
        """Seconds by phase since the last read. The device must have been synchronised since the last `end`."""
        seconds: Counter[str] = Counter()
        for (phase, start), (_, stop) in pairwise(self._stamps):
            if phase:
                seconds[phase] += start.elapsed_time(stop) / 1e3 if self._on_gpu else stop - start
        if self._on_gpu:
            self._spare += [event for _, event in self._stamps]
        self._stamps.clear()
        return dict(seconds)

    def _now(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def performance(
    seconds: dict[str, float] | None, tokens_per_step: int, flops_per_token: int, world: World
) -> dict[str, float]:
    """The perf/ metrics of a step's times (see Throughput).

    perf/mfu is model FLOP/s over the devices' dense half-precision peak. Model FLOPs per token are
    6 N + 12 L H Q T (PaLM, arXiv 2204.02311, appendix B): full attention, no discount for causality, no recompute.
    """
    if seconds is None:
        return {}
    tokens_per_second = tokens_per_step / seconds["step"]
    seconds = dict(seconds)
    for inner in {"blocks", "attention"} & seconds.keys():
        seconds["forward_backward"] += seconds.pop(inner)
    metrics = {f"perf/{name}_ms": each * 1e3 for name, each in seconds.items()}
    metrics["perf/tokens_per_second"] = tokens_per_second
    if world.size > 1:
        metrics["perf/tokens_per_second_per_device"] = tokens_per_second / world.size
    if peak := peak_flops(world.device):
        metrics["perf/mfu"] = tokens_per_second * flops_per_token / (peak * world.size)
    return metrics


def slowest_rank(seconds: dict[str, float] | None, world: World) -> dict[str, float]:
    """Which of several ranks computes longest, and how many times as long as the median one. All ranks call it."""
    if world.size == 1 or seconds is None:
        return {}
    # Phases in which a rank does not wait for another's gradients, parts of the model, or keys and values.
    computing = world.gather(seconds["data"] + seconds.get("blocks", seconds["forward_backward"]))
    longest = max(computing)
    ratio = longest / statistics.median_low(computing)
    return {"perf/slowest_rank": computing.index(longest), "perf/slowest_rank_ratio": ratio}


def reset_peak_memory(device: torch.device) -> None:
    """Free the memory of an earlier run in this process (in a sweep), so that the peak is this run's."""
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
    """The process's peak, from its start or reset_peak_memory on. Linux's ru_maxrss would count a larger parent's."""
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
