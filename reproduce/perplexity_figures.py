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
    parts = [_runs_table(results, "gpt2"), _runs_table(results, "recipe"), _numerics_table(results)]
    parts += [_context_table(results), _stability_table(results), _extend_table(results)]
    refused = [f"{s['name']}: {s['failed']}" for s in results["samples"] if s.get("failed") and "name" in s]
    return "\n\n".join([*filter(None, parts), *refused])


def _runs_table(results: Results, part: str) -> str:
    compared = runs(results, part)
    if not compared:
        return ""
    base = compared.get(BASELINE) or compared.get("recipe_naive")
    header = [part, "steps", "val loss", "perplexity", "- naive", "second half", "k tokens/s", "GiB"]
    rows = []
    for name, run in compared.items():
        apart = ["", ""]
        if base and run is not base:
            apart = [f"{each:.1e}" for each in gap(run, base)]
        loss, speed = final_loss(run), run["tokens_per_second"] or math.nan
        rows.append(
            [
                NAMES[name],
                f"{run.get('partial', run['steps'])}{' (cut)' * ('partial' in run)}",
                *(f"{loss:.4f}", f"{math.exp(loss):.2f}", *apart),
                *(f"{speed / 1e3:.0f}", f"{run['peak_gib'] or 0:.1f}"),
            ]
        )
    tokens = {run["steps"] * run["batch_tokens"] for run in compared.values()}
    below = f"{max(tokens) / 1e6:.0f} M tokens a run; |difference| of the validation loss in nats, at the end and on"
    return text_table(header, rows) + f"\n{below} average over the second half"


def _numerics_table(results: Results) -> str:
    lines = []
    for sample in pick(results, kind="numerics"):
        rows, base = sample["rows"], _exact_loss(sample)
        header = [
            f"weights {WEIGHTS[sample['when']]}",
            "dtype",
            "loss",
            "- naive float32",
            "gradients: worst",
            "median",
        ]
        cells = []
        for row in rows:
            if "refused" in row:
                cells.append([row["backend"], row["dtype"], row["refused"][:60], "", "", ""])
                continue
            errors = row["gradient_errors"]
            worst = max(errors, key=errors.get)
            cells.append(
                [
                    *(row["backend"], row["dtype"], f"{row['loss']:.5f}", f"{row['loss'] - base:+.1e}"),
                    *(f"{errors[worst]:.1e} ({worst})", f"{statistics.median(errors.values()):.1e}"),
                ]
            )
        lines.append(
            text_table(header, cells)
            + f"\nloss of {sample['tokens']:,} validation tokens; gradients of {sample['gradient_tokens']:,} "
            "training tokens, |g - g64| / |g64| by tensor"
        )
    return "\n\n".join(lines)


def _exact_loss(numerics: Sample) -> float:
    return next(r["loss"] for r in numerics["rows"] if (r["backend"], r["dtype"]) == (BASELINE, "float32"))


def _context_table(results: Results) -> str:
    trained = runs(results, "context")
    if not trained:
        return ""
    contexts = sorted({run["context"] for run in trained.values()})
    header = ["context", "steps", "val loss", "perplexity", *(f"cut to {c}" for c in contexts)]
    rows = []
    for name, run in sorted(trained.items(), key=lambda item: item[1]["context"]):
        loss, cut = final_loss(run), dict(map(tuple, run.get("cut", [])))
        rows.append(
            [f"{run['context']}{', other weights' * name.endswith('_seed')}"]
            + [_steps(run), f"{loss:.4f}", f"{math.exp(loss):.2f}"]
            + [f"{cut[c]:.4f}" if c in cut else "" for c in contexts]
        )
    return (
        text_table(header, rows) + "\nthe same tokens at every step; every validation token is predicted once"
    )


def _steps(run: Sample) -> str:
    """How far a run came, and from where on it was no longer learning."""
    lowest = diverged_from(run)
    return f"{run.get('partial', run['steps'])}{'' if lowest is None else f' (diverged from {lowest} on)'}"


def _stability_table(results: Results) -> str:
    again = runs(results, "stability")
    if not again:
        return ""
    longest = max(runs(results, "context").values(), key=lambda run: run["context"], default=None)
    rows = []
    for run in [*([longest] if longest else []), *again.values()]:
        lowest = min(loss for _, loss in run["validation"])
        speed = run["tokens_per_second"] or math.nan
        what = NAMES.get(run["name"], f"as context {run['context']}")
        rows.append([what, _steps(run), f"{lowest:.4f}", f"{final_loss(run):.4f}", f"{speed / 1e3:.0f}"])
    return text_table(["longest context again", "steps", "lowest val loss", "last", "k tokens/s"], rows)


def _extend_table(results: Results) -> str:
    extended = runs(results, "extend")
    rows = [
        [f"{run['context']}", f"{run['steps']}", *(f"{loss:.4f}" for _, loss in run["validation"][-4:])]
        for run in sorted(extended.values(), key=lambda run: run["context"])
    ]
    if not rows:
        return ""
    header = ["extended to", "steps", *(f"val loss {n}/4" for n in range(1, 5))]
    return text_table(header, [row + [""] * (len(header) - len(row)) for row in rows])


# ---- picture -----------------------------------------------------------------------------------------


