"""The loss experiment's table, picture and verdicts."""

from __future__ import annotations

import statistics
from pathlib import Path

from . import plots
from .attention_figures import milliseconds
from .experiment import NOT_COMPARABLE, NOT_STATED, Results, Sample, Verdict, own_aim, pick, text_table

OURS, EAGER, COMPILED, LIGER = "fused", "eager", "compiled", "liger"
PHASES = ("forward", "backward")
# The fused loss's peak memory may be at most 3 times the size of inputs and gradients, which it includes. With one
# 16-bit copy of the logits it would be 14 times at 65,536 rows, and 6 times at 16,384.
MOST_MEMORY = 3


def memory_of(results: Results, rows: int, name: str) -> Sample:
    """The memory sample of a timed contender."""
    return pick(results, kind="memory", rows=rows, contender=name)[0]


def table(results: Results) -> str:
    """Every contender's time, TFLOP/s, peak memory and errors, and which were left out and why."""
    settings, lines = results["settings"], []
    for sample in pick(results, kind="time"):
        flops = 3 * 2 * sample["rows"] * settings["width"] * settings["padded_vocab"]
        rows = []
        for name, phases in sample["ms"].items():
            ms = milliseconds(sample, name, "both")
            split = [f"{statistics.median(each):.2f}" for each in phases.values()]
            peak = memory_of(results, sample["rows"], name)["peak_bytes"] / 2**30
            rows.append([name, f"{ms:.2f}", *split, f"{flops / ms / 1e9:.0f}", f"{peak:.2f}"])
        header = [f"{sample['rows']} rows", "ms", *PHASES, "TFLOP/s", "peak GiB"]
        lines += [text_table(header, rows), ""]
    for sample in results["samples"]:
        who = " ".join([sample.get("contender", "all"), sample.get("version", "")]).strip()
        where = f"{who}, {sample.get('rows', settings['check_rows'])} rows"
        if why := why_missing(sample):
            lines.append(f"left out: {where}: {why}")
        elif "errors" in sample:
            errors = ", ".join(f"{part} {error:.1e}" for part, error in sample["errors"].items())
            lines.append(f"{where}: relative errors {errors}")
    return "\n".join(lines)


def why_missing(sample: Sample) -> str | None:
    """Why the contender drops out at this sample; None if it does not."""
    if sample.get("out_of_memory"):
        return "out of memory"
    if sample.get("passed") is False:
        return f"wrong, so not timed: errors {sample['errors']}, limits {sample['limits']}"
    return sample.get("refused") or sample.get("failed")


def draw(results: Results, path: Path) -> None:
    """Time by phase and peak memory of every contender, a pair of panels for each number of rows."""
    timed = pick(results, kind="time")
    panels = max(1, 2 * len(timed))
    with plots.picture(path, panels, columns=2, title=f"Head and loss on {results['device']}") as axes:
        for sample, times, peaks in zip(timed, axes[::2], axes[1::2], strict=False):
            names, left = list(sample["ms"]), [0.0] * len(sample["ms"])
            for phase in PHASES:
                widths = [statistics.median(sample["ms"][name][phase]) for name in names]
                times.barh(names, widths, left=left, height=0.6, label=phase)
                left = [a + b for a, b in zip(left, widths, strict=True)]
            memory = [memory_of(results, sample["rows"], name) for name in names]
            gib = [each["peak_bytes"] / 2**30 for each in memory]
            peaks.barh(names, gib, height=0.6, color=plots.COLOURS[2])
            logits = memory[0]["logits_bytes"] / 2**30
            # behind the bars and their labels
            peaks.axvline(logits, color="#888888", linestyle=":", zorder=0.9)
            memory_label = "GiB at the peak (dotted: the logits alone)"
            for axis, values, what in ((times, left, "ms"), (peaks, gib, memory_label)):
                for place, value in enumerate(values):
                    plots.beside(axis, value, place, f"{value:.3g}", fontsize=8)
                axis.set_xlim(0, 1.2 * max(values))
                axis.set_ylim(len(names) - 0.5, -0.5)
                axis.set_xlabel(what)
                axis.set_title(f"{sample['rows']} rows")
                axis.grid(axis="y", visible=False)
                plots.legend(axis, loc="best")


def judge(results: Results) -> list[Verdict]:
    """C11 is about whole training steps; these are this project's own aims for the head and loss alone."""
    device, verdicts = results["device"], []
    for sample in pick(results, kind="time"):
        if OURS not in sample["ms"]:
            continue
        where = f"head and loss, {sample['rows']} rows"
        both = {name: milliseconds(sample, name, "both") for name in sample["ms"]}
        ratios = {name: ms / both[OURS] for name, ms in both.items()}
        if ratio := ratios.get(COMPILED):
            what = f"{where}: torch.compile's time over ours"
            verdicts.append(own_aim("C11", what, f"{ratio:.2f}x", "1x at least", ratio >= 1, device))
        if ratio := ratios.get(LIGER):
            what, why = f"{where}: Liger-Kernel's time over ours", "it predicts the vocabulary's padding too"
            shown = (NOT_STATED, f"{ratio:.2f}x", None)
            verdicts.append(Verdict("C11", what, *shown, NOT_COMPARABLE, why, device))
        memory = memory_of(results, sample["rows"], OURS)
        ratio, logits = (
            memory[key] / memory["inputs_and_gradients_bytes"] for key in ("peak_bytes", "logits_bytes")
        )
        what = f"{where}: peak memory over inputs and gradients"
        why = f"the logits alone, in 16 bits, are {logits:.1f}x"
        met = ratio <= MOST_MEMORY
        verdicts.append(own_aim("C11", what, f"{ratio:.1f}x", f"{MOST_MEMORY}x at most", met, device, why))
    return verdicts
