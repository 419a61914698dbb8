"""The perplexity experiment's table and picture."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from . import plots
from .experiment import Results, Sample, pick, text_table

BASELINE, CONTROL = "naive", "naive_half"
SEEDS = (("flash_seed", "flash"), ("naive_seed", "naive"))
NAMES = {
    "naive": "naive",
    "naive_half": "naive, half the micro-batch",
    "flash": "flash",
    "flash_seed": "flash, other weights",
    "naive_seed": "naive, other weights",
    "sdpa": "sdpa",
    "sdpa_math": "standard, scores in float32",
    "flash_triton": "flash, portable kernels",
    "recipe_naive": "naive, the paper's recipe",
    "recipe_flash": "flash, the paper's recipe",
    "stability_precise": "flash with precise_delta",
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
    """The runs of a part by name, whole or cut after an evaluation."""
    return {run["name"]: run for run in pick(results, kind="run", part=part) if run["validation"]}


def compares(results: Results) -> bool:
    """Whether there are curves of naive and of flash to be laid over each other."""
    return {"naive", "flash"} <= runs(results, "gpt2").keys()


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


def seed_gap(compared: dict[str, Sample]) -> tuple[float, float] | None:
    """What other initial weights change, for one attention."""
    for seed, base in SEEDS:
        if seed in compared and base in compared:
            return gap(compared[seed], compared[base])
    return None


# ---- table -------------------------------------------------------------------------------------------


def table(results: Results) -> str:
    parts = [_runs_table(results, "gpt2"), _runs_table(results, "recipe")]
    parts += map(_numerics_table, pick(results, kind="numerics"))
    parts += [_context_table(results), _stability_table(results), _extend_table(results)]
    refused = [f"{s['name']}: {s['failed']}" for s in results["samples"] if s.get("failed") and "name" in s]
    return "\n\n".join([*filter(None, parts), *refused])


def _reached(run: Sample) -> list[str]:
    """How far it came, and from where on it no longer learned; validation loss, perplexity."""
    loss, lowest = final_loss(run), diverged_from(run)
    steps = f"{run['partial']} (cut)" if "partial" in run else f"{run['steps']}"
    steps += "" if lowest is None else f" (diverged from {lowest} on)"
    return [steps, f"{loss:.4f}", f"{math.exp(loss):.2f}"]


def _runs_table(results: Results, part: str) -> str:
    compared = runs(results, part)
    if not compared:
        return ""
    base = compared.get(BASELINE) or compared.get("recipe_naive")
    header = [part, "steps", "val loss", "perplexity", "- naive", "second half", "k tokens/s", "GiB"]
    rows = []
    for name, run in compared.items():
        apart = [f"{each:.1e}" for each in gap(run, base)] if base and run is not base else ["", ""]
        measured = [f"{(run['tokens_per_second'] or math.nan) / 1e3:.0f}", f"{run['peak_gib'] or 0:.1f}"]
        rows.append([NAMES[name], *_reached(run), *apart, *measured])
    tokens = max(run["steps"] * run["batch_tokens"] for run in compared.values())
    below = (
        "a run; |difference| of the validation loss in nats, at the end and on average over the second half"
    )
    return f"{text_table(header, rows)}\n{tokens / 1e6:.0f} M tokens {below}"


def _numerics_table(sample: Sample) -> str:
    header = [f"weights {WEIGHTS[sample['when']]}", "dtype", "loss", "- naive float32"]
    header += ["gradients: worst", "median"]
    rows, exact = [], (BASELINE, "float32")
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


def _context_table(results: Results) -> str:
    trained = sorted(runs(results, "context").values(), key=lambda run: run["context"])
    if not trained:
        return ""
    contexts = list(dict.fromkeys(run["context"] for run in trained))
    rows = []
    for run in trained:
        cut = dict(map(tuple, run.get("cut", [])))
        name = f"{run['context']}{', other weights' * run['name'].endswith('_seed')}"
        rows.append([name, *_reached(run), *(f"{cut[c]:.4f}" if c in cut else "" for c in contexts)])
    header = ["context", "steps", "val loss", "perplexity", *(f"cut to {c}" for c in contexts)]
    below = "the same tokens at every step; every validation token is predicted once"
    return f"{text_table(header, rows)}\n{below}"


def _stability_table(results: Results) -> str:
    again = list(runs(results, "stability").values())
    longest = sorted(runs(results, "context").values(), key=lambda run: -run["context"])[:1]
    rows = []
    for run in [*longest, *again] if again else []:
        steps, last, _ = _reached(run)
        lowest, speed = min(loss for _, loss in run["validation"]), run["tokens_per_second"] or math.nan
        what = NAMES.get(run["name"], f"as context {run['context']}")
        rows.append([what, steps, f"{lowest:.4f}", last, f"{speed / 1e3:.0f}"])
    header = ["longest context again", "steps", "lowest val loss", "last", "k tokens/s"]
    return text_table(header, rows) if rows else ""


def _extend_table(results: Results) -> str:
    extended = sorted(runs(results, "extend").values(), key=lambda run: run["context"])
    header = ["extended to", "steps", *(f"val loss {n}/4" for n in range(1, 5))]
    rows = []
    for run in extended:
        losses = [f"{loss:.4f}" for _, loss in run["validation"][-4:]]
        rows.append([f"{run['context']}", f"{run['steps']}", *losses, *[""] * (4 - len(losses))])
    return text_table(header, rows) if rows else ""


# ---- picture -----------------------------------------------------------------------------------------


def draw(results: Results, path: Path) -> None:
    """One message a panel: same curve; another clock; how close; then longer context, trained, cut, by position.

    There is no panel for what was not measured.
    """
    compared, trained = runs(results, "gpt2"), runs(results, "context")
    panels = [(draw_tokens, compared), (draw_clock, compared)] if compared else []
    if BASELINE in compared and len(compared) > 1:
        panels += [(draw_gaps, compared)]
    if trained:
        trained |= runs(results, "stability")
        panels += [(_draw_contexts, trained)]
    if any(run.get("gradient_norms") for run in trained.values()):
        panels += [(_draw_norms, trained)]
    if any(run.get("cut") for run in trained.values()):
        panels += [(_draw_cut, trained), (_draw_positions, trained)]
    with plots.picture(path, max(1, len(panels)), title=f"Perplexity on {results['device']}") as axes:
        for axis, (panel, of) in zip(axes, panels, strict=False):
            panel(axis, of)


def _style(name: str) -> dict:
    seed = name.endswith("_seed")
    return {
        "color": "#999999" if seed else plots.colour(name.split("_")[0]),
        "linestyle": "--" if seed or name in (CONTROL, "flash_triton") else "-",
        "linewidth": 3.5 if name == BASELINE else 1.3,
        "alpha": 0.5 if name == BASELINE else 1.0,
        "label": NAMES[name],
    }


def _draw_losses(
    axis: plots.Axes, title: str, across: str, run: Sample, unit: float, **style: object
) -> None:
    """The validation curve against tokens, in units of `unit`."""
    tokens = [step * run["batch_tokens"] / unit for step, _ in run["validation"]]
    axis.plot(tokens, [loss for _, loss in run["validation"]], **style)
    axis.set(title=title, xlabel=across, ylabel="validation loss (nats)")


def draw_tokens(axis: plots.Axes, compared: dict[str, Sample]) -> None:
    """Validation loss against tokens: this panel and the next two are in README's picture too."""
    title = "Loss curve"
    if BASELINE in compared and len(compared) > 1:
        apart = max(gap(run, compared[BASELINE])[0] for run in compared.values())
        title = f"The same curve to {apart:.1g} nats"
    for name, run in compared.items():
        _draw_losses(axis, title, "M tokens", run, 1e6, **_style(name))
    plots.legend(axis)


