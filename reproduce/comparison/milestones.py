"""`python -m reproduce milestones RUN`: compare a run's validation curve with a published one.

The references are CSV files below curves/, named after the recipes (`experiment=`) that reproduce them.
Points are compared at equal tokens; the run's loss is interpolated between its evaluations.
"""

import argparse
import csv
import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..common import ReproduceError, text_table, writing
from ..plots import COLOURS, can_draw, colour, picture
from .runs import BOOKKEEPING, Run, find_runs, one_of

CURVES = Path(__file__).parent / "curves"
PASS, FAIL, AHEAD, UNKNOWN = "pass", "FAIL", "not reached", "not evaluated"
# Settings that a run may change without departing from the recipe.
_FREE = (
    *BOOKKEEPING,
    *("attention.(name|precise_delta)", "seed", "model.(loss|block)"),
    "model.vocab_size",  # follows from the tokenizer
    "trainer.(micro_batch|compile|cuda_graphs|device|log_every|resume)",
)
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
    run, *others = find_runs([arguments.run])
    if others:
        raise ReproduceError(
            f"{arguments.run} holds {1 + len(others)} runs; name one of them, such as {os.path.relpath(run.path)}"
        )
    curve = validation_curve(run)
    if not curve:
        raise ReproduceError(
            f"{arguments.run} has no validation loss yet; trainer.eval_every sets when it is evaluated"
        )
    reference = arguments.reference or nearest_reference(run)
    left = departures(run, reference)
    if not arguments.reference and (other := _other_model(left)):
        raise ReproduceError(
            f"no published curve is for this model; the closest, {reference}, differs "
            f"({', '.join(_told(other))}); --reference {reference} compares with it anyway"
        )
    verdicts = [(each, *verdict(each, curve)) for each in read_reference(reference)]
    print("\n".join(_lines(run, reference, left, verdicts)))
    plot = arguments.plot or Path(os.path.relpath(run.path / "milestones.svg"))
    if can_draw():
        with writing(plot, "--plot FILE"):
            draw(plot, run, reference, curve)
        print(f"plot: {plot}")
    else:
        print("no plot: matplotlib is not installed")
    return int(any(state == FAIL for _, state, _ in verdicts))


def references() -> list[str]:
    """The recipes that have a published curve."""
    return sorted(str(path.relative_to(CURVES).with_suffix("")) for path in CURVES.glob("*/*.csv"))


def read_reference(name: str) -> list[Milestone]:
    numbers = {"step": int, "tokens": int, "value": float, "error": float}
    with (CURVES / f"{name}.csv").open(newline="") as file:
        rows = [row | {key: kind(row[key]) for key, kind in numbers.items()} for row in csv.DictReader(file)]
    return [Milestone(**row) for row in rows]


# ---- the run -----------------------------------------------------------------------------------------


Curve = dict[float, float]  # tokens -> validation loss


def validation_curve(run: Run) -> Curve:
    """That of the run, preceded by those of the runs it was resumed from, if they exist."""
    curve, seen = run.curve("val/loss"), {run.path}
    while (earlier := _resumed_from(run)) and earlier not in seen:
        seen.add(earlier)
        begins = run.rows[0]["tokens"] if run.rows else math.inf
        run = find_runs([str(earlier)])[0]
        before = run.curve("val/loss").items()
        curve = {tokens: loss for tokens, loss in before if tokens < begins} | curve
    return curve


def _resumed_from(run: Run) -> Path | None:
    """The run directory that `trainer.resume` names, directly or through one of its checkpoints."""
    if not (resume := run.config.get("trainer.resume")):
        return None
    path = Path(resume).resolve()
    return next((each for each in (path, *path.parents[:2]) if (each / "config.yaml").is_file()), None)


def verdict(milestone: Milestone, curve: Curve) -> tuple[str, float | None]:
    """(PASS, FAIL, AHEAD or UNKNOWN; the run's loss at the milestone, on a line between two evaluations, or None)."""
    at = milestone.tokens
    if at > max(curve):
        return AHEAD, None
    if at < min(curve):
        return UNKNOWN, None
    loss = float(np.interp(at, list(curve), list(curve.values())))
    return (PASS if loss <= milestone.bound else FAIL), loss


# ---- its recipe --------------------------------------------------------------------------------------


