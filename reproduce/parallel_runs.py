"""Runs the steps of a plan (plan.py) on all GPUs at once, each in a process of its own that sees one GPU.

First all cores compile: processes share each GPU and go through the samples that are not timed, and what they find is
thrown away, but torch's and Triton's caches keep what they compiled. Then one process at a time measures on a GPU. A
sample is written as soon as it is measured, so a run that is cut or killed loses only the one in progress.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import fleet
from .experiment import Experiment, Options, OutOfTime, Sample
from .plan import ASSUMED, Step, missing
from .results import Store

# Processes that compile on a GPU at once: their contenders, of some 20 GiB each, have to fit beside each other.
MOST_COMPILING = 6
# The longest sequence that is measured only to compile: longer ones run the same kernels.
LONGEST_COMPILED = 4096


@dataclass(frozen=True)
class Call:
    """The options of the command line, which hold for every step.

    settings: key=value, by experiment.
    deadline: on the clock of `time.monotonic`, which all processes of a machine share: no sample starts after it.
    """

    directory: Path
    tiny: bool
    settings: Mapping[str, list[str]]
    deadline: float | None = None

    def store(self, experiment: Experiment, settings: Any, device: torch.device, **how: Any) -> Store:
        """The experiment's document; `how`: arguments of `Store`."""
        command = [experiment.name, *self.settings.get(experiment.name, []), *["--tiny"] * self.tiny]
        return Store(
            self.directory, experiment, device=device, settings=settings, tiny=self.tiny, command=command,
            deadline=self.deadline, **how,
        )  # fmt: skip


def measure(devices: list[torch.device], step: Step, call: Call) -> None:
    """Measure what the step lacks, on the first device but where the experiment takes all. Raises OutOfTime."""
    retry = [step.process] if step.retries else []
    store = call.store(step.experiment, step.settings, devices[0], retry=retry)
    options = Options(devices[0], call.tiny, step.selected, store.sample, step.process, store.find)
    options.devices, options.deadline = devices, call.deadline
    step.experiment.module.run(options)


def measure_all(plan: list[Step], devices: list[torch.device], call: Call, end: float | None) -> set[str]:
    """Measure the steps in their order; an experiment's first process, which also does all that is done once, comes
    before its others.

    Args:
        end: what runs then is cut.

    Returns the experiments that did not come to their end.
    """
    jobs, first, experiments = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for number, step in enumerate(plan):
            log, name = Path(folder, f"{number}.log"), step.experiment.name
            after, follow = first.get(name), fleet.Follow(name, log)
            jobs.append(fleet.Job(step.name, _measure, (step, call), log, after, follow))
            experiments[step.name] = name
            if step.process == 0:
                first[name] = step.name
        ended = fleet.run(jobs, devices, end)
        return {experiments[job.name] for job, state in ended if state != fleet.DONE}


def compile_all(plan: list[Step], devices: list[torch.device], call: Call, end: float | None) -> None:
    """Compile what the steps need, in as many processes as cores and memory allow."""
    steps = [*{step.experiment.name: step for step in plan if step.experiment.compiles}.values()]
    each = min(MOST_COMPILING, (os.cpu_count() or 1) // (2 * len(devices)))
    if not steps or devices[0].type != "cuda" or not each:
        return
    number, began = each * len(devices), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            fleet.Job(f"compiling {n}", compile_share, (steps, call, n, number), Path(folder, f"{n}.log"))
            for n in range(number)
        ]
        list(fleet.run(jobs, devices * each, end))
    print(f"compiled in {number} processes, in {time.monotonic() - began:.0f} s", flush=True)


def compile_share(device: torch.device, steps: list[Step], call: Call, share: int, of: int) -> None:
    """A job: measure one in `of` of the samples by which what is missing is compiled, and keep nothing."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"  # the processes are many enough
    for step in steps:
        store = call.store(step.experiment, step.settings, device)
        sample = _compiling(store, missing(store, step.selected), share, of)
        options = Options(device, call.tiny, step.selected, sample, 0, store.find, say=lambda line: None)
        step.experiment.module.run(options)


def _compiling(store: Store, left: list[Sample], share: int, of: int) -> Callable[..., Sample]:
    """`Options.sample` of a process that compiles; on a new machine, also what an earlier run measured."""
    asked: set[str] = set()

    def serves(where: Sample) -> bool:
        """Whether a missing sample needs what this one compiles: all coordinates that they share are equal."""
        compiles = any(each.items() <= where.items() for each in store.experiment.compiles)
        if not compiles or where.get("length", 0) > LONGEST_COMPILED:
            return False
        for each in left:
            shared = [key for key in where if key in each and key != "kind"]
            if shared and all(where[key] == each[key] for key in shared):
                return True
        return False

    def sample(measure: Callable[[], Sample], **where: Any) -> Sample:
        known = store.find(**where) or {**where, **ASSUMED}
        cannot = {"refused", "out_of_memory", "failed"} & known.keys()
        if cannot or not serves(where) or str(where) in asked:
            return known
        asked.add(str(where))
        if len(asked) % of == share:
            try:
                measure()
            except Exception as error:  # refused, out of memory beside the others: measuring will tell
                print(f"{where}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return known

    return sample


def _measure(device: torch.device, step: Step, call: Call) -> None:
    """`measure` as a job."""
    print(step.name, flush=True)
    try:
        measure([device], step, call)
    except OutOfTime:
        sys.exit(f"{step.name}: out of time")  # so that the experiment's next process does not start
