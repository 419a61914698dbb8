"""Prefetching: an iterator that a thread runs ahead of its consumer."""

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


def ahead(items: Iterable[Item], depth: int) -> Generator[Item, None, None]:
    """Yield the items, made by a thread that runs up to `depth` items ahead; exceptions in it are raised here.

    Closing the generator ends the thread, after the item it is at. Close it rather than drop it: Python ignores a
    Ctrl-C that comes while it collects a generator.
    """
    ready: queue.Queue = queue.Queue(maxsize=depth)
    closed = threading.Event()

    def put(item: object, error: Exception | None = None) -> None:
        while not closed.is_set():
            try:
                return ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item)
                if closed.is_set():
                    return
            put(_END)
        except Exception as error:
            put(_END, error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error:
                raise error
            if item is _END:
                return
            yield item
    finally:
        closed.set()
        thread.join()