@functools.cache
def recipe(name: str) -> dict[str, Any]:
    """The settings of `experiment=name`: dotted name -> value."""
    import yaml

    from training.command_line import composed
    from training.config import flatten, to_yaml

    return flatten(yaml.safe_load(to_yaml(composed(f"experiment={name}"))))


def departures(run: Run, name: str) -> Departures:
    """Where the run departs from the recipe: setting -> (the run's value, the recipe's).

    A setting that the run's config lacks has been added since.
    """
    # The gpt2 tokenizer may also be named by the path of its rank file, gpt2.tiktoken.
    ours = run.config | {"data.tokenizer": Path(run.config.get("data.tokenizer", "")).stem}
    return {
        key: (ours[key], value)
        for key, value in recipe(name).items()
        if not one_of(_FREE, key) and ours.get(key, value) != value
    }


def nearest_reference(run: Run) -> str:
    """The reference whose recipe differs in least of the model; of several, in fewest settings."""
    left = {name: departures(run, name) for name in references()}
    return min(left, key=lambda name: (len(_other_model(left[name])), len(left[name])))


def _other_model(left: Departures) -> Departures:
    """The departures in model or tokenizer, which make perplexities incomparable."""
    return {key: left[key] for key in _MODEL if key in left}


def _told(left: Departures) -> list[str]:
    return [f"{key} is {ours}, not {theirs}" for key, (ours, theirs) in left.items()]


# ---- what is shown -----------------------------------------------------------------------------------


def _lines(
    run: Run, reference: str, left: Departures, verdicts: list[tuple[Milestone, str, float | None]]
) -> Iterator[str]:
    yield f"{run.path.name} against experiment={reference}"
    if left:
        yield "! the run's settings differ from the reference's, so a pass or a fail says little:"
        yield from (f"    {each}" for each in _told(left))
    ahead = [milestone for milestone, state, _ in verdicts if state == AHEAD]
    if len(ahead) < len(verdicts):
        header = ["verdict", "step", "published", "reading error", "run: perplexity", "loss", "source"]
        yield "\n" + text_table(header, [_row(*each) for each in verdicts if each[1] != AHEAD])
    if ahead:
        yield (
            f"\n{len(ahead)} milestones not reached yet; the next is at step {ahead[0].step:,}, "
            f"{ahead[0].tokens / 1e9:.2f} B tokens: {ahead[0].metric} {ahead[0].value}"
        )
    passed, failed = (sum(found == state for _, found, _ in verdicts) for state in (PASS, FAIL))
    yield f"\n{passed} passed, {failed} failed, of {len(verdicts)} milestones"


def _row(milestone: Milestone, state: str, loss: float | None) -> list[str]:
    ours = ["-", "-"] if loss is None else [f"{math.exp(loss):.2f}", f"{loss:.4f}"]
    published = [f"{milestone.metric} {milestone.value:g}", f"{milestone.error:g}"]
    return [state, f"{milestone.step:,}", *published, *ours, milestone.source]


def draw(path: Path, run: Run, reference: str, curve: Curve) -> None:
    """Draw the run's perplexity and the published points with their reading errors."""
    milestones = read_reference(reference)
    perplexities = [math.exp(min(loss, 700)) for loss in curve.values()]
    published = [each.perplexity for each in milestones]
    with picture(path, title=f"{run.path.name} and {reference}") as (axes,):
        axes.figure.set_size_inches(8, 5)
        for shade, source in zip(COLOURS[1:], dict.fromkeys(m.source for m in milestones), strict=False):
            points = [m for m in milestones if m.source == source]
            errors = [m.error if m.metric == "perplexity" else m.perplexity * m.error for m in points]
            xs, ys = [m.tokens for m in points], [m.perplexity for m in points]
            line = {"fmt": "o--" if len(points) > 2 else "D", "color": shade, "alpha": 0.6, "capsize": 2}
            axes.errorbar(xs, ys, errors, **line, label=source)
        ours = {"color": colour("flash"), "marker": ".", "label": f"run: {run.label}", "zorder": 3}
        axes.plot(list(curve), perplexities, **ours)
        axes.set(xscale="log", xlabel="tokens", ylabel="validation perplexity (bars: reading error)")
        axes.set_xlim(left=min(m.tokens for m in milestones) / 3)
        axes.set_ylim(min(*perplexities, *published) * 0.95, max(published) * 1.6)
        axes.legend(fontsize=8)
