"""The perplexity experiment's table, picture and verdicts."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path

from . import plots
from .experiment import Results, Sample, Verdict, judged, pick, text_table

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
}
# Set down before the first run: as close as the same mathematics rounded in another order, with a factor for chance.
CONTROL_FACTOR = 2.0


def runs(results: Results, part: str) -> dict[str, Sample]:
    """The runs of a part by name, whole or cut after an evaluation."""
    return {run["name"]: run for run in pick(results, kind="run", part=part) if run["validation"]}


def compares(results: Results) -> bool:
    """Whether there are curves of naive and of flash to be laid over each other."""
    return {"naive", "flash"} <= runs(results, "gpt2").keys()


def final_loss(run: Sample) -> float:
    """Validation loss in nats after the last step."""
    return run["validation"][-1][1]


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
    parts += [_context_table(results), _extend_table(results)]
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
            f"weights at the {sample['when']}",
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
            + [f"{run.get('partial', run['steps'])}", f"{loss:.4f}", f"{math.exp(loss):.2f}"]
            + [f"{cut[c]:.4f}" if c in cut else "" for c in contexts]
        )
    return (
        text_table(header, rows) + "\nthe same tokens at every step; every validation token is predicted once"
    )


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
    if any(run.get("cut") for run in trained.values()):
        panels += [_draw_cut, _draw_positions]
    with plots.picture(path, max(1, len(panels)), title=f"Perplexity on {results['device']}") as axes:
        for axis, panel in zip(axes, panels, strict=False):
            panel(axis, trained if panel in (_draw_contexts, _draw_cut, _draw_positions) else compared)


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
    contexts = sorted({run["context"] for run in trained.values()})
    for name, run in trained.items():
        shade = plots.COLOURS[contexts.index(run["context"]) % len(plots.COLOURS)]
        tokens = [step * run["batch_tokens"] / 1e6 for step, _ in run["validation"]]
        seed = name.endswith("_seed")
        label = None if seed else f"{run['context']}"
        axis.plot(
            tokens,
            [loss for _, loss in run["validation"]],
            "--" if seed else "-",
            color=shade,
            label=label,
            linewidth=1.3,
        )
    axis.set(title="Longer context, same tokens", xlabel="M tokens", ylabel="validation loss (nats)")
    plots.legend(axis, title="context")


def _draw_cut(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    longest = max((run for run in trained.values() if run.get("cut")), key=lambda run: run["context"])
    lengths = [context for context, _ in longest["cut"]]
    axis.plot(lengths, [loss for _, loss in longest["cut"]], "o-")
    plots.length_axis(axis, lengths)
    axis.set(
        title=f"The {longest['context']} model, windows cut", xlabel="window", ylabel="validation loss (nats)"
    )


def _draw_positions(axis: plots.Axes, trained: dict[str, Sample]) -> None:
    contexts = sorted({run["context"] for run in trained.values()})
    for name, run in trained.items():
        if name.endswith("_seed") or not run.get("positions"):
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


# ---- verdicts ----------------------------------------------------------------------------------------


def judge(results: Results) -> list[Verdict]:
    """C12 and C14."""
    long_run = Verdict(
        "C12",
        "validation perplexity of GPT-2 small on OpenWebText after 400k steps",
        "18.2 with FlashAttention and without",
        why="takes 210 B tokens: experiment=paper/gpt2_small, then `python -m reproduce milestones RUN`",
    )
    return [
        *_judge_runs(results),
        *_judge_recipe(results),
        *_judge_numerics(results),
        long_run,
        *_judge_context(results),
        *_judge_extended(results),
    ]


def _whole(compared: dict[str, Sample]) -> dict[str, Sample]:
    return {name: run for name, run in compared.items() if "partial" not in run}


def _judge_runs(results: Results) -> list[Verdict]:
    compared = _whole(runs(results, "gpt2"))
    seeds = seed_gap(compared)
    if BASELINE not in compared or CONTROL not in compared or seeds is None:
        why = "needs runs of naive with two micro-batches, and of one attention with two seeds"
        return [Verdict("C12", "loss curves of the backends", "the same", why=why)]
    base, control = compared[BASELINE], gap(compared[CONTROL], compared[BASELINE])
    found = []
    for name in ("flash", "flash_triton", "sdpa", "sdpa_math"):
        if name not in compared:
            continue
        end, later = gap(compared[name], base)
        passed = all(
            ours <= CONTROL_FACTOR * c and ours < s
            for ours, c, s in zip((end, later), control, seeds, strict=True)
        )
        why = (
            f"the bound, set before the run: at most {CONTROL_FACTOR:g} times naive against itself with half the "
            f"micro-batch ({control[0]:.4f}, {control[1]:.4f}), and less than other initial weights "
            f"({seeds[0]:.4f}, {seeds[1]:.4f})"
        )
        if not passed:
            why += _whose_rounding(results, name)
        side = "lower" if final_loss(compared[name]) < final_loss(base) else "higher"
        tokens = base["steps"] * base["batch_tokens"] / 1e6
        found.append(
            judged(
                "C12",
                f"validation curve of {NAMES[name]} against naive, {base['parameters'] / 1e6:.0f} M parameters, "
                f"{tokens:.0f} M tokens",
                "the curves coincide",
                f"{math.exp(final_loss(compared[name])):.2f} and {math.exp(final_loss(base)):.2f} perplexity: "
                f"{end:.4f} nats {side} at the end, {later:.4f} apart over the second half",
                None,
                passed,
                why,
                results["device"],
            )
        )
    return found


def _whose_rounding(results: Results, name: str) -> str:
    """Which of naive and the backend `name` has the larger gradient error at the end of training, in bfloat16."""
    errors = {
        row["backend"]: statistics.median(row["gradient_errors"].values())
        for sample in pick(results, kind="numerics", when="end")
        for row in sample["rows"]
        if row["dtype"] == "bfloat16" and "refused" not in row
    }
    backend = {"flash_triton": "flash, portable"}.get(name, name)
    if not {BASELINE, backend} <= errors.keys():
        return ""
    return (
        f". Gradients of the trained model in bfloat16 are {errors[BASELINE]:.1%} from float64's with naive, which "
        f"rounds its scores to bfloat16, and {errors[backend]:.1%} with {NAMES[name]}"
    )


def _judge_recipe(results: Results) -> list[Verdict]:
    compared = _whole(runs(results, "recipe"))
    what = "validation curve of flash against naive in the paper's recipe (dropout 0.1, float16, one dropout mask)"
    seeds = seed_gap(_whole(runs(results, "gpt2")))
    if len(compared) < 2 or seeds is None:
        return [Verdict("C12", what, "the curves coincide", why="part `recipe` was not run to its end")]
    end, later = gap(compared["recipe_flash"], compared["recipe_naive"])
    ours = f"{end:.4f} nats apart at the end, {later:.4f} over the second half"
    why = f"less than other initial weights ({seeds[0]:.4f}, {seeds[1]:.4f})"
    passed = end < seeds[0] and later < seeds[1]
    return [judged("C12", what, "the curves coincide", ours, None, passed, why, results["device"])]


def _judge_numerics(results: Results) -> list[Verdict]:
    """16-bit flash against 16-bit naive: the same loss, and no gradient further from exact than by a factor."""
    found = []
    for sample in pick(results, kind="numerics"):
        rows = {(row["backend"], row["dtype"]): row for row in sample["rows"] if "refused" not in row}
        for dtype in ("bfloat16", "float16"):
            if ("flash", dtype) not in rows or (BASELINE, dtype) not in rows:
                continue
            ours, theirs = rows["flash", dtype]["gradient_errors"], rows[BASELINE, dtype]["gradient_errors"]
            worst = max(ours, key=lambda name: ours[name] / theirs[name])
            ratio = ours[worst] / theirs[worst]
            apart = rows["flash", dtype]["loss"] - rows[BASELINE, dtype]["loss"]
            found.append(
                judged(
                    "C12",
                    f"loss and gradients at the {sample['when']} of training, flash against naive, {dtype}",
                    "exact attention: the same",
                    f"loss {apart:+.1e} nats apart; gradient errors against float64 at most {ratio:.2f} times "
                    f"naive's ({worst})",
                    None,
                    ratio <= CONTROL_FACTOR and abs(apart) < 1e-3,
                    f"at most {CONTROL_FACTOR:g} times naive's error in every tensor, and 0.001 nats",
                    results["device"],
                )
            )
    return found


def _judge_extended(results: Results) -> list[Verdict]:
    extended = _whole(runs(results, "extend"))
    what = "GPT-2 small from one checkpoint, its context extended, on equal further tokens"
    paper = "18.2 at 1k, 17.6 at 2k, 17.5 at 4k (perplexity)"
    if len(extended) < 2:
        return [Verdict("C14", what, paper, why="part `extend` was not run to its end")]
    ordered = sorted(extended.values(), key=lambda run: run["context"])
    ours = ", ".join(f"{math.exp(final_loss(run)):.2f} at {run['context']}" for run in ordered)
    passed = all(final_loss(long) < final_loss(short) for short, long in pairwise(ordered))
    why = (
        "every step to a longer context lowers it"
        if passed
        else "not every step to a longer context lowers it"
    )
    return [judged("C14", what, paper, ours, None, passed, why, results["device"])]


def _judge_context(results: Results) -> list[Verdict]:
    paper = "18.2 at 1k, 17.6 at 2k, 17.5 at 4k (perplexity)"
    trained = _whole(runs(results, "context"))
    by_length = {run["context"]: run for name, run in trained.items() if not name.endswith("_seed")}
    if len(by_length) < 2:
        return [
            Verdict("C14", "validation loss against context", paper, why="fewer than two contexts were run")
        ]
    shortest, longest = by_length[min(by_length)], by_length[max(by_length)]
    fall = final_loss(shortest) - final_loss(longest)
    gaps = [abs(final_loss(trained[f"context_{c}_seed"]) - final_loss(run)) for c, run in by_length.items()
            if f"context_{c}_seed" in trained]  # fmt: skip
    spread = f"two seeds differ by {max(gaps):.3f}" if gaps else "no second seed was run"
    losses = ", ".join(f"{c}: {final_loss(by_length[c]):.3f}" for c in sorted(by_length))
    cut, positions = longest["cut"], longest["positions"]
    cut_fall, late_fall = cut[0][1] - cut[-1][1], positions[-2][2] - positions[-1][2]
    shown = [name for name, value in (("trained contexts", fall - max(gaps, default=0.0)), ("cut windows", cut_fall),
                                      ("position", late_fall)) if value > 0]  # fmt: skip
    why = (
        f"validation loss by context: {losses}; {spread}. The {longest['context']} model with windows cut from "
        f"{cut[-1][0]} to {cut[0][0]} loses {cut_fall:.3f}; from the last octave of positions to the one before, "
        f"{late_fall:+.3f}. It shows in: {', '.join(shown) or 'none of them'}"
    )
    what = f"validation loss, context {longest['context']} minus context {shortest['context']}"
    passed = fall > max(gaps, default=0.0)
    return [judged("C14", what, paper, f"{-fall:+.3f} nats", None, passed, why, results["device"])]
