"""A sweep over attention, seeds and other settings: is a difference between attentions more than noise?

Runs are matched in pairs that differ in attention alone. The noise that a difference of losses is held against is the
gap between seeds: how far apart two runs end that differ in their seed alone.
"""

import math
import statistics
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from .runs import Run, differing_settings, same_tokens

# A run that repeats another's seeds tells nothing of the gap between seeds, nor is it another pair.
SEEDS, _SPEED = ("seed", "init_seed"), "perf/tokens_per_second"
# Student's t at 97.5 %, by degrees of freedom; from the last on, the last is used, which is on the safe side.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Group:
    """The runs of one attention that differ in nothing but their seed, and the baseline's runs they are matched with.

    Attributes:
        settings: what distinguishes it from the sweep's other groups, apart from attention: (name, value) pairs.
        runs: at least one.
        pairs: (baseline's run, ours) of equal seeds; empty for the baseline itself and where it has no such runs.
    """

    attention: str
    settings: tuple[tuple[str, Any], ...]
    runs: list[Run]
    pairs: list[tuple[Run, Run]]

    @property
    def name(self) -> str:
        return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in self.settings)

    @property
    def differences(self) -> list[float]:
        """Final validation loss minus the baseline's, for each seed: of pairs that predicted the same tokens."""
        found: dict[Any, list[float]] = {}
        for pair in self.pairs:
            theirs, ours = (run.last("val/loss") for run in pair)
            if same_tokens(*pair) and None not in (theirs, ours):
                found.setdefault(_seeds(pair[1]), []).append(ours - theirs)
        return [statistics.fmean(each) for each in found.values()]

    @property
    def gap(self) -> float | None:
        """How far apart the final losses of two seeds are, on average over both attentions; None with one seed."""
        of_each = (self.runs, [theirs for theirs, _ in self.pairs])
        pairs = [pair for runs in of_each for pair in combinations(_ends(runs), 2)]
        gaps = [abs(a - b) for (seeds, a), (others, b) in pairs if seeds != others]
        return statistics.fmean(gaps) if gaps else None


def _seeds(run: Run) -> tuple[Any, ...]:
    return tuple(run.config.get(name) for name in SEEDS)


def _ends(runs: list[Run]) -> list[tuple[tuple[Any, ...], float]]:
    """Seeds and final validation loss of those that have one."""
    return [(_seeds(run), loss) for run in runs if (loss := run.last("val/loss")) is not None]


def places(runs: list[Run]) -> list[tuple[tuple[tuple[str, Any], ...], int]]:
    """What each run sets, attention aside, and how many of its attention set the same before it: equal in a pair."""
    differing = differing_settings(runs)
    settings = [tuple((key, str(values[i])) for key, values in differing.items()) for i in range(len(runs))]
    alike = [(run.attention, its) for run, its in zip(runs, settings, strict=True)]
    return [(its, alike[:i].count(alike[i])) for i, its in enumerate(settings)]


def matches(runs: list[Run]) -> list[Run | None]:
    """For each run that of the first one's attention in the same place, if there is one."""
    found = places(runs)
    base = {each: run for run, each in zip(runs, found, strict=True) if run.attention == runs[0].attention}
    return [base.get(each) for each in found]


def attentions(runs: list[Run]) -> int:
    """How many there are: of one alone, it is the other settings that are compared."""
    return len({run.attention for run in runs})


def is_sweep(runs: list[Run]) -> bool:
    """Whether two attentions meet at more than one combination of the other settings, such as two seeds."""
    found = zip(runs, places(runs), matches(runs), strict=True)
    return len({its for run, (its, _), match in found if match not in (None, run)}) > 1


def baselines(runs: list[Run]) -> list[Run]:
    """What each run is compared with: in a sweep its match, or itself if there is none; otherwise the first run."""
    if not is_sweep(runs):
        return [runs[0]] * len(runs)
    return [match or run for run, match in zip(runs, matches(runs), strict=True)]


