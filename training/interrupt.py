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
        """Note the signals instead of dying of them; a second one raises KeyboardInterrupt at once."""

        def note(number: int, _frame: object) -> None:
            if self.signal:
                raise KeyboardInterrupt
            self.signal = number

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether any rank was told to stop. With several ranks this waits for all of them."""
        if self._world.size > 1:
            told = torch.tensor(self.signal, device=self._world.device)
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
            self.signal = int(told)
        return self.signal != 0
