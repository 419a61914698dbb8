"""The tokens and the time that each run took to a validation loss, which is how recipes are compared."""

from itertools import pairwise

from training.console import count

from ..common import text_table
from .runs import Run, same_tokens
from .seeds import baselines


def to_loss(runs: list[Run], loss: float) -> str:
    """A table, with ratios to the run each is compared with. A time is all of the run's until then: compiling and
    evaluations too."""
    rows = [_cells(base, run, loss) for base, run in zip(baselines(runs), runs, strict=True)]
    return text_table((f"to validation loss {loss:g}", "tokens", "time"), rows, numbers=False)


def _cells(first: Run, run: Run, loss: float) -> list[str]:
    if not same_tokens(first, run) or _predicted(first) != _predicted(run):
        return [run.label, "other tokens", ""]
    cells = []
    for against, shown in (("tokens", count), ("seconds", "{:,.0f} s".format)):
        ours, theirs = (reached(each, loss, against) for each in (run, first))
        if ours is None:
            return [run.label, "not reached", ""]
        cells.append(shown(ours) + (f" ({ours / theirs:.2f}x)" if theirs and run is not first else ""))
    return [run.label, *cells]


def _predicted(run: Run) -> int | None:
    """How many tokens its first evaluation predicted; None: the whole split."""
    return next((of for _, of in run.evaluations()), None)


def reached(run: Run, loss: float, against: str) -> float | None:
    """Where its validation loss first was at most `loss`, on a line between two evaluations; None: nowhere.

    With trainer.eval_tokens the last evaluation, which is of the whole split, does not count.
    """
    points = [(x, y) for (x, of), y in run.evaluations(against).items() if of == _predicted(run)]
    if points and points[0][1] <= loss:
        return points[0][0]
    for (x, above), (next_x, below) in pairwise(points):
        if below <= loss < above:
            return x + (next_x - x) * (above - loss) / (above - below)
    return None