def groups(runs: list[Run]) -> list[Group]:
    """The sweep's groups, those with equal settings together, in the order of their first runs."""
    found: dict[Any, dict[str, Group]] = {}
    for run, (its, _), match in zip(runs, places(runs), matches(runs), strict=True):
        settings = tuple(pair for pair in its if pair[0] not in SEEDS)
        group = found.setdefault(settings, {}).setdefault(
            run.attention, Group(run.attention, settings, [], [])
        )
        group.runs.append(run)
        if match not in (None, run):
            group.pairs.append((match, run))
    return [group for alike in found.values() for group in alike.values()]


def answer(differences: list[float], gap: float | None) -> str:
    """Whether the mean of paired differences is more than noise, in a few words that say why."""
    if not differences:
        return "not known: no losses to compare"
    mean, pairs = abs(statistics.fmean(differences)), len(differences)
    if not math.isfinite(mean):
        return "not known: a loss is not finite"
    if gap is None:
        return "not known: one seed, so no gap between seeds to hold it against"
    if mean == 0:
        return "no: equal"
    against = f"{mean / gap:.2g} times the gap between seeds, {gap:.2g}" if gap else "seeds do not differ"
    half = None if pairs == 1 else half_width(differences)
    if mean <= gap:
        alike = half is not None and mean > half
        return f"no: {against}" + ("; yet the same in every pair (95 %)" if alike else "")
    if half is None:
        return f"not known: {against}, but one pair"
    if mean <= half:
        return f"not known: {against}, but {pairs} pairs leave it open by {half:.2g} (95 %)"
    return f"yes: {against}"


def half_width(differences: list[float]) -> float:
    """Half of the 95 % confidence interval of the mean, by Student's t."""
    pairs = len(differences)
    return _T[min(pairs - 1, len(_T)) - 1] * statistics.stdev(differences) / pairs**0.5


def faster(group: Group) -> str:
    """The ratio of tokens/s to the baseline's over the pairs, called faster only where the ranges do not overlap.

    One pair says nothing of that: what slows a run at the same time may last as long as the run.
    """
    timed = [pair for pair in group.pairs if all(run.speed(_SPEED) for run in pair)]
    if not timed:
        return ""
    ratio = statistics.geometric_mean(ours.speed(_SPEED) / theirs.speed(_SPEED) for theirs, ours in timed)
    if len(timed) == 1:
        return f"{ratio:.2f}x, one pair"
    (slow, fast), (our_slow, our_fast) = (_range(runs) for runs in zip(*timed, strict=True))
    apart = "faster" if our_slow > fast else "slower" if our_fast < slow else "ranges overlap"
    return f"{ratio:.2f}x, {apart}"


def _range(runs: tuple[Run, ...]) -> tuple[float, float]:
    """The slowest and the fastest tokens/s that any of the runs logged."""
    ends = [end for run in runs for end in (run.speed_range or [run.speed(_SPEED)])]
    return min(ends), max(ends)


PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
HEADER = ("settings", "attention", "runs", "val loss", "minus baseline", "more than noise?")
HEADER += ("tokens/s", "peak GiB")


def table(runs: list[Run]) -> list[list[str]]:
    """A row of cells for each group, in HEADER's columns."""
    return [_row(group) for group in groups(runs)]


def shown(runs: list[Run]) -> tuple[tuple[str, ...], list[list[str]]]:
    """The header and the rows of `table`, without settings where attention and seeds alone differ."""
    rows = table(runs)
    first = 0 if any(row[0] != "-" for row in rows) else 1
    return HEADER[first:], [row[first:] for row in rows]


def _row(group: Group) -> list[str]:
    ends, differences = [loss for _, loss in _ends(group.runs)], group.differences
    speeds = [speed for run in group.runs if (speed := run.speed(_SPEED))]
    peaks = [run.peak_memory[1] for run in group.runs if run.peak_memory]
    speed = f"{statistics.fmean(speeds):,.0f}" if speeds else "-"
    return [
        group.name or "-",
        group.attention,
        str(len(group.runs)),
        _with_spread(ends, ".4f"),
        _with_spread(differences, "+.2g"),
        answer(differences, group.gap) if group.pairs else "",
        speed + (f" ({found})" if (found := faster(group)) else ""),
        f"{max(peaks):.2f}" if peaks else "-",
    ]


def _with_spread(values: list[float], form: str) -> str:
    """The mean and, of several values, their standard deviation."""
    if not values:
        return "-"
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} {PLUS_MINUS} {statistics.stdev(values):.2g}"
