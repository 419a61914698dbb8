"""Run jobs in processes, a few ahead of the results, and turn a dead worker into a clear error."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from . import DataError


def cpu_count() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """`count` processes for the time of a `with` block; 1 is the calling process itself.

    They start at once, each with a call of `first`, while the caller continues. When an error or Ctrl-C ends the
    block, they stop at once too, even within a job, which may be gigabytes of a compressed file.
    """

    def __init__(self, count: int, first: Callable[[], Any]):
        self.count, self._first = count, first
        self._pool: ProcessPoolExecutor | None = None
        self._end: multiprocessing.connection.Connection | None = None  # what is sent here ends the processes

    def __enter__(self) -> "Workers":
        if self.count > 1:
            # spawn: the caller may hold CUDA or threads, neither of which survives a fork
            context = multiprocessing.get_context("spawn")
            ended, self._end = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(
                self.count, mp_context=context, initializer=_begin, initargs=(self._first, ended)
            )
            # Ctrl-C in a terminal reaches them too; until _begin() each would print where it stood
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                for _ in range(self.count):
                    self._pool.submit(os.getpid)  # a job that finds no process free starts one
            except BrokenProcessPool:
                pass  # run() tells of it
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._pool:
            if error and self._end:
                self._end.send(None)  # nobody receives it, so that all of them see it
            self._pool.shutdown(cancel_futures=True)

    def run(self, function: Callable[..., Any], jobs: Iterable[tuple]) -> Generator[Any, None, None]:
        """Yield function(*job) for each job, in order. Closing the generator drops the jobs not yet started."""
        if self._pool is None:
            for job in jobs:
                yield function(*job)
            return
        futures: deque = deque()
        try:
            for job in jobs:
                futures.append(self._pool.submit(function, *job))
                if len(futures) >= 2 * self.count:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "a tokenising process was killed, by the system if memory ran out: the same command continues from "
                f"what is done; fewer processes need less memory, data.workers={self.count // 2}"
            ) from None
        finally:
            for future in futures:
                future.cancel()


def _begin(first: Callable[[], Any], ended: multiprocessing.connection.Connection) -> None:
    _end_with_parent(ended)
    first()


def _end_with_parent(ended: multiprocessing.connection.Connection) -> None:
    """Watch the parent, which cannot tell its workers to stop once it is killed. Ctrl-C is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel, ended])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
