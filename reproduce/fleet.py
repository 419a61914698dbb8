"""Long jobs on every GPU at once: each in a process of its own, cut at a deadline, and continued by the next call.

A job is a function that leaves its results in files and picks up where an earlier call of it was cut. A cut is
SIGTERM: a training run saves a checkpoint then, and ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# What a run gets to save itself after SIGTERM before it is killed. GPT-2 small's 1.5 GB took 3 s to a local disk.
_GRACE_S = 30.0
_STARTING = threading.Lock()
DONE, FAILED, CUT, NOT_STARTED = "done", "failed", "cut", "not started"


@dataclass(frozen=True)
class Job:
    """What to run: `function(device, *arguments)`, importable by name; its output goes to `log`.

    after: the name of a job that must be done first.
    watch: called every second in the parent while the job runs, to tell how it goes.
    """

    name: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    log: Path
    after: str | None = None
    watch: Callable[[], None] | None = None


class Fleet:
    """Runs jobs in their order on the given devices, one at a time on each; a context, which cuts what still runs.

    Args:
        deadline: on the clock of `time.monotonic`: what runs is cut then, and nothing is started any more.
    """

    def __init__(self, jobs: list[Job], devices: list[torch.device], deadline: float | None) -> None:
        self.deadline = deadline
        self._states = {job.name: NOT_STARTED for job in jobs}
        self._waiting, self._changed, self._closing = list(jobs), threading.Condition(), False
        self._threads = [threading.Thread(target=self._work, args=(device,)) for device in devices]

    def __enter__(self) -> Fleet:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        for thread in self._threads:
            thread.join()

    def wait(self, name: str) -> str:
        """DONE, FAILED, CUT or NOT_STARTED: how the job ended."""
        with self._changed:
            while self._states[name] in ("running", NOT_STARTED) and any(t.is_alive() for t in self._threads):
                self._changed.wait(1.0)
            return self._states[name]

    def _work(self, device: torch.device) -> None:
        while job := self._take():
            state = self._run(job, device)
            with self._changed:
                self._states[job.name] = state
                self._changed.notify_all()

    def _take(self) -> Job | None:
        """The first job that can start; waits while one is held up by a job that runs."""
        while not self._late():
            with self._changed:
                for job in self._waiting:
                    if job.after is None or self._states.get(job.after, DONE) == DONE:
                        self._waiting.remove(job)
                        self._states[job.name] = "running"
                        return job
                if not any(self._states.get(job.after) == "running" for job in self._waiting):
                    return None
                self._changed.wait(1.0)
        return None

    def _late(self) -> bool:
        return self._closing or (self.deadline is not None and time.monotonic() >= self.deadline)

    def _run(self, job: Job, device: torch.device) -> str:
        process = multiprocessing.get_context("spawn").Process(target=_child, args=(device.type, job))
        with _STARTING, _only_gpu(device):
            process.start()
        cut_at = None
        while process.is_alive():
            process.join(1.0)
            if job.watch:
                job.watch()
            if self._late() and cut_at is None:
                cut_at = time.monotonic()
                process.terminate()
            elif cut_at is not None and time.monotonic() - cut_at > _GRACE_S:
                process.kill()
        if process.exitcode == 0:
            return DONE
        return FAILED if cut_at is None else CUT


@contextmanager
def _only_gpu(device: torch.device) -> Iterator[None]:
    """A process started inside sees one GPU, as if it were the only one.

    In the environment it starts with: importing a library can already initialise CUDA.
    """
    if device.type != "cuda":
        yield
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = device.index or 0
    os.environ["CUDA_VISIBLE_DEVICES"] = before.split(",")[index] if before else str(index)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _child(device_type: str, job: Job) -> None:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches every process: the parent then cuts its jobs
    job.function(torch.device(device_type), *job.arguments)
