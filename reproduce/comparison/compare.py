"""`python -m reproduce compare RUNS...`: training runs side by side, as a table and as one HTML page with plots.

The first run's attention is the baseline. A run is compared with the baseline's run of equal settings and seed if
there is one, else with the first run. Any difference between runs other than their attention is reported.
"""

import argparse
import os
from pathlib import Path

from ..common import writing
from .page import page
from .reaching import to_loss
from .runs import Run, find_runs
from .table import text


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m reproduce compare", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run, a sweep, a wandb folder, or a glob")
    parser.add_argument(
        "--html", type=Path, help="where to write the page; default: compare.html next to the runs"
    )
    parser.add_argument(
        "--loss", type=float, help="tell the tokens and the time that each took to this validation loss"
    )
    parser.add_argument(
        "--wandb", action="store_true", help="send the page to the runs' wandb project as well"
    )
    arguments = parser.parse_args(argv)
    runs = find_runs(arguments.runs)
    print(text(runs))
    if arguments.loss is not None:
        print(f"{to_loss(runs, arguments.loss)}\n")
    page_path = arguments.html or _common_folder(runs) / "compare.html"
    with writing(page_path, "--html FILE"):
        page_path.write_text(page(runs), encoding="utf-8")
    print(f"page: {page_path}")
    if arguments.wandb:
        from .upload import upload  # it loads torch

        print(f"wandb: {upload(page_path, runs)}")
    return 0


def _common_folder(runs: list[Run]) -> Path:
    """The nearest folder that holds all runs; the first run's own if it is alone, or if that folder holds the cwd."""
    folder = Path(os.path.commonpath([run.path.parent for run in runs]))
    if len(runs) == 1 or Path.cwd().is_relative_to(folder):
        folder = runs[0].path
    return Path(os.path.relpath(folder))
