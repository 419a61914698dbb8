"""The perplexity experiment's table and picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import plots
from .common import text_table
from .experiment import Results, Sample, pick

NAIVE, CONTROL = "naive", "naive_half"
SEEDS = (("flash_seed", "flash"), ("naive_seed", "naive"))
NAMES = {
    "naive": "naive",
    "naive_half": "naive, half the micro-batch",
    "naive_seed": "naive, other weights",
    "flash": "flash",
    "flash_triton": "flash, portable kernels",
    "flash_seed": "flash, other weights",
    "sdpa": "sdpa",
    "sdpa_math": "standard, scores in float32",
    "recipe_naive": "naive, the paper's recipe",
    "recipe_flash": "flash, the paper's recipe",
    "stability_plain": "flash without precise_delta",
    "stability_sdpa": "sdpa",
    "stability_half_lr": "half the rate",
}
WEIGHTS = {  # whose numerics are compared
    "start": "before the first step",
    "end": "at the end of training",
    "context": "of the longest context at its lowest loss",
}
DIVERGED = 0.5  # nats from a run's lowest validation loss to its last


def runs(results: Results, part: str) -> dict[str, Sample]:
    """The runs of a part by name, whole or cut after an evaluation; in the order of NAMES."""
    found = {run["name"]: run for run in pick(results, kind="run", part=part) if run["validation"]}
    return {name: found[name] for name in (*NAMES, *found) if name in found}


def final_loss(run: Sample) -> float:
    """Validation loss in nats after the last step."""
    return run["validation"][-1][1]


def diverged_from(run: Sample) -> int | None:
    """The step of a run's lowest validation loss, if it ended far above that."""
    step, lowest = min(run["validation"], key=lambda each: each[1])
    return step if final_loss(run) > lowest + DIVERGED else None


