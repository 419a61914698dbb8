"""The curves of a comparison as numbers, which page.js draws; one colour a backend, one dash pattern a setting."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from ..plots import colour
from .runs import Run, differing_settings, same_tokens
from .seeds import baselines

Chart = dict[str, Any]
MOST_POINTS = 1500  # of a curve: more than a screen has pixels for
# Curves part where they are a tenth as far from each other as they ever come.
PARTED = 0.1


def colours(runs: list[Run]) -> list[str]:
    """The colour of each run: that of its attention."""
    attentions = tuple(run.attention for run in runs)
    return [colour(attention, attentions) for attention in attentions]


def patterns(runs: list[Run]) -> list[int]:
    """The number of each run's dash pattern: that of its settings other than attention, so that matches are alike."""
    differing = differing_settings(runs).values()
    settings = [tuple(str(values[i]) for values in differing) for i in range(len(runs))]
    alike = [(run.attention, each) for run, each in zip(runs, settings, strict=True)]
    keys = [(each, alike[:i].count(alike[i])) for i, each in enumerate(settings)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def charts(runs: list[Run]) -> list[Chart]:
    """Loss against tokens and against time, its difference from the baseline's, and speed; without empty ones."""
    alike = [i for i, run in enumerate(runs) if same_tokens(runs[0], run)]
    found = [
        _chart("Loss against tokens", "tokens", "nats a token", _losses(runs, alike, "tokens")),
        _chart(
            "Loss against time", "seconds, all of the run", "nats a token", _losses(runs, alike, "seconds")
        ),
        _chart(
            f"Loss minus that of {_baseline(runs)}, at equal tokens", "tokens", "nats", _differences(runs)
        ),
        _chart("Training speed", "tokens", "tokens/s", _speeds(runs), zero=True),
    ]
    parted = parting(found[0]["series"])
    found[0]["from"] = parted
    if parted is not None:
        seconds = [dict(zip(*runs[i].curve("seconds"), strict=True)) for i in alike]
        found[1]["from"] = min((each[parted] for each in seconds if parted in each), default=None)
    return [chart for chart in found if chart["series"]]


def _baseline(runs: list[Run]) -> str:
    return (
        runs[0].label
        if set(map(id, baselines(runs))) == {id(runs[0])}
        else f"the matched {runs[0].attention}"
    )


def _chart(title: str, x: str, y: str, series: list[dict], zero: bool = False) -> Chart:
    return {"title": title, "x": x, "y": y, "zero": zero, "series": series}


def _series(run: int, points: tuple[list[float], list[float]], dots: bool = False) -> list[dict]:
    """A curve, thinned; a loss that is not finite leaves no point."""
    found = [(x, y) for x, y in zip(*points, strict=True) if math.isfinite(y)]
    found = found[:: -(-len(found) // MOST_POINTS) or 1]
    x = [int(x) if x.is_integer() else x for x, _ in found]
    return [{"run": run, "x": x, "y": [float(f"{y:.7g}") for _, y in found], "dots": dots}] if x else []


def _losses(runs: list[Run], indices: list[int], against: str) -> list[dict]:
    found = []
    for i in indices:
        found += _series(i, runs[i].curve("train/loss", against))
        found += _series(i, runs[i].curve("val/loss", against), dots=True)
    return found


def _differences(runs: list[Run]) -> list[dict]:
    found = []
    for i, (first, run) in enumerate(zip(baselines(runs), runs, strict=True)):
        if run is first or not same_tokens(first, run):
            continue
        for column in ("train/loss", "val/loss"):
            base = dict(zip(*first.curve(column), strict=True))
            points = [(x, y - base[x]) for x, y in zip(*run.curve(column), strict=True) if x in base]
            found += _series(i, ([x for x, _ in points], [y for _, y in points]), dots=column == "val/loss")
    return found


def _speeds(runs: list[Run]) -> list[dict]:
    return [each for i, run in enumerate(runs) for each in _series(i, run.curve("perf/tokens_per_second"))]


def parting(series: list[dict]) -> float | None:
    """The x from which on the training curves differ visibly; None if they never do before their last tenth."""
    curves = [dict(zip(each["x"], each["y"], strict=True)) for each in series if not each["dots"]]
    common = sorted(set.intersection(*map(set, curves))) if len(curves) > 1 else []
    spreads = {x: max(y := [curve[x] for curve in curves]) - min(y) for x in common}
    most = max(spreads.values(), default=0)
    if not most:
        return None
    last = common[-1 - len(common) // 10]
    return next(
        (before for before, x in pairwise(common) if spreads[x] >= PARTED * most and before < last), None
    )
