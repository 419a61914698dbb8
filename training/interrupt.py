"""Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 (SLURM, submitit), a terminal that closes: finish the step in hand, save."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .distributed import World


class StopRequested(Exception):
    """The run was told to stop."""


class Interrupt:
    """Receives signals to stop, and lets all ranks agree, after every step, on whether to do so."""

    def __init__(self, ranks: World) -> None:
        # torchrun kills a rank 30 s after passing a signal on, and the next log step may come later than that. So the
        # ranks ask each other after every step, and before every batch of an evaluation, on their hosts and without
        # waiting for a device. Stopping at an agreed time would not work: clocks differ, and a rank that stops alone
        # leaves the others waiting for ever.
        self._hosts = dist.new_group(backend="gloo") if ranks.size > 1 else None
        # Two numbers, since a signal may come while the ranks are agreeing that there was none.
        self._received: int = 0  # what this process was sent
        self.signal: int = 0  # what the run was sent, as agreed by all ranks

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the signals instead of dying from them; a second Ctrl-C raises KeyboardInterrupt at once.

        A second SIGTERM does not: torchrun sends one to every rank when the first has left.
        """
        terminals = [stream for stream in (1, 2) if os.isatty(stream)]

        def note(number: int, _frame: object) -> None:
            if self._received and number == signal.SIGINT:
                raise KeyboardInterrupt
            # Writing to a closed terminal raises, and the run is not saved yet.
            if number == signal.SIGHUP:
                for stream in terminals:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            self._received = number

        heard = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup the run continues
            heard.append(signal.SIGHUP)
        previous = {number: signal.signal(number, note) for number in heard}
        try:
            yield
        finally:
            # A traceback would keep it to the end of the interpreter, where gloo may abort.
            self._hosts = None
            for number, handler in previous.items():
                signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether to stop here; every rank must ask as often as the others, and all get the same answer."""
        agreed = torch.tensor(self._received)
        if self._hosts:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._hosts)
        self.signal = int(agreed)
        return self.signal != 0