def gap(run: Sample, other: Sample) -> tuple[float, float]:
    """|difference| in nats of two validation curves: at the end, and on average over the second half."""
    ours, theirs = dict(map(tuple, run["validation"])), dict(map(tuple, other["validation"]))
    steps = sorted(ours.keys() & theirs.keys())
    apart = [abs(ours[step] - theirs[step]) for step in steps]
    return apart[-1], statistics.mean(apart[len(apart) // 2 :])


def seed_gaps(compared: dict[str, Sample]) -> list[tuple[float, float]]:
    """What other initial weights change, for each attention that was run with them."""
    return [
        gap(compared[seed], compared[base]) for seed, base in SEEDS if seed in compared and base in compared
    ]


# ---- table -------------------------------------------------------------------------------------------


def table(results: Results) -> str:
    """A row a run, then the numerics, then what failed."""
    header = ["part", "run", "steps", "lowest val loss", "last", "perplexity", "- naive", "second half"]
    rows = []
    for part in ("gpt2", "recipe", "context", "stability", "extend"):
        compared = runs(results, part)
        base = compared.get(NAIVE) or compared.get("recipe_naive")
        for run in compared.values():
            steps = f"{run['partial']} (cut)" if "partial" in run else f"{run['steps']}"
            if step := diverged_from(run):
                steps += f" (diverged from {step} on)"
            lowest, last = min(loss for _, loss in run["validation"]), final_loss(run)
            apart = [f"{each:.1e}" for each in gap(run, base)] if base and run is not base else ["", ""]
            losses = [f"{lowest:.4f}", f"{last:.4f}", f"{math.exp(last):.2f}", *apart]
            measured = [f"{(run['tokens_per_second'] or math.nan) / 1e3:.0f}", f"{run['peak_gib'] or 0:.1f}"]
            rows.append([part, _label(run), steps, *losses, *measured])
    below = (
        "- naive: |difference| of validation losses in nats, at the end and on average over the second half"
    )
    parts = [f"{text_table([*header, 'k tokens/s', 'GiB'], rows)}\n{below}"] if rows else []
    parts += map(_numerics_table, pick(results, kind="numerics"))
    refused = [f"{s['name']}: {s['failed']}" for s in results["samples"] if s.get("failed") and "name" in s]
    return "\n\n".join([*parts, *refused])


def _label(run: Sample) -> str:
    """What the run differs in: its attention or, where that is the same, its context."""
    other = ", other weights" * run["name"].endswith("_seed")
    return NAMES.get(run["name"]) or f"{run['context']}{other}"


def _numerics_table(sample: Sample) -> str:
    header = [f"weights {WEIGHTS[sample['when']]}", "dtype", "loss", "- naive float32"]
    header += ["gradients: worst", "median"]
    rows, exact = [], (NAIVE, "float32")
    base = next(row["loss"] for row in sample["rows"] if (row["backend"], row["dtype"]) == exact)
    for row in sample["rows"]:
        cells = [row["refused"][:60], "", "", ""] if "refused" in row else []
        if errors := row.get("gradient_errors"):
            worst = max(errors, key=errors.get)
            cells = [f"{row['loss']:.5f}", f"{row['loss'] - base:+.1e}", f"{errors[worst]:.1e} ({worst})"]
            cells += [f"{statistics.median(errors.values()):.1e}"]
        rows.append([row["backend"], row["dtype"], *cells])
    return (
        f"{text_table(header, rows)}\nloss of {sample['tokens']:,} validation tokens; gradients of "
        f"{sample['gradient_tokens']:,} training tokens, |g - g64| / |g64| by tensor"
    )


# ---- picture -----------------------------------------------------------------------------------------


def draw(results: Results, path: Path, claim: str = "") -> bool:
    """One message a panel: same curve; another clock; how close; then longer context, trained, cut, by position.

    There is no panel for what was not measured.
    """
    compared = runs(results, "gpt2") if claim in ("", "C12") else {}
    trained = runs(results, "context") if claim in ("", "C14") else {}
    panels = [(draw_tokens, compared), (draw_clock, compared)] if compared else []
    if NAIVE in compared and len(compared) > 1:
        panels += [(draw_gaps, compared)]
    if trained:
        trained |= runs(results, "stability")
        panels += [(_draw_contexts, trained)]
    if any(run.get("gradient_norms") for run in trained.values()):
        panels += [(_draw_norms, trained)]
    if any(run.get("cut") for run in trained.values()):
        panels += [(_draw_cut, trained), (_draw_positions, trained)]
    if claim and not panels:
        return False
    with plots.picture(path, max(1, len(panels)), title=f"Perplexity on {results['device']}") as axes:
        for axis, (panel, of) in zip(axes, panels, strict=False):
            panel(axis, of)
    return bool(panels)


Points = list[tuple[float, float]]
LOSS = "validation loss (nats)"


def _against_tokens(run: Sample, of: str = "validation") -> Points:
    """A series of [step, value] against millions of tokens."""
    return [(step * run["batch_tokens"] / 1e6, value) for step, value in run[of]]


def _plot(axis: plots.Axes, title: str, across: str, up: str, lines: Iterable[tuple[Points, dict]]) -> None:
    for points, style in lines:
        axis.plot(*zip(*points, strict=True), **style)
    axis.set(title=title, xlabel=across, ylabel=up)


def _style(name: str) -> dict:
    return {
        "color": plots.colour(name.split("_")[0]),
        "linestyle": ":" if name.endswith("_seed") else "--" if name in (CONTROL, "flash_triton") else "-",
        "linewidth": 3.5 if name == NAIVE else 1.3,
        "alpha": 0.5 if name == NAIVE else 1.0,
        "label": NAMES[name],
    }


def draw_tokens(axis: plots.Axes, compared: dict[str, Sample]) -> None:
    """Validation loss against tokens: this panel and the next two are in README's picture too."""
    title = "Loss against tokens"
    if NAIVE in compared and len(compared) > 1:
        apart = max(gap(run, compared[NAIVE])[0] for run in compared.values())
        title = f"Loss: ends within {math.ceil(1e4 * apart - 1e-6) / 1e4:g} nats of naive"
    lines = [(_against_tokens(run), _style(name)) for name, run in compared.items()]
    _plot(axis, title, "M tokens", LOSS, lines)
    plots.legend(axis)


def draw_clock(axis: plots.Axes, compared: dict[str, Sample]) -> None:
    lines = []
    for name, run in compared.items():
        if speed := run["tokens_per_second"]:
            points = [(millions * 1e6 / speed / 60, loss) for millions, loss in _against_tokens(run)]
            lines.append((points, _style(name)))
    _plot(axis, "Loss against minutes", "minutes of training", LOSS, lines)


def draw_gaps(axis: plots.Axes, compared: dict[str, Sample]) -> None:
    """How far a run is above naive; one of other weights, above the run that differs in nothing else."""
    lines = []
    for name, run in compared.items():
        other = compared.get(dict(SEEDS).get(name, NAIVE))
        if other is not None and name != NAIVE:
            theirs = dict(_against_tokens(other))
            points = [
                (tokens, loss - theirs[tokens]) for tokens, loss in _against_tokens(run) if tokens in theirs
            ]
            label = NAMES[name] + (f", minus {NAMES[other['name']]}" if other["name"] != NAIVE else "")
            lines.append((points, {**_style(name), "label": label}))
    _plot(axis, "Loss minus naive's", "M tokens", "validation loss above naive's (nats)", lines)
    axis.axhline(0, **{**_style(NAIVE), "label": None})
    plots.legend(axis)


def _context_style(run: Sample, trained: dict[str, Sample]) -> dict[str, Any]:
    contexts, seed = sorted({each["context"] for each in trained.values()}), run["name"].endswith("_seed")
    return {
        "color": plots.COLOURS[contexts.index(run["context"]) % len(plots.COLOURS)],
        "linestyle": "--" if seed else ":" if run["name"] in NAMES else "-",
        "linewidth": 1.3,
        "label": _label(run),
    }


def _draw_contexts(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    """A run that diverged is drawn up to its lowest loss."""
    lines = []
    for run in trained.values():
        style, points, lowest = _context_style(run, trained), _against_tokens(run), diverged_from(run)
        if lowest is None:
            lines.append((points, style))
        else:
            points = [each for each in points if each[0] <= lowest * run["batch_tokens"] / 1e6]
            cross = {"color": style["color"], "marker": "x", "linestyle": "None"}
            lines += [(points, style), (points[-1:], cross)]
    _plot(axis, "Longer context, same tokens", "M tokens", LOSS, lines)
    plots.legend(axis, title="context" + " (x: diverged)" * any(map(diverged_from, trained.values())))


def _draw_norms(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    runs_with = [run for run in trained.values() if run.get("gradient_norms")]
    lines = [(_against_tokens(run, "gradient_norms"), _context_style(run, trained)) for run in runs_with]
    _plot(axis, "Gradient norm before clipping", "M tokens", "norm", lines)
    axis.set_yscale("log")
    plots.legend(axis, title="context")


def _draw_cut(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    views = [run for run in trained.values() if run.get("cut")]
    learning = [run for run in views if diverged_from(run) is None]
    longest = max(learning or views, key=lambda run: run["context"])
    title = f"The {longest['context']} model, windows cut"
    _plot(axis, title, "window", LOSS, [(longest["cut"], {"marker": "o"})])
    plots.length_axis(axis, [context for context, _ in longest["cut"]])
    axis.set_xlabel("window")


def _draw_positions(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    lines = []
    for run in trained.values():
        if not run["name"].endswith("_seed") and run.get("positions") and diverged_from(run) is None:
            points = [(last, loss) for _, last, loss in run["positions"]]
            lines.append((points, {**_context_style(run, trained), "marker": "o", "linestyle": "-"}))
    _plot(axis, "By position in the window", "up to token", LOSS, lines)
    axis.set_xscale("log", base=2)
    plots.legend(axis, title="context")
