"""The host overhead of an attention call: microseconds of Python and C++ until its kernels are queued.

In eager mode, without CUDA graphs, a small model is only as fast as the host can launch its kernels. So the attention
here is so small that the device always finishes first, and the host's clock is read around many calls with no
synchronisation between them. An autograd.Function that does nothing is timed too: the overhead PyTorch itself adds to
any attention written in Python. All take turns, in a new order each round, in three processes.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels import attention_tier, get_attention, resolve_attention
from reproduce import plots
from reproduce.common import text_table
from reproduce.experiment import Options, Results, Sample, pick
from reproduce.timing import Times, recorded

from .aims import Aim

NOTHING = "empty autograd.Function"
PORTABLE = "flash, portable"
FORWARD, GRAPH, BOTH, STACKED = "forward, no_grad", "forward", "forward and backward", "both, in a stack"
AIMS = {FORWARD: 60, BOTH: 150}  # microseconds, where an empty autograd.Function takes 65 to 80
NEEDED = ("shape",)


@dataclass(frozen=True)
class Settings:
    dtype: str = "bfloat16"
    # Names in kernels.ATTENTION.
    backends: tuple[str, ...] = ("flash", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "naive")
    # Batch, heads, length, head_dim.
    shape: tuple[int, ...] = (1, 2, 128, 64)
    # Calls in one autograd graph, as in a model, whose backward wakes autograd's thread only once.
    layers: int = 20
    # Calls between synchronisations: few enough that CUDA's launch queue never fills, which would block a launch.
    calls: int = 100
    processes: int = 3
    rounds: int = 20


TINY = Settings(
    dtype="float16", backends=("flash", "sdpa"), shape=(1, 1, 16, 32), layers=2, calls=1, processes=1,
    rounds=1,
)  # fmt: skip

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Nothing(torch.autograd.Function):
    """Takes an attention's arguments and returns a result and gradients of the right shape, computing nothing."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.view_as(q)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return d_out, d_out, d_out


def run(options: Options) -> None:
    found: dict[str, Attend] = {NOTHING: Nothing.apply}
    for name in options.settings.backends:
        sample = options.sample(partial(_check, name, options), kind="tier", backend=name)
        if "tier" not in sample:
            continue
        found[name] = get_attention(name)
        if "hopper" in (sample["tier"] or ""):
            # Of larger calls: for so small a one `auto` takes the portable kernels.
            found[name], found[PORTABLE] = (partial(found[name], tier=each) for each in ("hopper", "triton"))
    options.timed(partial(time_all, found, options), kind="time")


def _check(name: str, options: Options) -> Sample:
    """{"tier"}: which of our kernels the backend runs; raises if it does not support the request."""
    settings = options.settings
    request = {
        "device": options.device,
        "dtype": getattr(torch, settings.dtype),
        "head_dim": settings.shape[3],
    }
    resolve_attention(name, **request)
    return {"tier": attention_tier(name, **request, length=settings.shape[2])}


def phases(attend: Attend, options: Options) -> dict[str, tuple[Callable[[], object], int]]:
    """What is timed for an attention: phase -> (function to time, attention calls in it)."""
    settings = options.settings

    def leaf() -> Tensor:
        dtype = getattr(torch, settings.dtype)
        return torch.randn(settings.shape, device=options.device, dtype=dtype, requires_grad=True)

    q, d_out = leaf(), leaf().detach()
    keys, values = ([leaf() for _ in range(settings.layers)] for _ in range(2))

    def both(layers: int) -> None:
        out = q
        for k, v in zip(keys[:layers], values[:layers], strict=True):
            out = attend(out, k, v)
        torch.autograd.grad(out, [q, *keys[:layers], *values[:layers]], d_out)

    forward = partial(attend, q, keys[0], values[0])
    return {
        FORWARD: (torch.no_grad()(forward), 1),
        GRAPH: (forward, 1),
        BOTH: (partial(both, 1), 1),
        STACKED: (partial(both, settings.layers), settings.layers),
    }


def time_all(attends: dict[str, Attend], options: Options) -> Sample:
    """Microseconds per attention call in every round: {"us": {contender: {phase: [...]}}, "clocks"}."""
    settings, order = options.settings, random.Random(options.process)
    timed = {name: phases(attend, options) for name, attend in attends.items()}
    us: dict[str, dict[str, list[float]]] = {
        name: {phase: [] for phase in each} for name, each in timed.items()
    }
    with recorded(options.device) as clocks:
        for number in range(-1, settings.rounds):  # the first is a warm-up
            for name in order.sample(list(timed), len(timed)):
                for phase, (call, calls_in_it) in timed[name].items():
                    calls = max(1, settings.calls // calls_in_it)
                    took = _host_us(call, calls, options.device) / calls_in_it
                    if number >= 0:
                        us[name][phase].append(float(f"{took:.4g}"))
    return {"us": us, "clocks": clocks}


def _host_us(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Microseconds per call on the host's clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - begin) / calls


def _times(results: Results) -> dict[str, dict[str, Times]]:
    """contender -> phase -> the median microseconds of each process; for contenders that all processes have."""
    timings = [sample["us"] for sample in pick(results, kind="time")]
    if not timings:
        return {}
    return {
        name: {p: Times(statistics.median(us[name][p]) for us in timings) for p in its}
        for name, its in timings[0].items()
        if all(name in us for us in timings)
    }


def table(results: Results) -> str:
    """Median microseconds per call, and which backends were left out."""
    lines = [f"left out: {s['backend']}: {s['refused']}" for s in results["samples"] if s.get("refused")]
    if times := _times(results):
        rows = [[name, *(f"{us.median:.0f}" for us in each.values())] for name, each in times.items()]
        lines.append(text_table(["us of the host a call", *times[NOTHING]], rows))
    return "\n".join(lines)


def draw(results: Results, path: Path) -> None:
    """A panel for each phase, with a bar for each contender."""
    times = _times(results)
    panels = [
        plots.bars(phase, {name: {"": us[phase].median} for name, us in times.items()},
                   across="microseconds a call", backends=True)
        for phase in times.get(NOTHING, {})
    ]  # fmt: skip
    plots.draw(path, f"What a call costs the host of {results['device']}", panels, columns=2)


def aims(results: Results) -> list[Aim]:
    """At short lengths the host's time decides, not the device's."""
    found: list[Aim] = []
    times = _times(results)
    if "flash" not in times:
        return found
    tiers = (
        {PORTABLE: ", portable", "flash": ", on the Hopper kernels"} if PORTABLE in times else {"flash": ""}
    )
    for (phase, aim), (name, tier) in itertools.product(AIMS.items(), tiers.items()):
        ours, nothing = times[name][phase], times[NOTHING][phase].median
        others = [each[phase].median for name, each in times.items() if name.startswith("sdpa")]
        fastest = f", the fastest of PyTorch's {min(others):.0f} us" if others else ""
        why = f"an {NOTHING} takes {nothing:.0f} us{fastest}"
        between = "one process" if ours.alone else f"{ours.low:.0f} to {ours.high:.0f}"
        text = f"{ours.median:.0f} us ({between})"
        found.append(Aim(f"host, {phase} of flash{tier}", text, f"{aim} us", ours.high <= aim, why))
    return found
