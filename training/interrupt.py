"""Ctrl-C and SIGTERM: finish the step in hand, so that the run can be saved and gone on with."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from .distributed import World


class Interrupt:
    """Whether the run was told to stop."""

    def __init__(self, ranks: World) -> None:
        # torchrun kills ranks 30 s after it passed a signal on, and the next log step may be further off. So the hosts
        # agree among themselves, after every step, without waiting for their devices; the exchange of gradients ties
        # the ranks together anyhow. Clocks will not do: no two are alike, and a rank that stops alone hangs the others.
        self._hosts = dist.new_group(backend="gloo") if ranks.size > 1 else None
        self.signal: int = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the signals instead of dying of them; a second Ctrl-C raises KeyboardInterrupt at once.

        A second SIGTERM does not: torchrun sends one to every rank when the first has left.
        """

        def note(number: int, _frame: object) -> None:
            if self.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether to stop after this step; every rank must ask after every step, and all get the same answer."""
        if self._hosts:
            told = torch.tensor(self.signal)
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self._hosts)
            self.signal = int(told)
        return self.signal != 0
