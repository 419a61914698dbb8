"""The perplexity experiment's table, picture and verdicts."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path

from . import plots
from .experiment import Results, Sample, Verdict, judged, pick, text_table

BASELINE = "naive"


def differences(sample: Sample, base: Sample) -> list[float]:
    """|training loss - the baseline's| at every step; at each, both saw the same batch."""
    return [abs(a - b) for a, b in zip(sample["losses"], base["losses"], strict=True)]


def final_loss(sample: Sample) -> float:
    """Validation loss in nats after the last step."""
    return sample["validation"][-1][1]


def _runs(results: Results, part: str) -> list[Sample]:
    return pick(results, kind="run", part=part)


def _compared(results: Results) -> tuple[Sample | None, list[Sample], list[Sample]]:
    """(the baseline, the other backends with the same seed, the baseline with other seeds)."""
    runs = _runs(results, "backends")
    seed = results["settings"]["seeds"][0]
    base = next((run for run in runs if run["backend"] == BASELINE and run["seed"] == seed), None)
    others = [run for run in runs if run["backend"] != BASELINE]
    return base, others, [run for run in runs if run["backend"] == BASELINE and run["seed"] != seed]


def table(results: Results) -> str:
    """Every run; for backends and seeds, also the distance from the baseline."""
    base, others, seeds = _compared(results)
    lines = []
    if base is not None:
        header = ["", "val loss", "perplexity", "bits/byte", f"- {BASELINE}", "mean |diff|", "max |diff|"]
        rows = [_row(f"{BASELINE}, seed {base['seed']}", base, None)]
        rows += [_row(f"{run['backend']}, seed {run['seed']}", run, base) for run in [*others, *seeds]]
        lines += [
            f"backends, context {base['context']}, {base['steps']} steps, {results['settings']['dtype']}",
            text_table(header, rows),
            "diff: of the training loss at every step; seeds differ in their initial weights, not in their data",
            "",
        ]
    if runs := _runs(results, "context"):
        header = ["context", "val loss", "perplexity", "bits/byte", "s"]
        rows = [
            [
                f"{run['context']}",
                f"{final_loss(run):.4f}",
                f"{math.exp(final_loss(run)):.2f}",
                f"{run['validation'][-1][2]:.4f}",
                f"{run['seconds']:.0f}",
            ]
            for run in runs
        ]
        lines += [
            f"contexts, {runs[0]['steps']} steps of equal tokens, the same targets",
            text_table(header, rows),
        ]
    lines += [f"{s['backend']}: {s['refused']}" for s in results["samples"] if s.get("refused")]
    return "\n".join(lines)


def _row(name: str, run: Sample, base: Sample | None) -> list[str]:
    loss = final_loss(run)
    cells = [name, f"{loss:.4f}", f"{math.exp(loss):.2f}", f"{run['validation'][-1][2]:.4f}"]
    if base is None:
        return [*cells, "", "", ""]
    apart = differences(run, base)
    return [*cells, f"{loss - final_loss(base):+.1e}", f"{statistics.mean(apart):.1e}", f"{max(apart):.1e}"]


def draw(results: Results, path: Path) -> None:
    """Training curves, the backends' and seeds' distances from the baseline, and validation loss against context.

    There is no panel for what was not measured.
    """
    base, others, seeds = _compared(results)
    compared, contexts = base is not None and [*others, *seeds], _runs(results, "context")
    panels = sum(map(bool, (base, compared, contexts)))
    with plots.picture(path, max(1, panels), title=f"Loss curves on {results['device']}") as axes:
        free = iter(axes)
        if base:
            _draw_curves(next(free), base, others)
        if compared:
            _draw_differences(next(free), base, others, seeds)
        if contexts:
            _draw_contexts(next(free), contexts)


def _draw_curves(axis: plots.Axes, base: Sample, others: list[Sample]) -> None:
    axis.plot(base["losses"], color=plots.colour(BASELINE), linewidth=4, alpha=0.5, label=BASELINE)
    names = tuple(run["backend"] for run in others)
    for run in others:
        shade = plots.colour(run["backend"], names)
        axis.plot(run["losses"], color=shade, linewidth=1, label=run["backend"])
    axis.set(title="Training loss, same seed and data", xlabel="step", ylabel="nats")
    plots.legend(axis)


