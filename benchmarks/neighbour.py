"""Whether a busy neighbour matters: the same work timed while the host's other GPU idles, and while it computes.

`python -m reproduce all` measures on all GPUs of a host at once. This shows what that does to a time, to the ratio of
two times, and to what the host takes. The neighbour is a process that computes attention and large products on the
other GPU, as fast as it can queue them. Idle and busy take turns, in an order drawn anew.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from reproduce import plots, tables, timing
from reproduce.attention import Inputs, Workload, attend_with, gradients, input_sets, race
from reproduce.common import ReproduceError
from reproduce.experiment import Options, Results, Sample, Timing
from reproduce.timing import LEVEL, Times, timed, took

from .aims import Aim

IDLE, BUSY = "idle", "busy"
PRODUCT, COPY, HOST = "product", "copy", "host"
MOST = 0.01  # the share of a time below which a difference does not matter
NEEDED = ("shapes",)


@dataclass(frozen=True)
class Settings(Timing):
    dtype: str = "bfloat16"
    backends: tuple[str, ...] = ("flash", "sdpa", "naive")
    # batch x heads x length x head_dim of causal attention; by the host's clock, the last one alone.
    shapes: tuple[str, ...] = ("16x12x1024x64", "4x16x4096x128")
    small: str = "1x2x128x64"
    # Of a product of two square matrices, and of a copy of one.
    size: int = 8192
    # Idle and busy, each so often; all in one process, which sees both GPUs.
    turns: int = 3
    processes: int = 1


TINY = Settings(
    dtype="float16", backends=("flash", "naive"), shapes=("1x1x32x32",), small="1x1x32x32", size=32, turns=1,
    rounds=1, seconds=0.0,
)  # fmt: skip


def run(options: Options) -> None:
    if options.device.type == "cuda" and torch.cuda.device_count() < 2:
        raise ReproduceError("neighbour needs two GPUs of one host, and there is one")
    settings = options.settings
    points = {shape: partial(time_attention, shape, options) for shape in settings.shapes}
    points |= {"matrices": partial(time_matrices, options), HOST: partial(time_host, options)}
    for turn in range(settings.turns):
        for state in random.Random(turn).sample((IDLE, BUSY), 2):
            where = {"kind": "time", "neighbour": state, "process": turn}
            missing = [what for what in points if not options.find(what=what, **where)]
            with neighbour(options) if state == BUSY and missing else nullcontext():
                for what in missing:
                    options.sample(points[what], what=what, **where)


def workload(shape: str) -> Workload:
    return Workload("neighbour", *map(int, shape.split("x")), True)


def time_attention(shape: str, options: Options) -> Sample:
    """`attention.race` of the backends."""
    sets = input_sets(workload(shape), options.dtype, options.device)
    return race({name: attend_with(name) for name in options.settings.backends}, sets, options)


def time_matrices(options: Options) -> Sample:
    """What most depends on the clock and the power, a product, and on memory, a copy."""
    shape = (options.settings.size,) * 2
    a, b, c = (torch.randn(shape, device=options.device).to(options.dtype) for _ in range(3))

    calls = {PRODUCT: lambda _, number: torch.mm(a, b, out=c), COPY: lambda _, number: c.copy_(a)}
    return race(calls, [None], options, backward=False)


def time_host(options: Options) -> Sample:
    """Queueing calls of attention too small to keep the GPU busy, by the host's clock."""
    settings, device = options.settings, options.device
    inputs = Inputs(workload(settings.small), options.dtype, device)
    attends = {name: attend_with(name) for name in settings.backends}
    ms: dict[str, list[float]] = {name: [] for name in attends}
    for number in range(-3, settings.rounds):  # the first are warm-ups
        for name in random.Random(number).sample(list(attends), len(attends)):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            for _ in range(10):
                gradients(attends[name], inputs)
            if number >= 0:
                ms[name].append(100 * (time.perf_counter() - began))
    return {"ms": {name: {"all": values} for name, values in ms.items()}, "late": {}}


# ---- the neighbour -----------------------------------------------------------------------------------


