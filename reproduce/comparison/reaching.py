"""The tokens and the time that each run took to a validation loss, which is how recipes are compared."""

from __future__ import annotations

from itertools import pairwise

from training.console import count

from .runs import Run, same_tokens
from .table import columns


def to_loss(runs: list[Run], loss: float) -> str:
    """A table, with ratios to the first run. A time is all of the run's until then: compiling and evaluations too."""
    rows = [_cells(runs[0], run, loss) for run in runs]
    return "\n".join(columns((f"to validation loss {loss:g}", "tokens", "time"), rows))


def _cells(first: Run, run: Run, loss: float) -> list[str]:
    if not same_tokens(first, run):
        return [run.label, "other tokens", ""]
    tokens, seconds = reached(run, loss, "tokens"), reached(run, loss, "seconds")
    if tokens is None or seconds is None:
        return [run.label, "not reached", ""]

    def ratio(value: float, against: str) -> str:
        theirs = reached(first, loss, against)
        return "" if run is first or not theirs else f" ({value / theirs:.2f}x)"

    return [
        run.label,
        count(tokens) + ratio(tokens, "tokens"),
        f"{seconds:,.0f} s" + ratio(seconds, "seconds"),
    ]


def reached(run: Run, loss: float, against: str) -> float | None:
    """Where its validation loss first was at most `loss`, on a line between two evaluations; None: nowhere."""
    points = list(zip(*run.curve("val/loss", against), strict=True))
    if points and points[0][1] <= loss:
        return points[0][0]
    for (x, above), (next_x, below) in pairwise(points):
        if below <= loss < above:
            return x + (next_x - x) * (above - loss) / (above - below)
    return None