def _draw_differences(axis: plots.Axes, base: Sample, others: list[Sample], seeds: list[Sample]) -> None:
    names = tuple(run["backend"] for run in others)
    for run in others:
        shade = plots.colour(run["backend"], names)
        axis.plot(differences(run, base), color=shade, linewidth=1, label=run["backend"])
    for run in seeds:
        label = f"{BASELINE}, other seeds" if run is seeds[0] else None
        axis.plot(differences(run, base), color="#999999", linewidth=1, label=label)
    axis.set_yscale("symlog", linthresh=1e-7)
    axis.set(title=f"|Loss - {BASELINE}'s|, step by step", xlabel="step", ylabel="nats")
    plots.legend(axis)


def _draw_contexts(axis: plots.Axes, runs: list[Sample]) -> None:
    lengths = [run["context"] for run in runs]
    for row, (step, _, _) in enumerate(runs[0]["validation"]):
        losses = [run["validation"][row][1] for run in runs]
        axis.plot(lengths, losses, "o-", color=plots.COLOURS[row % len(plots.COLOURS)], label=f"step {step}")
    plots.length_axis(axis, lengths)
    axis.set(title="Validation loss, same targets", xlabel="context", ylabel="nats")
    plots.legend(axis)


# ---- verdicts ----------------------------------------------------------------------------------------


def judge(results: Results) -> list[Verdict]:
    """C12 and C14."""
    return [*_judge_backends(results), *_judge_context(results)]


def _judge_backends(results: Results) -> list[Verdict]:
    long_run = Verdict(
        "C12",
        "validation perplexity of GPT-2 small on OpenWebText after 400k steps",
        "18.2 with FlashAttention and without",
        why="takes 210 B tokens: experiment=paper/gpt2_small, then `python -m reproduce milestones RUN`",
    )
    base, others, seeds = _compared(results)
    if base is None or not seeds:
        why = "the experiment has no run of two seeds yet"
        return [Verdict("C12", "loss curves of the backends", "the same", why=why), long_run]
    # At first, two seeds differ because of their initial weights rather than because of the training.
    settled = base["steps"] // 4
    spread = statistics.mean(statistics.mean(differences(run, base)) for run in seeds)
    later_spread = statistics.mean(statistics.mean(differences(run, base)[settled:]) for run in seeds)
    final = statistics.mean(abs(final_loss(run) - final_loss(base)) for run in seeds)
    found = []
    for run in others:
        apart, val = differences(run, base), abs(final_loss(run) - final_loss(base))
        mean, later = statistics.mean(apart), statistics.mean(apart[settled:])
        found.append(
            judged(
                "C12",
                f"loss curve of {run['backend']} against {BASELINE}, {run['steps']} steps, context {run['context']}",
                "the curves coincide",
                f"mean |difference| {mean:.1e}, max {max(apart):.1e}, validation {val:.1e} nats",
                None,
                mean < spread and later < later_spread and val <= final,
                f"closer than two seeds, which are {spread:.1e} apart in the mean and {final:.1e} in validation; "
                f"from step {settled} on, when the initial weights no longer dominate, {later:.1e} against "
                f"{later_spread:.1e}",
                results["device"],
            )
        )
    if chosen := results["settings"]["backends"]:
        why = f"this run was of backends={','.join(chosen)} beside {BASELINE}"
        found.append(Verdict("C12", "loss curves of the other backends", "the curves coincide", why=why))
    return [*found, long_run]


def _judge_context(results: Results) -> list[Verdict]:
    paper = "18.2 at 1k, 17.6 at 2k, 17.5 at 4k (perplexity)"
    runs = sorted(_runs(results, "context"), key=lambda run: run["context"])
    if len(runs) < 2:
        return [
            Verdict("C14", "validation loss against context", paper, why="fewer than two contexts were run")
        ]
    shortest, longest = runs[0], runs[-1]
    what = f"validation loss, context {longest['context']} minus context {shortest['context']}"
    ours = f"{final_loss(longest) - final_loss(shortest):+.3f} nats"
    ordered = all(final_loss(long) < final_loss(short) for short, long in pairwise(runs))
    # Early in training a longer context learns more slowly, as it sees fewer sequences: the gap's trend says more.
    steps = zip(shortest["validation"], longest["validation"], strict=True)
    gaps = ", ".join(f"{long[1] - short[1]:+.3f} at step {short[0]}" for short, long in steps)
    why = (
        f"a small model and few tokens, so only the direction counts; the gap: {gaps}; every step to a longer "
        f"context {'lowers' if ordered else 'does not lower'} the loss"
    )
    passed = final_loss(longest) < final_loss(shortest)
    return [judged("C14", what, paper, ours, None, passed, why, results["device"])]
