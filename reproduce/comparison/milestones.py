"""`python -m reproduce milestones RUN`: compare a run's validation curve with a published one.

The references are CSV files below curves/, named after the recipes (`experiment=`) that reproduce them.
Points are compared at equal tokens; the run's loss is interpolated between its evaluations.
"""

from __future__ import annotations

import argparse
import bisect
import csv
import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common import ReproduceError, text_table, writing
from ..plots import COLOURS, can_draw, colour, picture
from .runs import Run, find_runs

CURVES = Path(__file__).parent / "curves"
PASS, FAIL, AHEAD, UNKNOWN = "pass", "FAIL", "not reached", "not evaluated"
# Settings that a run may change without departing from the recipe.
_FREE = {
    *("attention.name", "seed", "data.cache_dir", "data.workers", "model.loss", "model.block"),
    "model.vocab_size",  # follows from the tokenizer
    *("trainer.micro_batch", "trainer.compile", "trainer.cuda_graphs", "trainer.device", "trainer.log_every"),
    *("trainer.eval_every", "trainer.save_every", "trainer.keep_checkpoints", "trainer.resume"),
    *("trainer.keep_best", "trainer.profile_step", "trainer.sample_tokens", "trainer.sample_prompt"),
}
# If these differ, perplexities cannot be compared.
_MODEL = ("model.n_layer", "model.n_head", "model.n_embd", "model.seq_len", "data.tokenizer")
Departures = dict[str, tuple[Any, Any]]  # setting -> (the run's value, the recipe's)


@dataclass(frozen=True)
class Milestone:
    """A published point of a validation curve; `error` is the reading error, in the unit of `metric`."""

    step: int
    tokens: int
    metric: str  # perplexity or loss (nats)
    value: float
    error: float
    source: str

    @property
    def bound(self) -> float:
        """The largest loss in nats that still passes: the published one plus the reading error."""
        highest = self.value + self.error
        return math.log(highest) if self.metric == "perplexity" else highest

    @property
    def perplexity(self) -> float:
        return self.value if self.metric == "perplexity" else math.exp(self.value)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m reproduce milestones", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run directory, finished or still running")
    parser.add_argument("--reference", choices=references(), help="default: the recipe closest to the run's")
    parser.add_argument("--plot", type=Path, help="default: RUN/milestones.svg")
    arguments = parser.parse_args(argv)
    run = _only(find_runs([arguments.run]), arguments.run)
    tokens, losses = validation_curve(run)
    if not tokens:
        raise ReproduceError(
            f"{arguments.run} has no validation loss yet; trainer.eval_every sets when it is evaluated"
        )
    reference = arguments.reference or nearest_reference(run)
    if not arguments.reference and (other := _other_model(departures(run, reference))):
        raise ReproduceError(
            f"no published curve is for this model; the closest, {reference}, differs "
            f"({', '.join(_told(other))}); --reference {reference} compares with it anyway"
        )
    milestones = read_reference(reference)
    verdicts = [verdict(each, tokens, losses) for each in milestones]
    print(_text(run, reference, milestones, verdicts))
    plot = arguments.plot or Path(os.path.relpath(run.path / "milestones.svg"))
    if can_draw():
        with writing(plot, "--plot FILE"):
            draw(plot, run, reference, milestones, tokens, losses)
        print(f"plot: {plot}")
    else:
        print("no plot: matplotlib is not installed")
    return int(any(state == FAIL for state, _ in verdicts))


def _only(runs: list[Run], argument: str) -> Run:
    if len(runs) > 1:
        raise ReproduceError(
            f"{argument} holds {len(runs)} runs; name one of them, such as {os.path.relpath(runs[0].path)}"
        )
    return runs[0]


def references() -> list[str]:
    """The recipes that have a published curve."""
    return sorted(str(path.relative_to(CURVES).with_suffix("")) for path in CURVES.glob("*/*.csv"))


def read_reference(name: str) -> list[Milestone]:
    with (CURVES / f"{name}.csv").open(newline="") as file:
        return [
            Milestone(
                int(row["step"]),
                int(row["tokens"]),
                row["metric"],
                float(row["value"]),
                float(row["error"]),
                row["source"],
            )
            for row in csv.DictReader(file)
        ]


# ---- the run -----------------------------------------------------------------------------------------


def validation_curve(run: Run) -> tuple[list[float], list[float]]:
    """(tokens, validation loss) of the run, preceded by those of the runs it was resumed from, if they exist."""
    tokens, losses = run.curve("val/loss")
    seen = {run.path}
    while (earlier := _resumed_from(run)) and earlier not in seen:
        seen.add(earlier)
        begins = run.rows[0]["tokens"] if run.rows else math.inf
        run = find_runs([str(earlier)])[0]
        before = [(x, y) for x, y in zip(*run.curve("val/loss"), strict=True) if x < begins]
        tokens = [x for x, _ in before] + tokens
        losses = [y for _, y in before] + losses
    return tokens, losses


def _resumed_from(run: Run) -> Path | None:
    """The run directory that `trainer.resume` names, directly or through one of its checkpoints."""
    if not (resume := run.config.get("trainer.resume")):
        return None
    path = Path(resume).resolve()
    return next((each for each in (path, *path.parents[:2]) if (each / "config.yaml").is_file()), None)


