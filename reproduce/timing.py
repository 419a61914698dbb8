"""How everything here is timed, and how two times are compared.

A measured call is a generator: what runs before its first `yield` is the first phase, and so on, so that one loop
times forward and backward separately. On CUDA, events on the stream separate the phases, and the device is kept
asleep until the host has queued them all. So the kernels are timed, not the Python that launches them, as in the
papers' benchmarks, which queue one call after another. If the device wakes before everything is queued, the times
may include waiting for the host: the round is measured again after a longer sleep, and counted as late if even the
longest sleep is too short.

Contenders take turns in an order drawn anew for each round, on inputs that are not in cache, while clock and power
are recorded. A process times each of them at least 20 times, and three processes do so, each on a GPU of its own or
one after another. What is stated is the median of the processes' medians with their range, and "faster" only where
ranges do not overlap (`versus`).
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import random
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from .experiment import Options, Results, Sample, pick

# A generator of phases. Its argument, the number of the turn, selects one of the rotating inputs and seeds dropout.
Call = Callable[[int], Iterator[None]]
# Clock cycles that the device sleeps before a call: about 2 ms, enough for Python to queue most calls. Queuing
# FlexAttention's forward and backward at 4096 tokens took some 4 ms.
HEAD_START = 4_000_000
MOST_ROUNDS = 100
# A call is steady, and takes no more than the least number of rounds, when the middle half of its rounds lies within
# this share of their median: that of 20 rounds is then certain to 0.4 %.
STEADY = 0.02
# nvidia-smi's name of what is recorded while something is timed -> ours.
RECORDED = {"clocks.sm": "sm_mhz", "power.draw": "watts", "temperature.gpu": "celsius"}
RECORD_EVERY_MS = 200
FASTER, SLOWER, LEVEL = "faster", "slower", "level"


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


def race(
    calls: Mapping[str, Call], options: Options, phases: tuple[str, ...] = ("all",), **how: Any
) -> Sample:
    """Time calls in turns, as the experiment's settings say: {"ms": {name: {phase: [...]}}, "late", "clocks"}.

    Args:
        phases: of the calls; what has the same name is added up, and a call of a single phase has the first.
        how: other arguments of `time_alternating`.
    """
    settings = options.settings
    how = {"rounds": (settings.rounds, max(settings.rounds, MOST_ROUNDS)), **how}
    if options.tiny:
        how["warmup"] = 0
    with recorded(options.device) as clocks:
        raced = time_alternating(calls, options.device, seconds=settings.seconds, seed=options.process, **how)
    milliseconds: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
    for name, found in raced.ms.items():
        for phase in dict.fromkeys(phases[: len(found)]):
            own = [each for each, its in zip(found, phases, strict=False) if its == phase]
            milliseconds[name][phase] = [float(f"{math.fsum(ms):.5g}") for ms in zip(*own, strict=True)]
    return {"ms": milliseconds, "late": raced.late, "clocks": clocks}


def time_alternating(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    seconds: float,
    warmup: int = 3,
    rounds: tuple[int, int] = (20, MOST_ROUNDS),
    patience: int = 8,
    seed: int = 0,
) -> Timed:
    """Time every phase of each call.

    The calls take turns within a round, so that a change of the clock frequency affects all of them alike, and in
    another order each round, so that none always follows the same one. No two turns have the same number, so that a
    call does not find in the cache the inputs that the one before it has read.

    Args:
        calls: what to time.
        seconds: time budget per call. Measuring stops once seconds * len(calls) have passed or all calls are steady,
            but not before rounds[0] rounds, and after rounds[1] at the latest.
        warmup: unmeasured rounds at the start; fewer, but at least one, once they have taken the same budget.
        patience: the longest sleep before a call, in units of HEAD_START; the sleep doubles whenever the host was
            late. At 1 no round is repeated, for whole training steps, where waiting for a slow host counts.
        seed: of the order within the rounds; another for each process.
    """
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    late: Counter[str] = Counter()
    # A call that was late once will be late again, so it keeps the longer sleep in the rounds that follow.
    sleeps = dict.fromkeys(calls, HEAD_START)
    turns = itertools.count()
    order = random.Random(seed)
    began = time.perf_counter()
    for _ in range(warmup):
        for call in calls.values():
            _phases(call, next(turns), device, HEAD_START)
        if time.perf_counter() - began > seconds * len(calls):
            break
    began = time.perf_counter()
    for done in range(rounds[1]):
        spent = time.perf_counter() - began > seconds * len(calls)
        if done >= rounds[0] and (spent or all(map(steady, samples.values()))):
            break
        for name in order.sample(list(calls), len(calls)):
            phases, was_late = _phases(calls[name], next(turns), device, sleeps[name])
            while was_late and sleeps[name] < patience * HEAD_START:
                sleeps[name] *= 2
                phases, was_late = _phases(calls[name], next(turns), device, sleeps[name])
            late[name] += was_late
            samples[name] = samples[name] or [[] for _ in phases]
            for values, milliseconds in zip(samples[name], phases, strict=True):
                values.append(milliseconds)
    return Timed(samples, {name: times for name, times in late.items() if times})


def steady(phases: list[list[float]]) -> bool:
    """Whether the rounds of a call are alike; see STEADY."""
    rounds = list(map(sum, zip(*phases, strict=True)))
    if len(rounds) < 4:
        return False
    low, median, high = statistics.quantiles(rounds, n=4)
    return high - low <= STEADY * median


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


# ---- what was timed ----------------------------------------------------------------------------------


class Times(tuple[float, ...]):
    """The median of the rounds of each process, in milliseconds; or ratios of two such, process by process."""

    @property
    def median(self) -> float:
        return statistics.median(self)

    @property
    def low(self) -> float:
        return min(self)

    @property
    def high(self) -> float:
        return max(self)

    def __truediv__(self, other: Times) -> Times:
        return Times(a / b for a, b in zip(self, other, strict=False))  # of a cut run, one may have more

    def inverse(self, scale: float = 1.0) -> Times:
        """A rate: `scale` over each time."""
        return Times(scale / each for each in self)

    @classmethod
    def mean(cls, ratios: Iterable[Times]) -> Times:
        """Their geometric mean, process by process."""
        return cls(map(statistics.geometric_mean, zip(*ratios, strict=False)))

    def below(self, other: Times) -> bool:
        """Whether this range between processes ends before the other begins; one process has no range: never."""
        return not (self.alone or other.alone) and self.high < other.low

    @property
    def alone(self) -> str:
        """What is said behind a figure of one process, which has no range."""
        return " (one process)" * (len(self) == 1)

    def ranging(self, form: str = "{:.2f}x") -> str:
        """The median and, of several processes, the range where it shows at these digits; then a unit, if the form
        has one behind a space."""
        number, *unit = form.split(" ")
        median, low, high = (number.format(each) for each in (self.median, self.low, self.high))
        return " ".join([median if low == high else f"{median} ({low} to {high})", *unit])

    def shown(self, form: str = "{:.2f}x") -> str:
        """The same, as a figure that stands alone: of one process it says so."""
        return self.ranging(form) + self.alone


def versus(ours: Times, theirs: Times) -> str:
    """FASTER or SLOWER where the ranges between processes do not overlap, else LEVEL. Nothing else decides this."""
    if ours.below(theirs):
        return FASTER
    return SLOWER if theirs.below(ours) else LEVEL


def timed(results: Results, **where: Any) -> list[Sample]:
    """The timings at the coordinates `where`, one for each workload, in order of length where they have one.

    Their "ms" are {name: {phase: [a process's rounds, ...]}} of the contenders that every process timed; "late" as in
    `Timed`, of all processes; "again" a set: of a point that was cut, a later commit may have timed the last process;
    "alone" a set, too: those that were timed after the others (`training`).
    """
    merged: dict[tuple[Any, ...], Sample] = {}
    for sample in sorted(pick(results, **where), key=lambda sample: sample.get("process", 0)):
        coordinates = {key: value for key, value in sample.items() if key not in MEASURED}
        found = merged.setdefault(
            tuple(map(str, coordinates.items())),
            {**coordinates, "late": Counter(), "again": set(), "alone": set(), "turns": []},
        )
        found["turns"].append(sample["ms"])
        found["late"].update(sample.get("late", {}))
        found["again"].add(sample.get("again"))
        found["alone"].update(sample.get("alone", ()))
    for sample in merged.values():
        first, *others = sample.pop("turns")
        sample["ms"] = {
            name: {phase: [each[name][phase] for each in (first, *others)] for phase in phases}
            for name, phases in first.items()
            if all(name in each for each in others)
        }
    return sorted(merged.values(), key=lambda sample: sample.get("length", 0))


MEASURED = ("ms", "late", "clocks", "errors", "logit_errors", "process", "again", "alone", "beside")


def took(sample: Sample, name: str, phase: str = "both") -> Times | None:
    """The medians of a contender in a sample of `timed`; None if it has no such contender.

    phase: one of the call's; "both": all of them together.
    """
    phases = sample["ms"].get(name)
    if phases is None:
        return None
    chosen = list(phases.values()) if phase == "both" else [phases[phase]]
    return Times(
        statistics.median(map(sum, zip(*process, strict=True))) for process in zip(*chosen, strict=True)
    )


def waited(sample: Sample, name: str) -> bool:
    """Whether the device waited for the host in more than a quarter of the contender's rounds."""
    rounds = sum(map(len, next(iter(sample["ms"][name].values()))))
    return 4 * sample["late"][name] > rounds


def fastest(sample: Sample, names: tuple[str, ...], phase: str = "both") -> tuple[str, Times] | None:
    """The contender of least median among those of `names` that were timed, and its times."""
    found = {name: times for name in names if (times := took(sample, name, phase))}
    return min(found.items(), key=lambda item: item[1].median) if found else None


def medians(samples: list[Sample], name: str) -> dict[int, float]:
    """Length -> milliseconds of a contender, of the samples that have it."""
    return {sample["length"]: times.median for sample in samples if (times := took(sample, name))}


def gain(sample: Sample, over: str, under: str, phase: str = "both") -> Times | None:
    """How many times as long the contender `over` takes as `under`; None if one of them was not timed."""
    theirs, ours = took(sample, over, phase), took(sample, under, phase)
    return theirs / ours if theirs and ours else None


def gains(
    results: Results, over: str, under: str, phase: str = "both", **where: Any
) -> list[tuple[Sample, Times]]:
    """The timings at the coordinates `where` that have both contenders, each with its `gain`."""
    return [
        (sample, found) for sample in timed(results, **where) if (found := gain(sample, over, under, phase))
    ]


# ---- the device --------------------------------------------------------------------------------------


@contextmanager
def recorded(device: torch.device) -> Iterator[dict[str, list[float]]]:
    """Record clock, power and temperature during the block: {quantity: [least, median, most]}, filled at its end.

    nvidia-smi does it, in a process of its own, which does not disturb the host. Also the host's load average before
    and after, by which to see whether something else ran too. Empty without a GPU. Changes nothing.
    """
    found: dict[str, list[float]] = {}
    if device.type != "cuda" or not shutil.which("nvidia-smi"):
        yield found
        return
    found["host_load"] = [round(os.getloadavg()[0], 1)]
    # By UUID: nvidia-smi numbers all GPUs, PyTorch only those in CUDA_VISIBLE_DEVICES.
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ["nvidia-smi", f"--query-gpu={','.join(RECORDED)}", "--format=csv,noheader,nounits"]
    query += [f"--id=GPU-{uuid}"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen([*query, f"--loop-ms={RECORD_EVERY_MS}"], **how)
    try:
        yield found
    finally:
        found["host_load"].append(round(os.getloadavg()[0], 1))
        process.terminate()
        rows = [row for row in map(_numbers, process.communicate()[0].splitlines()) if row]
        if not rows:  # the block was over before the first was printed
            with suppress(subprocess.TimeoutExpired):  # beside 96 processes it told nothing within 10 s
                done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
                rows = [row for row in map(_numbers, done.stdout.splitlines()) if row]
        for name, values in zip(RECORDED.values(), zip(*rows, strict=True), strict=False):
            found[name] = [min(values), statistics.median(values), max(values)]


def _numbers(line: str) -> list[float]:
    """The numbers of a whole line of nvidia-smi; none if it was cut, or has one that the GPU does not tell."""
    try:
        numbers = [float(each) for each in line.split(",")]
    except ValueError:
        return []
    return numbers if len(numbers) == len(RECORDED) else []


def input_sets(bytes_per_set: int, device: torch.device) -> int:
    """How many sets of inputs to rotate so that each has left the L2 cache by the time it is used again."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(64, -(-2 * cache // bytes_per_set)))


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
