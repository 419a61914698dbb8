"""The plots of a comparison of runs, each an inline SVG whose text stays text."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from .plots import COLOURS, STYLE, colour
from .runs import Run, same_tokens


def colours(runs: list[Run]) -> list[str]:
    """A colour for each run: that of its attention, if all runs differ in it."""
    attentions = tuple(run.attention for run in runs)
    if len(set(attentions)) == len(runs):
        return [colour(attention, attentions) for attention in attentions]
    return [COLOURS[i % len(COLOURS)] for i in range(len(runs))]


def plots(runs: list[Run]) -> list[str]:
    """SVG elements: loss against tokens and time, its difference from the first run's, speed, memory, time spent.

    A plot for which no run has figures is left out.
    """
    drawings: list[Callable[[Axes, list[Run]], bool]] = [
        _loss_by_tokens,
        _loss_by_time,
        _loss_difference,
        _speed,
        _memory,
        _time_split,
    ]
    with pyplot.rc_context(STYLE | {"legend.fontsize": 9}):
        return [svg for draw in drawings if (svg := _svg(draw, runs))]


def _svg(draw: Callable[[Axes, list[Run]], bool], runs: list[Run]) -> str | None:
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    try:
        if not draw(axes, runs):
            return None
        _legend(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    finally:
        pyplot.close(figure)
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def _legend(axes: Axes) -> None:
    """A legend below the axes, in as many columns as fit; the figure grows by its height."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    labels = [textwrap.fill(label, 72) for label in labels]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = max(1, 80 // (longest + 7))
    axes.figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    _heighten(axes, 0.19 * sum(label.count("\n") + 1 for label in labels) / columns + 0.1)


def _heighten(axes: Axes, inches: float) -> None:
    axes.figure.set_figheight(axes.figure.get_figheight() + inches)


def _name_bars(axes: Axes, names: list[str]) -> None:
    """Label horizontal bars 0, 1, ... with their names, the first on top; long names are wrapped."""
    names = [textwrap.fill(name, 26, break_on_hyphens=False) for name in names]
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    lines = sum(name.count("\n") + 1 for name in names)
    _heighten(axes, 0.16 * max(0, lines + len(names) - 16))


def _coloured(runs: list[Run]) -> list[tuple[Run, str]]:
    return list(zip(runs, colours(runs), strict=True))


def _width(run: Run, runs: list[Run]) -> float:
    """The first run's line is wider, so that it stays visible under a line that coincides with it."""
    return 3.0 if run is runs[0] and len(runs) > 1 else 1.3


def _loss_by_tokens(axes: Axes, runs: list[Run]) -> bool:
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    return _loss(axes, runs, "tokens", "tokens")


def _loss_by_time(axes: Axes, runs: list[Run]) -> bool:
    return _loss(axes, runs, "seconds", "time (s), all of the run")


def _loss(axes: Axes, runs: list[Run], against: str, label: str) -> bool:
    drawn = False
    for run, shade in _coloured(runs):
        if not same_tokens(runs[0], run):
            continue
        x, y = run.curve("train/loss", against)
        axes.plot(x, y, color=shade, linewidth=_width(run, runs), label=run.label)
        drawn |= bool(x)
        x, y = run.curve("val/loss", against)
        axes.plot(x, y, color=shade, marker="o", markersize=5, markeredgecolor="white", linestyle="none")
    axes.set(
        title=f"Loss against {against}", xlabel=label, ylabel="nats a token (line: train, dot: validation)"
    )
    return drawn


def _loss_difference(axes: Axes, runs: list[Run]) -> bool:
    first, drawn = runs[0], False
    for run, shade in _coloured(runs)[1:]:
        if not same_tokens(first, run):
            continue
        label: str | None = run.label
        for column, style in (("train/loss", "-"), ("val/loss", "o")):
            base = dict(zip(*first.curve(column), strict=True))
            points = [(x, y - base[x]) for x, y in zip(*run.curve(column), strict=True) if x in base]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=shade, linewidth=1.2, label=label)
                label, drawn = None, True
    axes.axhline(0, color=colours(runs)[0], linewidth=1)
    low, high = axes.dataLim.intervaly
    if low == high:
        axes.set_ylim(-1e-6, 1e-6)  # all equal, to the precision of metrics.csv
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    title = textwrap.fill(f"Loss minus that of {first.label}, at equal tokens", 52)
    axes.set(title=title, xlabel="tokens", ylabel="nats")
    return drawn


def _speed(axes: Axes, runs: list[Run]) -> bool:
    drawn = False
    for run, shade in _coloured(runs):
        x, y = run.curve("perf/tokens_per_second")
        axes.plot(x, y, color=shade, linewidth=1.3)
        if (mean := run.speed("perf/tokens_per_second")) is not None and x:
            began = run.began * x[-1] / run.curve("perf/tokens_per_second", "step")[0][-1]
            axes.hlines(mean, began, x[-1], color=shade, linewidth=0.8, linestyle=":")
            axes.plot([], [], color=shade, label=f"{run.label}: {mean:,.0f}")
            drawn = True
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set(title="Training speed", xlabel="tokens", ylabel="tokens/s (dotted: the mean)")
    axes.set_ylim(bottom=0)
    return drawn


def _memory(axes: Axes, runs: list[Run]) -> bool:
    known = [(run, shade) for run, shade in _coloured(runs) if run.peak_memory]
    if not known:
        return False
    kinds = {run.peak_memory[0] for run, _ in known}
    names = [run.label + (f" ({run.peak_memory[0]})" if len(kinds) > 1 else "") for run, _ in known]
    gib, shades = [run.peak_memory[1] for run, _ in known], [shade for _, shade in known]
    axes.bar_label(axes.barh(range(len(known)), gib, color=shades, height=0.6), fmt="%.2f", padding=4)
    _name_bars(axes, names)
    axes.margins(x=0.12)
    axes.set(title="Peak memory", xlabel=f"GiB, {' or '.join(sorted(kinds))}")
    return True


def _time_split(axes: Axes, runs: list[Run]) -> bool:
    """Where each run's time went; no bar for a run whose rows do not allow it to be computed."""
    splits = [(run.label, split) for run in runs if (split := run.time_split())]
    if not splits:
        return False
    parts = (
        ("steps", "#5b7c99", "steps"),
        ("rest", "#d9b45b", "rest: evaluation, checkpoints"),
        ("start-up", "#c9cfd6", "start-up of the first step"),
    )
    left = [0.0] * len(splits)
    for part, shade, name in parts:
        seconds = [split[part] for _, split in splits]
        axes.barh(range(len(splits)), seconds, left=left, color=shade, height=0.6, label=name)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    _name_bars(axes, [label for label, _ in splits])
    axes.set_xlim(right=1.05 * max(left))  # an empty last part would hold the axis at the bar's end
    axes.set(title="Where the time went", xlabel="seconds")
    return True