def draw_clock(axis: plots.Axes, compared: dict[str, Sample]) -> None:
    for name, run in compared.items():
        if speed := run["tokens_per_second"]:
            _draw_losses(axis, "... on the clock", "minutes of training", run, 60 * speed, **_style(name))


def draw_gaps(axis: plots.Axes, compared: dict[str, Sample]) -> None:
    """How far a run is above naive; one of other weights, above the run that differs in nothing else."""
    for name, run in compared.items():
        other = compared.get(dict(SEEDS).get(name, BASELINE))
        if other is None or name == BASELINE:
            continue
        theirs = dict(map(tuple, other["validation"]))
        common = [(step, loss) for step, loss in run["validation"] if step in theirs]
        points = [(step * run["batch_tokens"] / 1e6, loss - theirs[step]) for step, loss in common]
        label = NAMES[name] + (f", minus {NAMES[other['name']]}" if other["name"] != BASELINE else "")
        axis.plot(*zip(*points, strict=True), **{**_style(name), "label": label})
    axis.axhline(0, **{**_style(BASELINE), "label": None})
    axis.set(title="How far apart", xlabel="M tokens", ylabel="validation loss above naive's (nats)")
    plots.legend(axis)


def _context_style(name: str, run: Sample, trained: dict[str, Sample]) -> dict[str, Any]:
    contexts = sorted({each["context"] for each in trained.values()})
    return {
        "color": plots.COLOURS[contexts.index(run["context"]) % len(plots.COLOURS)],
        "linestyle": "--" if name.endswith("_seed") else ":" if name in NAMES else "-",
        "linewidth": 1.3,
        "label": NAMES.get(name) or (None if name.endswith("_seed") else f"{run['context']}"),
    }


