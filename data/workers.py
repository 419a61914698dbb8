"""Run jobs in processes, a few ahead of the results, and turn a dead worker into a clear error."""

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from . import DataError


def cpu_count() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(function: Callable[..., Any], jobs: Iterable[tuple], workers: int) -> Iterator[Any]:
    """Yield function(*job) for each job, in order; with one worker, in this process.

    Closing the generator drops the jobs that have not started.
    """
    if workers <= 1:
        for job in jobs:
            yield function(*job)
        return
    # spawn: the caller may hold CUDA or threads, neither of which survives a fork
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)
    futures: deque = deque()
    try:
        for job in jobs:
            futures.append(pool.submit(function, *job))
            if len(futures) >= 2 * workers:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a tokenising process was killed, by the system if memory ran out: the same command goes on from what "
            f"is done; with fewer processes, data.workers={max(1, workers // 2)}, it needs less memory"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """A killed parent cannot tell its workers to stop: each watches for it."""
    sentinel = multiprocessing.parent_process().sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
