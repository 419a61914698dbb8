"""The curves of a comparison as numbers, which page.js draws; one colour a backend, one dash pattern a setting.

With one backend alone, a setting has a colour too.
"""

import math
from typing import Any

from ..plots import COLOURS, colour
from .runs import Run, same_tokens
from .seeds import attentions, baselines, places

Chart = dict[str, Any]
MOST_POINTS = 1500  # of a curve: more than a screen has pixels for
# Curves part where they are a tenth as far from each other as they ever come.
PARTED = 0.1


def colours(runs: list[Run]) -> list[str]:
    """The colour of each run: that of its attention, or, if all have the same, of its settings."""
    if attentions(runs) == 1 < len(runs):
        return [COLOURS[number % len(COLOURS)] for number in patterns(runs)]
    names = tuple(run.attention for run in runs)
    return [colour(name, names) for name in names]


def patterns(runs: list[Run]) -> list[int]:
    """The number of each run's dash pattern: that of its settings other than attention, so that matches are alike."""
    found = places(runs)
    numbers = {place: number for number, place in enumerate(dict.fromkeys(found))}
    return [numbers[place] for place in found]


def charts(runs: list[Run]) -> list[Chart]:
    """Loss against tokens and against time, its difference from the baseline's, and speed; without empty ones."""
    bases = baselines(runs)
    base = runs[0].label if all(each is runs[0] for each in bases) else f"the matched {runs[0].attention}"
    tokens, seconds = _losses(runs, "tokens"), _losses(runs, "seconds")
    speeds = [each for i, run in enumerate(runs) for each in _series(i, run.curve("perf/tokens_per_second"))]
    number = {id(run): i for i, run in enumerate(runs)}
    parted = parting(tokens, [number[id(each)] for each in bases])
    times = [time for run in runs if (time := run.curve("seconds").get(parted)) and same_tokens(runs[0], run)]
    found = [
        _chart("Loss against tokens", "tokens", "nats a token", tokens, parted),
        _chart(
            "Loss against time", "seconds, all of the run", "nats a token", seconds, min(times, default=None)
        ),
        _chart(f"Loss minus that of {base}, at equal tokens", "tokens", "nats", _differences(runs, bases)),
        _chart("Training speed", "tokens", "tokens/s", speeds, zero=True),
    ]
    return [chart for chart in found if chart["series"]]


def _chart(
    title: str, x: str, y: str, series: list[dict], start: float | None = None, zero: bool = False
) -> Chart:
    return {"title": title, "x": x, "y": y, "zero": zero, "series": series, "from": start}


def _series(run: int, curve: dict[float, float], dots: bool = False) -> list[dict]:
    """A curve, thinned; a loss that is not finite leaves no point."""
    found = [(x, y) for x, y in curve.items() if math.isfinite(y)]
    found = found[:: -(-len(found) // MOST_POINTS) or 1]
    x = [int(x) if x.is_integer() else x for x, _ in found]
    return [{"run": run, "x": x, "y": [float(f"{y:.7g}") for _, y in found], "dots": dots}] if x else []


def _losses(runs: list[Run], against: str) -> list[dict]:
    found = []
    for i, run in enumerate(runs):
        if same_tokens(runs[0], run):
            found += _series(i, run.curve("train/loss", against))
            found += _series(i, run.curve("val/loss", against), dots=True)
    return found


def _differences(runs: list[Run], bases: list[Run]) -> list[dict]:
    found = []
    for i, (base, run) in enumerate(zip(bases, runs, strict=True)):
        if run is base or not same_tokens(base, run):
            continue
        ours, theirs = run.curve("train/loss"), base.curve("train/loss")
        found += _series(i, {x: y - theirs[x] for x, y in ours.items() if x in theirs})
        ours, theirs = run.evaluations(), base.evaluations()
        found += _series(i, {at[0]: y - theirs[at] for at, y in ours.items() if at in theirs}, dots=True)
    return found


def parting(series: list[dict], bases: list[int]) -> float | None:
    """The x from which on training curves differ visibly from those of the runs that they are compared with (`bases`
    has each run's); None if that is at their first point or last tenth.

    Of a sweep's curves those of other seeds and rates are apart from the first step on.
    """
    curves = {
        each["run"]: dict(zip(each["x"], each["y"], strict=True)) for each in series if not each["dots"]
    }
    pairs = [(curve, curves[bases[i]]) for i, curve in curves.items() if i != bases[i] in curves]
    common = sorted(set.intersection(*(set(ours) & set(theirs) for ours, theirs in pairs))) if pairs else []
    spreads = [max(abs(ours[x] - theirs[x]) for ours, theirs in pairs) for x in common]
    most = max(spreads, default=0)
    if not most:
        return None
    parted = next(i for i, spread in enumerate(spreads) if spread >= PARTED * most)
    return common[parted - 1] if 2 <= parted <= len(common) - 1 - len(common) // 10 else None
