"""How everything here is timed: by the device's own clock, with inputs that are not in cache, contenders in turns.

A measured call is a generator: what runs before its first `yield` is the first phase, and so on, so that one loop
times forward and backward separately. On CUDA, events on the stream separate the phases, and the device is kept
asleep until the host has queued them all. So the kernels are timed, not the Python that launches them, as in the
papers' benchmarks, which queue one call after another. If the device wakes before everything is queued, the times
may include waiting for the host: the round is measured again after a longer sleep, and counted as late if even the
longest sleep is too short.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

# A generator of phases. Its argument, the number of the turn, selects one of the rotating inputs and seeds dropout.
Call = Callable[[int], Iterator[None]]
# Clock cycles that the device sleeps before a call: about 2 ms, enough for Python to queue most calls. Queuing
# FlexAttention's forward and backward at 4096 tokens took some 4 ms.
HEAD_START = 4_000_000
CLOCK_QUERY = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu,clocks_event_reasons.active"


class Timed(NamedTuple):
    """What was measured.

    Attributes:
        ms: milliseconds of every phase in every round of each call: name -> phases -> rounds.
        late: name -> the number of rounds that the host queued too slowly, whose times may include waiting for it;
            calls without such rounds are left out. A call with more kernels than CUDA's queue holds (about a
            thousand) is always late.
    """

    ms: dict[str, list[list[float]]]
    late: dict[str, int]


def time_alternating(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    seconds: float,
    warmup: int = 3,
    rounds: tuple[int, int] = (5, 100),
    patience: int = 8,
) -> Timed:
    """Time every phase of each call.

    The calls take turns within a round, so that a change of the clock frequency affects all of them alike. No two
    turns have the same number, so that a call does not find in the cache the inputs that the one before it has read.

    Args:
        calls: what to time.
        seconds: time budget per call. Measuring stops once seconds * len(calls) have passed, but not before rounds[0]
            rounds, and after rounds[1] at the latest.
        warmup: unmeasured rounds at the start; fewer, but at least one, once they have taken the same budget.
        patience: the longest sleep before a call, in units of HEAD_START; the sleep doubles whenever the host was
            late. At 1 no round is repeated, for whole training steps, where waiting for a slow host counts.
    """
    samples: dict[str, list[list[float]]] = {}
    late: Counter[str] = Counter()
    # A call that was late once will be late again, so it keeps the longer sleep in the rounds that follow.
    sleeps = dict.fromkeys(calls, HEAD_START)
    turns = itertools.count()
    began = time.perf_counter()
    for _ in range(warmup):
        for call in calls.values():
            _phases(call, next(turns), device, HEAD_START)
        if time.perf_counter() - began > seconds * len(calls):
            break
    began = time.perf_counter()
    for done in range(rounds[1]):
        if done >= rounds[0] and time.perf_counter() - began > seconds * len(calls):
            break
        for name, call in calls.items():
            phases, was_late = _phases(call, next(turns), device, sleeps[name])
            while was_late and sleeps[name] < patience * HEAD_START:
                sleeps[name] *= 2
                phases, was_late = _phases(call, next(turns), device, sleeps[name])
            late[name] += was_late
            kept = samples.setdefault(name, [[] for _ in phases])
            for values, milliseconds in zip(kept, phases, strict=True):
                values.append(milliseconds)
    return Timed(samples, {name: times for name, times in late.items() if times})


def _phases(call: Call, number: int, device: torch.device, sleep: int) -> tuple[list[float], bool]:
    """Milliseconds of each phase of one call, and whether it was late: the device woke before all was queued."""
    if device.type != "cuda":
        stamps = [time.perf_counter()]
        for _ in call(number):
            stamps.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(stamps)], False
    torch.cuda._sleep(sleep)
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    for _ in call(number):
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    late = events[0].query()
    events[-1].synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)], late


def input_sets(bytes_per_set: int, device: torch.device) -> int:
    """How many sets of inputs to rotate so that each has left the L2 cache by the time it is used again."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(64, -(-2 * cache // bytes_per_set)))


def spread(samples: list[float]) -> dict[str, float]:
    """Median and quartiles, to four significant digits."""
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    return dict(zip(("low", "median", "high"), (float(f"{value:.4g}") for value in quartiles), strict=True))


def matrix_rate(dtype: torch.dtype, device: torch.device, size: int) -> float:
    """FLOP/s of a size^3 matrix product on random data: the reference for shares of the matrix rate."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def call(number: int) -> Iterator[None]:
        a @ b
        yield

    milliseconds = time_alternating({"matmul": call}, device, seconds=1.0).ms["matmul"][0]
    return 2 * size**3 / (1e-3 * statistics.median(milliseconds))


def copy_rate(device: torch.device, size: int) -> float:
    """Memory bandwidth of a copy of `size` bytes, in bytes/s read plus written."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def call(number: int) -> Iterator[None]:
        target.copy_(source)
        yield

    milliseconds = time_alternating({"copy": call}, device, seconds=0.5).ms["copy"][0]
    return 2 * size / (1e-3 * statistics.median(milliseconds))


def clocks(device: torch.device) -> str | None:
    """nvidia-smi's current clocks (MHz), power, temperature and throttling; None without it. Changes nothing."""
    if device.type != "cuda":
        return None
    # By UUID: nvidia-smi numbers all GPUs, PyTorch only those in CUDA_VISIBLE_DEVICES.
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ["nvidia-smi", f"--query-gpu={CLOCK_QUERY}", "--format=csv", f"--id=GPU-{uuid}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    names, values = (line.split(", ") for line in done.stdout.strip().splitlines()[:2])
    return "; ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """The most bytes that tensors created inside `function` held at one time.

    On CUDA: the allocator's peak minus what was allocated before the call. On a CPU: the same, from the allocations
    and releases that torch's profiler records; cyclic garbage of earlier calls is collected first.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    gc.disable()
    try:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            function()
    finally:
        gc.enable()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