def _draw_contexts(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    """A run that diverged is drawn up to its lowest loss."""
    for name, run in trained.items():
        style, lowest = _context_style(name, run, trained), diverged_from(run)
        kept = [each for each in run["validation"] if lowest is None or each[0] <= lowest]
        _draw_losses(
            axis, "Longer context, same tokens", "M tokens", run | {"validation": kept}, 1e6, **style
        )
        if lowest is not None:
            axis.plot(lowest * run["batch_tokens"] / 1e6, kept[-1][1], "x", color=style["color"])
    plots.legend(axis, title="context" + " (x: diverged)" * any(map(diverged_from, trained.values())))


def _draw_norms(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    for name, run in trained.items():
        if norms := run.get("gradient_norms"):
            tokens = [step * run["batch_tokens"] / 1e6 for step, _ in norms]
            axis.plot(tokens, [norm for _, norm in norms], **_context_style(name, run, trained))
    axis.set_yscale("log")
    axis.set(title="Gradient norm before clipping", xlabel="M tokens", ylabel="norm")
    plots.legend(axis, title="context")


def _draw_cut(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    views = [run for run in trained.values() if run.get("cut")]
    learning = [run for run in views if diverged_from(run) is None]
    longest = max(learning or views, key=lambda run: run["context"])
    axis.plot(*zip(*longest["cut"], strict=True), "o-")
    plots.length_axis(axis, [context for context, _ in longest["cut"]])
    title = f"The {longest['context']} model, windows cut"
    axis.set(title=title, xlabel="window", ylabel="validation loss (nats)")


def _draw_positions(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    for name, run in trained.items():
        if not name.endswith("_seed") and run.get("positions") and diverged_from(run) is None:
            _, last, losses = zip(*run["positions"], strict=True)
            shade = _context_style(name, run, trained)["color"]
            axis.plot(last, losses, "o-", color=shade, label=f"{run['context']}", linewidth=1.3)
    axis.set_xscale("log", base=2)
    axis.set(title="By position in the window", xlabel="up to token", ylabel="validation loss (nats)")
    plots.legend(axis, title="context")
