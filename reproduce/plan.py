"""Plans a command: which samples are missing, in which order they are measured, and about how long that takes.

It calls an experiment's `run` with Options whose `sample` measures nothing and notes the coordinates. So the plan is
what the run would do, and a run that was cut goes on with the samples that its document lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .common import text_table
from .experiment import Experiment, Options, Sample

if TYPE_CHECKING:
    import torch

    from .results import Store

# Starting a process: imports, CUDA, and the first use of each kernel that is already compiled.
STARTING_S = 12.0
# Stands in for a sample that is not measured yet, so that `run` goes on to ask for all: every check passes, all fits.
ASSUMED = {
    **{"passed": True, "agrees": True, "finite": True, "worst": 0.0, "peak_bytes": 0},
    **{"limits": {}, "row_errors": {}, "logit_error": 0.0},
}


@dataclass(frozen=True)
class Step:
    """What one process does: measure what an experiment lacks, or first only what README shows of it.

    Attributes:
        settings: the whole experiment's, which the document records.
        selected: the settings that are run: the same, or with `Experiment.first`, the part that README shows.
        process: which of the settings' `processes` this is, of `processes`.
        samples: how many are missing; None if the experiment has no `seconds`.
        seconds: about how long they take.
        retries: whether samples that had failed are tried again: in the first step of each process.
    """

    experiment: Experiment
    settings: Any
    selected: Any
    process: int
    processes: int
    samples: int | None
    seconds: float
    retries: bool = True

    @property
    def name(self) -> str:
        part = "" if self.selected == self.settings else " (README's figures)"
        return f"{self.experiment.name}{part}, process {self.process + 1} of {self.processes}"


def missing(store: Store, settings: Any) -> list[Sample]:
    """The coordinates of the settings' samples, of all processes, that the document lacks; none if the experiment has
    no `seconds`."""
    if not store.experiment.seconds:
        return []
    device, tiny = store.device, store.document["tiny"]
    found: dict[str, Sample] = {}

    def sample(measure: object, **where: Any) -> Sample:
        known = store.find(**where)
        if known is None and where.get("process", 0) == options.process:
            found[str(where)] = where
        return known or {**where, **ASSUMED}

    for process in range(processes_of(settings, device, tiny)):
        options = Options(device, tiny, settings, sample, process, store.find, say=lambda line: None)
        store.experiment.module.run(options)
    return list(found.values())


def processes_of(settings: Any, device: torch.device, tiny: bool) -> int:
    """How many processes measure. On a CPU one: what is counted there is the same in each."""
    return getattr(settings, "processes", 1) if device.type == "cuda" or tiny else 1


def steps(store: Store) -> Iterator[Step]:
    """The steps that are left of an experiment: those of what README shows before the rest."""
    experiment, settings, tiny = store.experiment, store.settings, store.document["tiny"]
    count = processes_of(settings, store.device, tiny)
    if not experiment.seconds:
        if not store.finished:
            for process in range(count):
                seconds = 60 * experiment.minutes / count
                yield Step(experiment, settings, settings, process, count, None, seconds)
        return
    planned: set[str] = set()
    begun: set[int] = set()
    counted = store.device.type == "cpu" and not tiny  # a CPU's counts, of which README shows none
    for selected in [settings] if counted else dict.fromkeys(_parts(experiment, settings)):
        left = [each for each in missing(store, selected) if str(each) not in planned]
        planned |= set(map(str, left))
        for process in range(count):
            own = [each for each in left if each.get("process", 0) == process]
            if own:
                seconds = STARTING_S + sum(_price(store, each["kind"]) for each in own)
                retries = process not in begun
                begun.add(process)
                yield Step(experiment, settings, selected, process, count, len(own), seconds, retries)


def _parts(experiment: Experiment, settings: Any) -> Iterator[Any]:
    """The settings cut to the values that README shows (`Experiment.first`), if there are any; then all of them."""
    first = {
        key: tuple(each for each in getattr(settings, key) if each in shown)
        for key, shown in experiment.first.items()
    }
    if all(first.values()):
        yield replace(settings, **first)
    yield settings


def _price(store: Store, kind: str) -> float:
    """Seconds of a sample: the mean of those in the document, or else what the experiment says."""
    count, seconds = store.document["took"].get(kind, (0, 0.0))
    return seconds / count if count else store.experiment.seconds.get(kind, 1.0)


def shown(plan: list[Step], devices: list[torch.device]) -> str:
    """The plan for a terminal: a row for each part of an experiment, in the order in which they start."""
    rows: dict[str, list[Step]] = {}
    for step in plan:
        rows.setdefault(step.name.partition(", process")[0], []).append(step)
    header, lines, end = ["to measure", "samples", "processes"], [], 0.0
    for name, own in rows.items():
        samples, seconds = sum(step.samples or 0 for step in own), sum(step.seconds for step in own)
        end += seconds if own[0].experiment.alone else seconds / len(devices)
        lines.append([name, str(samples or ""), str(len(own)), f"{seconds / 60:.1f}", f"{end / 60:.1f}"])
    header += ["GPU minutes", f"done by, on {len(devices)}"]
    if devices[0].type != "cuda":  # the seconds are a GPU's
        header, lines = header[:3], [line[:3] for line in lines]
    return text_table(header, lines)
