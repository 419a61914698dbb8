"""What a comparison of runs shows as text: a table, what must be known before believing it, what differs besides."""

from collections.abc import Iterable

from training.console import SPREAD, changes

from ..common import text_table
from . import seeds
from .runs import (
    PHASE_RATIO,
    PHASE_SHARE,
    STEP_PHASES,
    Run,
    differing_environment,
    differing_settings,
    same_tokens,
    unexplained_phases,
)

HEADER = ("run", "val loss", "perplexity", "bits/byte", "tokens/s", "step ms", "data / fwd+bwd / opt", "MFU")
HEADER += ("peak GiB", "time", "state")


def table(runs: list[Run]) -> list[list[str]]:
    """A row of cells for each run, in HEADER's columns; ratios and differences are relative to its baseline."""
    return [_row(first, run) for first, run in zip(seeds.baselines(runs), runs, strict=True)]


def _row(first: Run, run: Run) -> list[str]:
    speeds = [each.speed("perf/tokens_per_second") for each in (first, run)]
    peaks = [each.peak_memory for each in (first, run)]
    alike = None not in peaks and peaks[0][0] == peaks[1][0]
    split = run.step_split()
    perplexity = run.last("val/perplexity") if same_tokens(first, run) else None
    return [
        run.label,
        _number(run.last("val/loss"), ".4f") + _loss_difference(first, run),
        _number(perplexity, ".2f"),
        _number(run.last("val/bits_per_byte"), ".3f"),
        _number(speeds[1], ",.0f") + (_ratio(speeds) if run is not first else ""),
        _number(run.speed("perf/step_ms"), ".1f"),
        _phases(split) if split else "-",
        _number(run.speed("perf/mfu"), ".1%"),
        _number(peaks[1] and peaks[1][1], ".2f")
        + (_ratio([gib for _, gib in peaks]) if alike and run is not first else ""),
        _duration(run.last("seconds")),
        state(run),
    ]


def _phases(split: dict[str, float]) -> str:
    exchange = f" (exchange {split['exchange']:.2f})" if "exchange" in split else ""
    return " / ".join(f"{split[name]:.2f}" for name in STEP_PHASES) + exchange


def _ratio(pair: list[float | None]) -> str:
    """Of ours to the first run's, in brackets."""
    return f" ({pair[1] / pair[0]:.2f}x)" if all(pair) else ""