def draw(results: Results, path: Path) -> None:
    """One message a panel: same curve; another clock; how close; then longer context, trained, cut, by position.

    There is no panel for what was not measured.
    """
    compared, trained = runs(results, "gpt2"), runs(results, "context")
    panels = []
    if compared:
        panels += [draw_tokens, draw_clock]
    if BASELINE in compared and len(compared) > 1:
        panels += [draw_gaps]
    if trained:
        panels += [_draw_contexts]
        trained |= runs(results, "stability")
    if any(run.get("gradient_norms") for run in trained.values()):
        panels += [_draw_norms]
    if any(run.get("cut") for run in trained.values()):
        panels += [_draw_cut, _draw_positions]
    with plots.picture(path, max(1, len(panels)), title=f"Perplexity on {results['device']}") as axes:
        for axis, panel in zip(axes, panels, strict=False):
            panel(axis, compared if panel in (draw_tokens, draw_clock, draw_gaps) else trained)


def _style(name: str) -> dict:
    attention = name.split("_")[0]
    dashed = name in (CONTROL, "flash_triton") or name.endswith("_seed")
    width = 3.5 if name == BASELINE else 1.3
    return {
        "color": "#999999" if name.endswith("_seed") else plots.colour(attention),
        "linestyle": "--" if dashed else "-",
        "linewidth": width,
        "alpha": 0.5 if name == BASELINE else 1.0,
        "label": NAMES[name],
    }


def draw_tokens(axis: plots.Axes, compared: dict[str, Sample]) -> None:
    """Validation loss against tokens: this panel and the next two are in README's picture too."""
    for name, run in compared.items():
        tokens = [step * run["batch_tokens"] / 1e6 for step, _ in run["validation"]]
        axis.plot(tokens, [loss for _, loss in run["validation"]], **_style(name))
    title = "Loss curve"
    if BASELINE in compared and len(compared) > 1:
        apart = max(gap(run, compared[BASELINE])[0] for run in compared.values())
        title = f"The same curve to {apart:.1g} nats"
    axis.set(title=title, xlabel="M tokens", ylabel="validation loss (nats)")
    plots.legend(axis)


def draw_clock(axis: plots.Axes, compared: dict[str, Sample]) -> None:
    for name, run in compared.items():
        if speed := run["tokens_per_second"]:
            minutes = [step * run["batch_tokens"] / speed / 60 for step, _ in run["validation"]]
            axis.plot(minutes, [loss for _, loss in run["validation"]], **_style(name))
    axis.set(title="... on the clock", xlabel="minutes of training", ylabel="validation loss (nats)")


def draw_gaps(axis: plots.Axes, compared: dict[str, Sample]) -> None:
    """How far a run is above naive; one of other weights, above the run that differs in nothing else."""
    for name, run in compared.items():
        other = compared.get(dict(SEEDS).get(name, BASELINE))
        if other is None or name == BASELINE:
            continue
        theirs = dict(map(tuple, other["validation"]))
        points = [
            (step * run["batch_tokens"] / 1e6, loss - theirs[step])
            for step, loss in run["validation"]
            if step in theirs
        ]
        label = f"{NAMES[name]}, minus {NAMES[other['name']]}" if other["name"] != BASELINE else NAMES[name]
        axis.plot(*zip(*points, strict=True), **{**_style(name), "label": label})
    axis.axhline(0, **{**_style(BASELINE), "label": None})
    axis.set(title="How far apart", xlabel="M tokens", ylabel="validation loss above naive's (nats)")
    plots.legend(axis)


def _draw_contexts(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    """A run that diverged is drawn up to its lowest loss."""
    for name, run in trained.items():
        lowest = diverged_from(run)
        curve = [(step * run["batch_tokens"] / 1e6, loss) for step, loss in run["validation"]
                 if lowest is None or step <= lowest]  # fmt: skip
        axis.plot(*zip(*curve, strict=True), **_context_style(name, run, trained))
        if lowest is not None:
            axis.plot(*curve[-1], "x", color=_context_style(name, run, trained)["color"])
    axis.set(title="Longer context, same tokens", xlabel="M tokens", ylabel="validation loss (nats)")
    plots.legend(
        axis, title="context (x: diverged)" if any(map(diverged_from, trained.values())) else "context"
    )


def _context_style(name: str, run: Sample, trained: dict[str, Sample]) -> dict[str, Any]:
    contexts = sorted({each["context"] for each in trained.values()})
    label = NAMES.get(name) or (None if name.endswith("_seed") else f"{run['context']}")
    return {
        "color": plots.COLOURS[contexts.index(run["context"]) % len(plots.COLOURS)],
        "linestyle": "--" if name.endswith("_seed") else ":" if name in NAMES else "-",
        "linewidth": 1.3,
        "label": label,
    }


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
    lengths = [context for context, _ in longest["cut"]]
    axis.plot(lengths, [loss for _, loss in longest["cut"]], "o-")
    plots.length_axis(axis, lengths)
    axis.set(
        title=f"The {longest['context']} model, windows cut", xlabel="window", ylabel="validation loss (nats)"
    )


def _draw_positions(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    contexts = sorted({run["context"] for run in trained.values()})
    for name, run in trained.items():
        if name.endswith("_seed") or not run.get("positions") or diverged_from(run) is not None:
            continue
        shade = plots.COLOURS[contexts.index(run["context"]) % len(plots.COLOURS)]
        axis.plot(
            [last for _, last, _ in run["positions"]],
            [loss for _, _, loss in run["positions"]],
            "o-", color=shade, label=f"{run['context']}", linewidth=1.3,
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set(title="By position in the window", xlabel="up to token", ylabel="validation loss (nats)")
    plots.legend(axis, title="context")
