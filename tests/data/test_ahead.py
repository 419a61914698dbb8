"""Ctrl-C while a preparation waits for the thread that reads ahead."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import data.prepare
from data.source import Source


class Interrupting:
    """A text of two blocks; at the first reading Ctrl-C comes while the main thread waits for the second's end."""

    text_bytes = 2 << 20
    readings = 0

    def pieces(self) -> Iterator[tuple[str, bool]]:
        yield "a" * (1 << 20), True
        self.readings += 1
        if self.readings == 1:
            while "join" not in main_thread_calls():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        yield "b", True


def main_thread_calls() -> list[str]:
    frame = sys._current_frames()[threading.main_thread().ident]
    return [call.name for call in traceback.extract_stack(frame)]


@dataclass(frozen=True)
class Interrupted(Source):
    kind = "interrupted"

    def state(self) -> str:
        return ""

    def parts(self, step: int) -> list[Interrupting]:
        return [Interrupting()]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # how it went unheard
def test_ctrl_c_stops_a_preparation_also_where_it_waits_for_the_reader(tmp_path: Path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            data.prepare.prepare(Interrupted(), "bytes", tmp_path, workers=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.glob("*/manifest.json"))