def state(run: Run) -> str:
    if run.finished:
        return "finished"
    if not run.rows:
        return "no metrics"
    steps, last = run.config.get("trainer.steps"), run.rows[-1]
    if last["step"] == steps:
        return f"all {steps:,} steps done, but " + ("no summary" if "val/loss" in last else "not evaluated")
    return f"unfinished, step {last['step']:,.0f}" + (f" of {steps:,}" if steps else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _loss_difference(first: Run, run: Run) -> str:
    """Validation loss minus the first run's: at the end if both have as many steps, else at the last step at which
    both predicted the same tokens."""
    if run is first or run.last("val/loss") is None:
        return ""
    if not same_tokens(first, run):
        return " (other tokens)"
    ends = [each.summary.get("val/loss") for each in (first, run)]
    if None not in ends and first.summary.get("steps") == run.summary.get("steps"):
        return f" ({_signed(ends[1] - ends[0])})"
    ours, theirs = (each.evaluations("step") for each in (run, first))
    common = ours.keys() & theirs.keys()
    if not common:
        return ""
    last = max(common, key=lambda each: each[0])
    return f" ({_signed(ours[last] - theirs[last])} at step {last[0]:,.0f})"


def _signed(difference: float) -> str:
    return f"{difference:+.2g}" if difference else "equal"


# ---- what else differs -------------------------------------------------------------------------------


def warnings(runs: list[Run]) -> list[str]:
    """What a reader must know before believing the table, one sentence each."""

    def named(those: Iterable[Run]) -> str:
        return ", ".join(run.label for run in those)

    said = []
    if seeds.is_sweep(runs):
        if alone := named(run for run, match in zip(runs, seeds.matches(runs), strict=True) if not match):
            said.append(
                f"without a run of {runs[0].attention} with equal settings, so not compared: {alone}."
            )
    elif seeds.attentions(runs) > 1 and (settings := differing_settings(runs)):
        said.append(
            f"the runs differ in more than attention: {', '.join(settings)}. So their differences are not due to "
            "attention alone."
        )
    if environment := differing_environment(runs):
        said.append(f"they ran in different environments: {', '.join(environment)}.")
    if silent := named(run for run in runs if not run.config):
        said.append(f"settings unknown for: {silent}.")
    if silent := named(run for run in runs if not run.environment):
        said.append(f"environment unknown for: {silent}.")
    if other := named(run for run in runs if not same_tokens(runs[0], run)):
        said.append(f"losses are not compared: {other} may have predicted other tokens than {runs[0].label}.")
    if unfinished := named(run for run in runs if not run.finished):
        said.append(f"not finished: {unfinished}; their figures cover what has run so far.")
    if resumed := named(run for run in runs if run.config.get("trainer.resume") and not run.whole):
        said.append(
            f"resumed: {resumed}; curves, speed and memory cover only the part since then, time all of the training."
        )
    said += [
        f"after step {step:,} {run.label} was resumed with {changes(changed)}: its losses come from both settings."
        for run in runs
        for step, changed in run.resumed.items()
        if changed
    ]
    if interpreted := named(run for run in runs if run.interpreted):
        said.append(
            f"Triton's kernels were interpreted, not compiled (TRITON_INTERPRET=1): {interpreted}. The speed of "
            "their Triton kernels is that of the interpreter."
        )
    said += _noise(runs)
    if len(runs) == 1:
        said.append("only one run was given: name two or more to compare.")
    return said


def _noise(runs: list[Run]) -> list[str]:
    """Warnings about speeds that other work on the machine seems to have disturbed."""
    said = []
    ranges = [(run.label, *run.speed_range) for run in runs if run.speed_range]
    if varied := [
        f"{label} ({slow:,.0f} to {fast:,.0f})" for label, slow, fast in ranges if fast > SPREAD * slow
    ]:
        said.append(
            f"tokens/s varied more than {SPREAD:g}x within a run: {', '.join(varied)}. Other programs used the "
            "machine; run again before trusting a ratio."
        )
    apart: dict[str, list[str]] = {}
    for first, run in zip(seeds.baselines(runs), runs, strict=True):
        for phase, (theirs, ours) in unexplained_phases(first, run).items():
            told = f"{ours:.2f} ms of a step in {run.label} and {theirs:.2f} in {first.label}"
            apart.setdefault(phase, []).append(told)
    said += [
        f"{phase} took {', '.join(told)}: more than {PHASE_RATIO:g}x apart, by over {PHASE_SHARE:.0%} of a step, "
        "which attention does not explain. Something else slowed one of them; run again before trusting a ratio."
        for phase, told in apart.items()
    ]
    return said


def notes(runs: list[Run]) -> list[str]:
    """How to read the figures, one sentence each."""
    first = f"the run of {runs[0].attention} with equal settings" if seeds.is_sweep(runs) else runs[0].label
    said = [f"ratios and differences are relative to {first}."] if len(runs) > 1 else []
    if seeds.is_sweep(runs) and any(seeds.PLUS_MINUS in cell for row in seeds.table(runs) for cell in row):
        said.append(
            f"{seeds.PLUS_MINUS} is the standard deviation of the runs, or of their differences. Whether these are "
            "more than noise is told by the gap between seeds and the 95 % confidence interval of their mean."
        )
    if seeds.is_sweep(runs) and any(len(group.pairs) > 1 for group in seeds.groups(runs)):
        said.append("of several runs, the ratio of tokens/s is the geometric mean of their pairs' ratios.")
    if len({run.attention for run in runs}) > 1 and not seeds.is_sweep(runs):
        said.append(
            "whether a difference of losses is more than noise is not known: no two runs differ in their seed alone "
            "with a match in another attention. Add seeds: python train.py -m attention="
            f"{','.join(dict.fromkeys(run.attention for run in runs))} seed=1,2,3"
        )
    said += [
        f"speed and memory of {run.label} cover only its part after step {run.began:,}."
        for run in runs
        if run.began and run.whole
    ]
    if any(run.peak_memory and run.peak_memory[0] == "resident" for run in runs):
        said.append(
            "memory on a CPU is the peak resident memory of the process: Python, its libraries and what earlier "
            "runs of the same sweep left."
        )
    if splits := [split for run in runs if (split := run.step_split())]:
        said.append(
            "data / fwd+bwd / opt are ms per step: to get the batch onto the device, forward and backward, optimizer "
            "with clipping; on a GPU, measured on the device."
        )
    if any("exchange" in split for split in splits):
        said.append(
            "exchange is ms per step besides these three: that of gradients between ranks, and of parts of a sharded "
            "model, as far as no computation hid it."
        )
    if any(run.config.get("trainer.eval_tokens") for run in runs):
        said.append(
            "with trainer.eval_tokens, the last validation loss is of the whole split, those before it are of its "
            "first tokens."
        )
    if any(run.speed("perf/mfu") for run in runs):
        said.append("MFU counts 6 N + 12 L H Q T FLOPs per token: attention in full, no recomputation.")
    return said


def text(runs: list[Run]) -> str:
    """The tables and the warnings for a terminal."""
    sweep = seeds.is_sweep(runs)
    lines = [text_table(HEADER, table(runs), numbers=False)]
    if sweep:
        lines += ["", text_table(*seeds.shown(runs), numbers=False)]
    lines += ["", *(f"! {each}" for each in warnings(runs)), *(f"  {each}" for each in notes(runs))]
    for title, differing in (
        ("settings that differ", {} if sweep else differing_settings(runs)),
        ("environment that differs", differing_environment(runs)),
    ):
        if differing:
            width = max(map(len, differing))
            facts = (f"  {key:<{width}}  {_shares(runs, values)}" for key, values in differing.items())
            lines += ["", title, *facts]
    return "\n".join([*lines, ""])


def having(runs: list[Run], values: list) -> dict[str, list[str]]:
    """Value, as text -> the labels of the runs that have it."""
    found: dict[str, list[str]] = {}
    for run, value in zip(runs, values, strict=True):
        found.setdefault("none" if value is None else str(value), []).append(run.label)
    return found


def _shares(runs: list[Run], values: list) -> str:
    """Which run has which value; a value that more than two runs share comes last, as that of "all others"."""
    shares = having(runs, values)
    usual = max(shares, key=lambda value: len(shares[value]))
    if len(shares[usual]) > 2:
        del shares[usual]
        shares[usual] = ["all others"]
    return ", ".join(f"{label}: {value}" for value, labels in shares.items() for label in labels)