def verdict(milestone: Milestone, tokens: list[float], losses: list[float]) -> tuple[str, float | None]:
    """(PASS, FAIL, AHEAD or UNKNOWN; the run's loss at the milestone, or None)."""
    if milestone.tokens > tokens[-1]:
        return AHEAD, None
    if milestone.tokens < tokens[0]:
        return UNKNOWN, None
    i = bisect.bisect_left(tokens, milestone.tokens)
    loss = losses[i]
    if tokens[i] != milestone.tokens:
        part = (milestone.tokens - tokens[i - 1]) / (tokens[i] - tokens[i - 1])
        loss = losses[i - 1] + part * (losses[i] - losses[i - 1])
    return (PASS if loss <= milestone.bound else FAIL), loss


# ---- its recipe --------------------------------------------------------------------------------------


@functools.cache
def recipe(name: str) -> dict[str, Any]:
    """The settings of `experiment=name`: dotted name -> value."""
    from omegaconf import OmegaConf

    from training.command_line import composed
    from training.config import flatten, to_yaml

    return flatten(OmegaConf.to_container(OmegaConf.create(to_yaml(composed(f"experiment={name}")))))


def departures(run: Run, name: str) -> Departures:
    """Where the run departs from the recipe: setting -> (the run's value, the recipe's)."""
    # The gpt2 tokenizer may also be named by the path of its rank file, gpt2.tiktoken.
    ours = run.config | {"data.tokenizer": Path(run.config.get("data.tokenizer", "")).stem}
    return {
        key: (ours.get(key), value)
        for key, value in recipe(name).items()
        if key not in _FREE and not key.startswith("logger.") and ours.get(key) != value
    }


def nearest_reference(run: Run) -> str:
    """The reference whose model is nearest in size; of several, the one whose recipe differs in fewest settings."""
    left = {name: departures(run, name) for name in references()}
    return min(left, key=lambda name: (_apart(_other_model(left[name])), len(left[name])))


def _apart(other: Departures) -> float:
    """The distance between two models: each factor of two in a size counts 1, as does any other difference."""
    sizes = [pair for pair in other.values() if all(isinstance(each, int) for each in pair)]
    return sum(abs(math.log2(ours / theirs)) for ours, theirs in sizes) + len(other) - len(sizes)


def _other_model(left: Departures) -> Departures:
    """The departures in model or tokenizer, which make perplexities incomparable."""
    return {key: left[key] for key in _MODEL if key in left}


def _told(left: Departures) -> list[str]:
    return [f"{key} is {ours}, not {theirs}" for key, (ours, theirs) in left.items()]


# ---- what is shown -----------------------------------------------------------------------------------


def _text(
    run: Run, reference: str, milestones: list[Milestone], verdicts: list[tuple[str, float | None]]
) -> str:
    lines = [f"{run.path.name} against experiment={reference}"]
    if left := departures(run, reference):
        lines.append("! the run's settings differ from the reference's, so a pass or a fail says little:")
        lines += [f"    {each}" for each in _told(left)]
    shown = [pair for pair in zip(milestones, verdicts, strict=True) if pair[1][0] != AHEAD]
    ahead = len(milestones) - len(shown)
    if shown:
        header = ["verdict", "step", "published", "reading error", "run: perplexity", "loss", "source"]
        rows = [_row(milestone, *found) for milestone, found in shown]
        lines += ["", text_table(header, rows)]
    if ahead:
        following = next(m for m, (state, _) in zip(milestones, verdicts, strict=True) if state == AHEAD)
        lines += [
            "",
            f"{ahead} milestones not reached yet; the next is at step {following.step:,}, "
            f"{following.tokens / 1e9:.2f} B tokens: {following.metric} {following.value}",
        ]
    failed = sum(state == FAIL for state, _ in verdicts)
    passed = sum(state == PASS for state, _ in verdicts)
    return "\n".join([*lines, "", f"{passed} passed, {failed} failed, of {len(milestones)} milestones"])


def _row(milestone: Milestone, state: str, loss: float | None) -> list[str]:
    return [
        state,
        f"{milestone.step:,}",
        f"{milestone.metric} {milestone.value:g}",
        f"{milestone.error:g}",
        "-" if loss is None else f"{math.exp(loss):.2f}",
        "-" if loss is None else f"{loss:.4f}",
        milestone.source,
    ]


def draw(
    path: Path,
    run: Run,
    reference: str,
    milestones: list[Milestone],
    tokens: list[float],
    losses: list[float],
) -> None:
    """Draw the run's perplexity and the published points with their reading errors."""
    with picture(path, title=f"{run.path.name} and {reference}") as (axes,):
        axes.figure.set_size_inches(8, 5)
        for shade, source in zip(COLOURS[1:], dict.fromkeys(m.source for m in milestones), strict=False):
            points = [m for m in milestones if m.source == source]
            errors = [m.error if m.metric == "perplexity" else m.perplexity * m.error for m in points]
            axes.errorbar(
                [m.tokens for m in points],
                [m.perplexity for m in points],
                yerr=errors,
                fmt="o--" if len(points) > 2 else "D",
                color=shade,
                alpha=0.6,
                capsize=2,
                label=source,
            )
        perplexities = [math.exp(min(loss, 700)) for loss in losses]
        axes.plot(
            tokens, perplexities, color=colour("flash"), marker=".", label=f"run: {run.label}", zorder=3
        )
        axes.set(xscale="log", xlabel="tokens", ylabel="validation perplexity (bars: reading error)")
        axes.set_xlim(left=min(m.tokens for m in milestones) / 3)
        highest = max(m.perplexity for m in milestones)
        axes.set_ylim(min(*perplexities, *(m.perplexity for m in milestones)) * 0.95, highest * 1.6)
        axes.legend(fontsize=8)
