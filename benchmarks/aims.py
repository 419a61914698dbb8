"""What an aim of this project's own is, and when it is met: the rule of every row of results/BENCHMARKS.md.

No paper states these figures; an aim is what we hold them to. Each benchmark's come from its `aims(results)`, and
`aims_page.py` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from reproduce.experiment import Results, Sample
from reproduce.peers import OURS
from reproduce.timing import Times, fastest, timed, took, waited

MET, MISSED, NO_AIM = "met", "missed", "no aim"


@dataclass(frozen=True)
class Aim:
    """A figure of ours, the aim it is held to (none: it is only shown), and what explains it.

    level: met although our median is behind, as ours does not take longer in every process.
    among: the row in which it is counted if it is met; "": it has one of its own.
    """

    what: str
    ours: str
    aim: str = ""
    met: bool | None = None
    why: str = ""
    level: bool = False
    among: str = ""

    @property
    def status(self) -> str:
        return {True: MET, False: MISSED, None: NO_AIM}[self.met]


def judged(results: Results) -> list[Sample]:
    """The timings of a GPU that have ours, where the device did not wait for the host in it."""
    if results["device"].startswith("CPU"):
        return []
    return [each for each in timed(results, kind="time") if OURS in each["ms"] and not waited(each, OURS)]


def shown(times: Times, limit: float, form: str = "{:.2f}x") -> str:
    """`Times.shown`, with more digits, up to four, where at those of the form something would round to the limit."""
    figures = [each for each in (times.low, times.median, times.high) if each != limit]
    start, digits, end = form.partition(re.search(r"\d", form)[0])
    for more in range(int(digits), 5):
        finer = f"{start}{more}{end}"
        if finer.format(limit) not in map(finer.format, figures):
            break
    return times.shown(finer)


def held(over: Times) -> tuple[bool, bool]:
    """Of our time over another's: whether the other is not ahead, and then whether the two are level.

    The other is ahead if ours takes longer in every process. Ranges of the times themselves would hide that, since
    they hold the card's clock too, which the contenders of a process share. Level: our median is behind, yet not
    every process.
    """
    met = over.low <= 1
    return met, met and over.median > 1


class Rival(NamedTuple):
    """The library that ours is held to, its times, whether it is ahead of ours, else whether the two are level."""

    name: str
    times: Times
    faster: bool
    level: bool


def rival(sample: Sample, ours: str, others: Iterable[str], phase: str) -> Rival | None:
    """The fastest of the others for which the device did not wait; of those that are ahead (`held`), if any are.
    None if none was timed."""
    times = took(sample, ours, phase)
    found = tuple(name for name in others if name in sample["ms"] and not waited(sample, name))
    ahead = tuple(name for name in found if not held(times / took(sample, name, phase))[0])
    best = fastest(sample, ahead or found, phase)
    if best is None:
        return None
    met, level = held(times / best[1])
    return Rival(*best, faster=not met, level=level)


def over_fastest(
    where: str, sample: Sample, ours: str, others: Iterable[str], which: str = "other", phase: str = "both",
    among: str = "",
) -> list[Aim]:  # fmt: skip
    """Our time over its `rival`'s among the others, if there is one. Missed where that is ahead; see `held`."""
    others = [name for name in others if name in sample["ms"]]
    late = [name for name in others if waited(sample, name)]
    best = rival(sample, ours, others, phase)
    if best is None:
        return []
    why = f"the fastest {which} is {best.name}"
    why += f", without {', '.join(late)}, which waited for the host" if late else ""
    what, over = f"{where}: time over the fastest {which}'s", took(sample, ours, phase) / best.times
    return [Aim(what, shown(over, 1), "1x at most", not best.faster, why, best.level, among)]
