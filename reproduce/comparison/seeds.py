"""A sweep over attention, seeds and other settings: is a difference between attentions more than noise?

Runs are matched in pairs that differ in attention alone. The noise that a difference of losses is held against is the
gap between seeds: how far apart two runs end that differ in their seed alone.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from .runs import Run, differing_settings, same_tokens

SEED, _SPEED = "seed", "perf/tokens_per_second"
# Student's t at 97.5 %, by degrees of freedom; from the last on, the last is used, which is on the safe side.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Group:
    """The runs of one attention that differ in nothing but their seed, and the baseline's runs they are matched with.

    Attributes:
        settings: what distinguishes it from the sweep's other groups, apart from attention: (name, value) pairs.
        runs: at least one.
        pairs: (baseline's run, ours) of equal seeds; empty for the baseline itself and where it has no such runs.
        gap: mean difference of the final losses of two seeds, over both attentions; None with one seed.
    """

    attention: str
    settings: tuple[tuple[str, Any], ...]
    runs: list[Run]
    pairs: list[tuple[Run, Run]]
    gap: float | None

    @property
    def name(self) -> str:
        return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in self.settings)

    @property
    def losses(self) -> list[float]:
        return _losses(self.runs)

    @property
    def differences(self) -> list[float]:
        """Final validation loss minus the baseline's, of each pair that predicted the same tokens."""
        ends = [[run.last("val/loss") for run in pair] for pair in self.pairs if same_tokens(*pair)]
        return [ours - theirs for theirs, ours in ends if None not in (theirs, ours)]

    @property
    def speeds(self) -> list[float]:
        return [speed for run in self.runs if (speed := run.speed(_SPEED))]


def matching(runs: list[Run]) -> dict[int, Run]:
    """The index of each run -> the run of the first one's attention with equal other settings, if there is one."""
    keys = _settings_of(runs)
    base: dict[Any, list[Run]] = {}
    for run, key in zip(runs, keys, strict=True):
        if run.attention == runs[0].attention:
            base.setdefault(key, []).append(run)
    taken: dict[Any, int] = {}
    found = {}
    for index, (run, key) in enumerate(zip(runs, keys, strict=True)):
        partners = base.get(key, [])
        number = taken.get((run.attention, key), 0)  # repeats of one combination are paired in their order
        taken[run.attention, key] = number + 1
        if number < len(partners):
            found[index] = partners[number]
    return found


def is_sweep(runs: list[Run]) -> bool:
    """Whether two attentions meet at more than one combination of the other settings, such as two seeds."""
    attentions: dict[Any, set[str]] = {}
    for run, key in zip(runs, _settings_of(runs), strict=True):
        attentions.setdefault(key, set()).add(run.attention)
    return sum(len(found) > 1 and runs[0].attention in found for found in attentions.values()) > 1


def unmatched(runs: list[Run]) -> list[Run]:
    """The runs of a sweep that have no run of the baseline to be compared with."""
    matches = matching(runs)
    return [run for index, run in enumerate(runs) if index not in matches]


def baselines(runs: list[Run]) -> list[Run]:
    """What each run is compared with: in a sweep its match, or itself if there is none; otherwise the first run."""
    if not is_sweep(runs):
        return [runs[0]] * len(runs)
    matches = matching(runs)
    return [matches.get(index, run) for index, run in enumerate(runs)]


def groups(runs: list[Run]) -> list[Group]:
    """The sweep's groups, those with equal settings together, the baseline's first."""
    matches, keys = matching(runs), _settings_of(runs)
    members: dict[Any, list[int]] = {}
    for index, (run, key) in enumerate(zip(runs, keys, strict=True)):
        settings = tuple(pair for pair in key if pair[0] != SEED)
        members.setdefault((settings, run.attention), []).append(index)
    found = []
    for (settings, attention), indices in members.items():
        own = [runs[i] for i in indices]
        pairs = [(matches[i], runs[i]) for i in indices if matches.get(i, runs[i]) is not runs[i]]
        baseline = [theirs for theirs, _ in pairs]
        found.append(Group(attention, settings, own, pairs, _gap(own, baseline)))
    order = list(dict.fromkeys(group.settings for group in found))
    return sorted(found, key=lambda group: order.index(group.settings))


def _settings_of(runs: list[Run]) -> list[tuple[tuple[str, Any], ...]]:
    differing = differing_settings(runs)
    return [tuple((key, str(values[i])) for key, values in differing.items()) for i in range(len(runs))]


def _losses(runs: list[Run]) -> list[float]:
    return [loss for run in runs if (loss := run.last("val/loss")) is not None]


def _gap(*attentions: list[Run]) -> float | None:
    gaps = [abs(a - b) for runs in attentions for a, b in combinations(_losses(runs), 2)]
    return statistics.fmean(gaps) if gaps else None


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
    half = None if pairs == 1 else _half_width(differences)
    if mean <= gap:
        alike = half is not None and mean > half
        return f"no: {against}" + ("; yet the same in every pair (95 %)" if alike else "")
    if half is None:
        return f"not known: {against}, but one pair"
    if mean <= half:
        return f"not known: {against}, but {pairs} pairs leave it open by {half:.2g} (95 %)"
    return f"yes: {against}"


def _half_width(differences: list[float]) -> float:
    """Half of the 95 % confidence interval of the mean, by Student's t."""
    pairs = len(differences)
    return _T[min(pairs - 1, len(_T)) - 1] * statistics.stdev(differences) / pairs**0.5


def faster(group: Group) -> str:
    """The ratio of tokens/s to the baseline's over the pairs, called faster only where the ranges do not overlap."""
    timed = [pair for pair in group.pairs if all(run.speed(_SPEED) for run in pair)]
    if not timed:
        return ""
    ratio = statistics.geometric_mean(ours.speed(_SPEED) / theirs.speed(_SPEED) for theirs, ours in timed)
    (slow, fast), (our_slow, our_fast) = (_range(runs) for runs in zip(*timed, strict=True))
    apart = "faster" if our_slow > fast else "slower" if our_fast < slow else "ranges overlap"
    return f"{ratio:.2f}x, {apart}"


def _range(runs: tuple[Run, ...]) -> tuple[float, float]:
    """The slowest and the fastest tokens/s that any of the runs logged."""
    ends = [end for run in runs for end in (run.speed_range or [run.speed(_SPEED)])]
    return min(ends), max(ends)


HEADER = (
    "settings",
    "attention",
    "runs",
    "val loss",
    "minus baseline",
    "more than noise?",
    "tokens/s",
    "peak GiB",
)


def table(runs: list[Run]) -> list[list[str]]:
    """A row of cells for each group, in HEADER's columns."""
    return [_row(group) for group in groups(runs)]


def _row(group: Group) -> list[str]:
    losses, differences, speeds = group.losses, group.differences, group.speeds
    peaks = [run.peak_memory[1] for run in group.runs if run.peak_memory]
    speed = f"{statistics.fmean(speeds):,.0f}" if speeds else "-"
    minus = _with_spread(differences, "+.2g") if differences else "-"
    return [
        group.name or "-",
        group.attention,
        str(len(group.runs)),
        _with_spread(losses, ".4f") if losses else "-",
        minus if group.pairs else "-",
        answer(differences, group.gap) if group.pairs else "",
        speed + (f" ({found})" if (found := faster(group)) else ""),
        f"{max(peaks):.2f}" if peaks else "-",
    ]


def _with_spread(values: list[float], form: str) -> str:
    """The mean and, of several values, their standard deviation."""
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} \N{PLUS-MINUS SIGN} {statistics.stdev(values):.2g}"
