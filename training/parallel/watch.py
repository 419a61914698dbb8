"""Finds a rank that is lost or stuck: each reports that it lives and how far it is, and one that does not is named.

A rank that waits for a lost one sits in a collective, whose own timeout is ten minutes and names nobody. So a thread
of each writes a line into torchrun's store every second. Rank 0 reads them all and judges the others; the last rank
judges rank 0.

    dead       no line for GONE seconds, and no process (links.py): it is named, and the run is saved, if another rank
               can, and ends. Likewise if its process is stopped, after SILENT seconds
    slow       its process lives but gives no line, as in a call that keeps Python's lock: named after BEHIND seconds,
               and after the limit (parallel.timeout) taken for dead
    hung       it gives lines, but does nothing while others wait for it: as if slow

A rank that cannot go on, such as rank 0 when the disk is full, says so before it ends, and the others end with it.

Time counts only while the rank that judges could watch: where all ranks are in such a call, none counts as silent.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from .. import torchrun
from ..config import ConfigError
from ..distributed import World
from .links import Links, is_stopped

BEAT, GONE, SILENT, BEHIND = 1.0, 5.0, 20.0, 40.0
# Once a collective has failed on some rank: torchrun kills what is left after 30 s.
SILENT_WHEN_BROKEN = 12.0
_numbers = itertools.count()  # of the runs in this process, which share a store


@dataclass
class _Seen:
    """What a judging rank knows of another."""

    line: str = ""
    silent: float = 0.0  # seconds since its line changed
    ticks: int = -1  # how many things it has done (`Watch.tick`)
    waiting: float = 0.0  # seconds since `ticks` changed
    doing: str = ""  # in words
    state: str = ""  # alive, busy, broken (a collective has failed) or left
    named: int = -1  # its ticks when it was last reported as behind


class Watch:
    """A rank's heartbeat: a thread that reports and watches, told by the main thread how far this rank is.

    rescue: called when a rank is lost, with a message about it, in this thread of a rank that is left, while its main
        thread waits; returns what became of the run, in words.
    """

    def __init__(self, ranks: World, limit: float, rescue: Callable[[str], str]) -> None:
        self._ranks, self._limit, self._rescue = ranks, limit, rescue
        self._ticks, self._doing, self._state = 0, "starting", "alive"
        self._done = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None
        if ranks.size == 1:
            return
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=SILENT))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"watch/{attempt}/{next(_numbers)}", store)
        self._store.set(f"who/{ranks.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        self._links = Links(ranks.rank, self._store)
        self._judged = time.monotonic()
        self._beats = itertools.count()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, from when all ranks have made their Watch until this rank no longer waits for the others."""
        if self._thread is None:
            yield
            return
        self._thread.start()
        try:
            yield
        except ConfigError as error:  # often of this rank alone, as where rank 0 finds the disk full
            with suppress(dist.DistError):
                self._store.set("refused", str(error))
            raise
        except RuntimeError as error:
            if not is_of_a_collective(error):
                raise
            self._state = "broken"
            self._thread.join(SILENT)
            if self._ending:  # it knows who is lost, and ends this process
                self._thread.join()
            raise
        else:
            self._state = "left"
        finally:
            self._done.set()
            if self._state == "left":
                self._beat()

    def tick(self, doing: str) -> None:
        """Something is done, and `doing` begins. All ranks must call it equally often: the counts are compared."""
        self._ticks += 1
        self._doing = doing

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Context for what may keep the thread from running: writing a file of some gigabytes holds Python's lock."""
        if self._thread is not None:
            self._doing, self._state = doing, "busy"
            self._beat()
        try:
            yield
        finally:
            self._state = "alive"

    # ---- the thread ------------------------------------------------------------------------------

    def _beat(self) -> None:
        line = f"{next(self._beats)}|{self._ticks}|{self._state}|{self._doing}"
        self._store.set(f"beat/{self._ranks.rank}", line)

    def _watch(self) -> None:
        rank, size = self._ranks.rank, self._ranks.size
        judges = rank in (0, size - 1)
        seen = {other: _Seen() for other in range(size) if other != rank}
        if rank:
            self._links.connect()
        while not self._done.wait(BEAT):
            try:
                self._beat()
                if self._store.check(["lost"]):
                    self._end(self._store.get("lost").decode())
                if self._store.check(["refused"]):
                    self._follow(self._store.get("refused").decode())
                if judges and (lost := self._judge(seen)):
                    self._store.set("lost", lost)
                    self._end(lost)
            except dist.DistError as error:
                if not self._done.is_set():
                    first = str(error).splitlines()[0]
                    why = f"the store of the ranks cannot be reached, on the host of rank 0 ({first})"
                    self._end(f"0:{why}: rank {rank} was {self._doing}")

    def _judge(self, seen: dict[int, _Seen]) -> str | None:
        """Read the lines; "RANK:what to say" of a rank that is lost."""
        # Before the lines are read: a rank says that it leaves, and then its process ends.
        lives = {rank: self._links.lives(rank) for rank in seen}
        lines = self._store.multi_get([f"beat/{n}" for n in seen])
        now = time.monotonic()
        passed, self._judged = min(now - self._judged, 3 * BEAT), now
        for each, line in zip(seen.values(), lines, strict=True):
            each.silent, each.waiting = each.silent + passed, each.waiting + passed
            if each.line != line.decode():
                each.line, each.silent = line.decode(), 0.0
                _, ticks, each.state, each.doing = each.line.split("|")
                if int(ticks) != each.ticks:
                    each.ticks, each.waiting = int(ticks), 0.0
        everyones = [self._ticks, *(each.ticks for each in seen.values())]
        broken = "broken" in (self._state, *(each.state for each in seen.values()))
        for rank, each in seen.items():
            if each.state == "left" or (rank == 0) == (self._ranks.rank == 0):
                continue  # rank 0 is the last rank's to judge, and all others are rank 0's
            if each.silent > GONE and each.silent > self._patience(rank, each, lives[rank], broken):
                return f"{rank}:{self._of(rank)} does not answer, for {each.silent:.0f} s: last heard of {each.doing}"
            behind = (
                f"{self._of(rank)} has been {each.doing} for {each.waiting:.0f} s, while others wait for it"
            )
            last = each.ticks == min(everyones) < max(everyones)
            if last and each.waiting > self._limit:
                return f"{rank}:{behind}"
            if (last or each.silent > BEHIND) and each.waiting > BEHIND and each.named != each.ticks:
                each.named = each.ticks
                limit = f"taken for dead after {self._limit:.0f} s (parallel.timeout)"
                print(f"warning: {behind}; {limit}", file=sys.stderr, flush=True)
        return None

    def _patience(self, rank: int, each: _Seen, lives: bool | None, broken: bool) -> float:
        """How long the rank may give no line."""
        if lives is False:
            return GONE
        if broken:
            return SILENT_WHEN_BROKEN
        host, _, process = self._store.get(f"who/{rank}").decode().partition(", process ")
        stopped = host == socket.gethostname() and is_stopped(int(process))
        return self._limit if each.state == "busy" or (lives and not stopped) else SILENT

    def _of(self, rank: int) -> str:
        return f"rank {rank} ({self._store.get(f'who/{rank}').decode()})"

    def _end(self, lost: str) -> None:
        """End this process; on the first rank that is left, save the run and say what happened before."""
        self._ending = True
        number, _, why = lost.partition(":")
        if self._ranks.rank == (0 if number != "0" else self._ranks.size - 1):
            print(f"error: {why}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(15, file=2)  # where it hangs, before torchrun kills it
            # torchrun does not kill it if a rank is stopped.
            ending = threading.Timer(self._limit, self._give_up)
            ending.daemon = True
            ending.start()
            try:
                print(self._rescue(why), file=sys.stderr, flush=True)
            except Exception as error:  # a full disk, for one
                print(f"error: the run is not saved: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        time.sleep(SILENT)  # if this rank exits, torchrun ends the one that saves
        os._exit(1)

    def _follow(self, why: str) -> None:
        """End with a rank that has said why it cannot go on, where this one does not by itself."""
        self._ending = True
        # The refusing rank may be closing wandb: if this one exits, torchrun ends that one before it has said why.
        until = time.monotonic() + SILENT
        while self._state != "broken" and time.monotonic() < until:
            if self._done.wait(BEAT):
                return
        if self._done.wait(GONE):
            return
        torchrun.tell(f"error: {why}")
        if os.environ["LOCAL_RANK"] == "0":  # what that rank has printed may be on another host
            print(f"error: {why}", file=sys.stderr, flush=True)
        os._exit(1)

    def _give_up(self) -> None:
        print(f"error: the run is not saved after {self._limit:.0f} s", file=sys.stderr, flush=True)
        os._exit(1)


def is_of_a_collective(error: RuntimeError) -> bool:
    """Whether a collective has failed, as where another rank has ended."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
