"""Training runs that no paper has, kept beside the measurements: python -m benchmarks recipes NAME RUN...

Of each run the validation loss by tokens and by seconds, its settings and its speed, as results/<gpu>/NAME.json, and
the curves as NAME.svg, which docs/recipes.md shows. What each takes to a loss: `python -m reproduce compare --loss`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reproduce import long_run, plots
from reproduce.common import as_lines
from reproduce.comparison.runs import Run, find_runs, same_tokens
from reproduce.results import slug

PANELS = (("tokens", "M tokens", 1e6), ("seconds", "seconds, all of the run", 1))


def main(argv: list[str]) -> int:
    """Write the document and the picture, and print their paths."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks recipes", description=__doc__)
    parser.add_argument("name", help="of the files")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run, a sweep or a glob")
    parser.add_argument("--commit", required=True, help="of the code that trained")
    parser.add_argument("--labels", nargs="+", help="a name for each run; default: what sets it apart")
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: results")
    given = parser.parse_args(argv)
    runs = find_runs(given.runs)
    labels = given.labels or [run.label for run in runs]
    if len({*labels}) != len(runs):
        parser.error(f"{len({*labels})} different labels for {len(runs)} runs")
    if bare := [run.label for run in runs if not run.evaluations()]:
        parser.error(f"without an evaluation: {', '.join(bare)}")
    if others := [run.label for run in runs if not same_tokens(runs[0], run)]:
        parser.error(f"of other tokens than {runs[0].label}, so losses do not compare: {', '.join(others)}")
    kept = {
        label: long_run.kept(run, given.commit) | curves(run) for label, run in zip(labels, runs, strict=True)
    }
    path = given.results / slug(kept[labels[0]]["device"]) / f"{given.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_lines(kept))
    draw(kept, path.with_suffix(".svg"))
    print(path, path.with_suffix(".svg"), sep="\n")
    return 0


def curves(run: Run) -> dict[str, list[tuple[float, float]]]:
    """Validation loss by tokens and by seconds; with trainer.eval_tokens without the last, of other tokens."""
    found = {}
    for against, _, _ in PANELS:
        evaluations = run.evaluations(against)
        first = next(of for _, of in evaluations)
        found[f"loss_by_{against}"] = [(x, round(y, 5)) for (x, of), y in evaluations.items() if of == first]
    return found


def draw(kept: dict[str, dict[str, Any]], path: Path) -> None:
    """A panel against tokens, and one against time; a line a run."""
    with plots.picture(path, len(PANELS), title="Validation loss") as axes:
        for axis, (against, across, unit) in zip(axes, PANELS, strict=True):
            for label, document in kept.items():
                x, y = zip(*document[f"loss_by_{against}"], strict=True)
                axis.plot([each / unit for each in x], y, "o-", markersize=3, label=label)
            axis.set(xlabel=across, ylabel="nats a token")
        plots.legend_below(axes)
