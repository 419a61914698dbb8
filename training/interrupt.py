"""Ctrl-C and SIGTERM: finish the step in hand, so that the run can be saved and gone on with."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .distributed import World


class Interrupt:
    """Whether the run was told to stop."""

    def __init__(self, ranks: World) -> None:
        self._world = ranks
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

    def requested(self, *, may_wait: bool) -> bool:
        """Whether to stop after this step. Several ranks must agree, which they do only where they may wait."""
        if self._world.size > 1:
            if not may_wait:
                return False
            told = torch.tensor(self.signal, device=self._world.device)
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
            self.signal = int(told)
        return self.signal != 0