@contextmanager
def neighbour(options: Options) -> Iterator[None]:
    """A process that keeps the other GPU busy during the block."""
    device = options.device
    if device.type == "cuda":
        device = torch.device("cuda", 0 if device.index else 1)
    context = mp.get_context("spawn")
    works = context.Event()
    process = context.Process(target=work, args=(device, options.settings, works), daemon=True)
    process.start()
    try:
        if not works.wait(120):
            raise RuntimeError("the neighbour did not start")
        yield
    finally:
        process.kill()
        process.join()


def work(device: torch.device, settings: Settings, works: Any) -> None:
    """Compute until killed; `works` is set once everything is compiled."""
    dtype = getattr(torch, settings.dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    inputs = Inputs(workload(settings.shapes[0]), dtype, device)
    a = torch.randn(settings.size, settings.size, device=device).to(dtype)
    attend = attend_with("flash")
    while True:
        gradients(attend, inputs)
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        works.set()


# ---- the page ------------------------------------------------------------------------------------------


def changes(results: Results) -> dict[str, tuple[Times, Times]]:
    """What was timed -> its milliseconds idle and busy; "A / B": the ratio of the first two of a shape."""
    found = {}
    for idle in timed(results, kind="time", neighbour=IDLE):
        for busy in timed(results, kind="time", neighbour=BUSY, what=idle["what"]):
            names = [name for name in idle["ms"] if name in busy["ms"]]
            both = {name: (took(idle, name), took(busy, name)) for name in names}
            if "x" in idle["what"] and len(names) > 1:
                ratios = (both[names[0]][n] / both[names[1]][n] for n in (0, 1))
                both[f"{names[0]} / {names[1]}"] = tuple(ratios)
            found |= {f"{idle['what']}, {name}": times for name, times in both.items()}
    return found


def matters(idle: Times, busy: Times) -> bool:
    """Whether the ranges are apart, if there are several turns, and the medians by more than MOST."""
    return (
        bool(idle.alone or timing.versus(busy, idle) != LEVEL) and abs(busy.median / idle.median - 1) > MOST
    )


def verdict(results: Results) -> str:
    """In a sentence, whether experiments may run side by side on this host."""
    found = changes(results)
    if not found:
        return "not measured"
    apart = {name: busy.median / idle.median for name, (idle, busy) in found.items() if matters(idle, busy)}
    if apart:
        worst = ", ".join(f"{name} {ratio:.3f}x" for name, ratio in apart.items())
        return f"a busy neighbour matters: {worst} of the time with an idle one"
    off = max(abs(busy.median / idle.median - 1) for idle, busy in found.values())
    what = f"{len(found)} times and ratios are within {MOST:.0%} or their ranges overlap"
    return f"a busy neighbour does not matter: {what}; the medians differ by {off:.1%} at most"


def table(results: Results) -> str:
    """Each time idle and busy, and the verdict."""
    rows = [
        [name, idle.ranging("{:.4g}"), busy.ranging("{:.4g}"), f"{busy.median / idle.median:.4f}"]
        for name, (idle, busy) in changes(results).items()
    ]
    return f"{tables.text_table(['ms', IDLE, BUSY, 'busy / idle'], rows)}\n{verdict(results)}"


def draw(results: Results, path: Path) -> None:
    """Busy over idle, of each time and ratio."""
    over = {name: busy / idle for name, (idle, busy) in changes(results).items()}
    rows = {name: {"": each.median} for name, each in over.items()}
    ends = {name: f"{each.median:.3f}" for name, each in over.items()}
    panel = plots.bars("A busy neighbour", rows, across="time over that with an idle one", ends=ends)
    plots.draw(path, f"Two GPUs of a host, {results['device']}", [panel])


def aims(results: Results) -> list[Aim]:
    """A neighbour that does not matter."""
    return [
        Aim(
            f"time with a busy neighbour over that with an idle one, {name}", f"{(busy / idle).shown('{:.3f}x')}",
            f"within {MOST:.0%}, or ranges overlap", not matters(idle, busy),
        )
        for name, (idle, busy) in changes(results).items()
    ]  # fmt: skip
