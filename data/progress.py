"""How a long preparation tells the caller where it is. The library prints nothing by itself."""

import sys
from typing import Any, Protocol


class Progress(Protocol):
    """What prepare() calls; give it any object with these two methods."""

    def say(self, text: str) -> None:
        """Show a line worth reading, such as the disk space that is about to be used."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `stage` (downloading, tokenising, splitting) are finished."""


class Silence:
    """Progress that shows nothing."""

    def say(self, text: str) -> None:
        pass

    def advance(self, stage: str, done: int, total: int) -> None:
        pass


class ConsoleProgress:
    """Printed lines and one tqdm bar per stage, with its ETA, on standard error; into a file, every ten seconds."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None

    def say(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)

    def advance(self, stage: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if stage != self._stage:
            self.close()
            self._stage = stage
            often = 0.1 if sys.stderr.isatty() else 10
            form: Any = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, "mininterval": often}
            # initial: what an earlier, interrupted preparation had done must not count in the speed
            self._bar = tqdm(desc=stage, total=total, initial=done, **form)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
