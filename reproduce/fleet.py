"""Long jobs on every GPU at once: each in a process of its own, cut at a deadline, and continued by the next call.

A job is a function that leaves its results in files and picks up where an earlier call of it was cut. A cut is
SIGTERM: a training run saves a checkpoint then, and ends.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

# What a run gets to save itself after SIGTERM before it is killed. GPT-2 small's 1.5 GB took 3 s to a local disk.
_GRACE_S = 30.0
DONE, FAILED, CUT, NOT_STARTED = "done", "failed", "cut", "not started"


@dataclass(frozen=True)
class Job:
    """What to run: `function(device, *arguments)`, importable by name; its output goes to `log`.

    after: the name of a job that must be done first.
    watch: called every second in the parent while the job runs, and once more at its end, to tell how it goes.
    """

    name: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    log: Path
    after: str | None = None
    watch: Callable[[], None] = lambda: None


class Follow:
    """A job's `watch`: prints the lines that it has written since the last call, each behind a name.

    having: only those with these words.
    """

    def __init__(self, name: str, log: Path, having: str = "") -> None:
        self.name, self.log, self.having = name, log, having
        self.at = log.stat().st_size if log.exists() else 0

    def __call__(self) -> None:
        if not self.log.exists():
            return
        with self.log.open("rb") as file:
            file.seek(self.at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.at += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if self.having in line:
                print(f"{self.name} | {line}", flush=True)


def run(
    jobs: list[Job], devices: list[torch.device], deadline: float | None = None
) -> Iterator[tuple[Job, str]]:
    """Run jobs in their order, one at a time on each device; yield each with how it ended, when it has.

    Those that were not started come last. To close the iterator cuts what still runs.

    Args:
        deadline: on the clock of `time.monotonic`: what runs is cut then, and nothing is started any more.
    """
    waiting, free, undone = list(jobs), list(devices), {job.name for job in jobs}
    running: dict[BaseProcess, tuple[Job, torch.device]] = {}
    try:
        while True:
            late = _is_late(deadline)
            if late:
                _cut(running)
            for job in [each for each in waiting if each.after not in undone]:
                if free and not late:
                    waiting.remove(job)
                    device = free.pop(0)
                    running[_started(job, device)] = job, device
            if not running:
                break
            wait([process.sentinel for process in running], timeout=1.0)
            for process, (job, device) in list(running.items()):
                ended = not process.is_alive()
                job.watch()
                if ended:
                    del running[process]
                    free.append(device)
                    undone -= {job.name} if process.exitcode == 0 else set()
                    yield job, CUT if late and process.exitcode else FAILED if process.exitcode else DONE
    finally:
        _cut(running)
    for job in waiting:
        yield job, NOT_STARTED


def _is_late(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _cut(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    end = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()


def _started(job: Job, device: torch.device) -> BaseProcess:
    """The job's process, which sees one GPU, as if it were the only one; of a device without a number, all.

    In the environment it starts with: importing a library can already initialise CUDA.
    """
    name, seen = "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")
    alone = {}
    if device.index is not None:
        alone[name] = seen.split(",")[device.index] if seen else str(device.index)
    how = (device.type, job.function, job.arguments, job.log)
    process = multiprocessing.get_context("spawn").Process(target=_child, args=how)
    with patch.dict(os.environ, alone):
        process.start()
    return process


def _child(device_type: str, function: Callable[..., None], arguments: tuple[Any, ...], log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # so that it can be followed
    # Ctrl-C reaches every process: the parent then cuts its jobs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    function(torch.device(device_type), *arguments)


def _end_with_parent() -> None:
    """Cut this job when its parent is killed: else the next call would find a second writer of its files."""
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGTERM)
