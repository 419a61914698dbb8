"""How a long preparation tells the caller where it is. The library prints nothing by itself."""

import os
import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tqdm import tqdm


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
    """Printed lines and one tqdm bar per stage, with its time left, on standard error: see `bar`."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None

    def say(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)

    def advance(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.close()
            self._stage = stage
            lines = total and not is_live()
            form = "{desc}: {percentage:.0f}% of {total_fmt}B" if lines else None  # None: tqdm's own
            # initial: what an earlier, interrupted preparation had done must not count in the speed
            self._bar = bar(form, desc=stage, total=total, initial=done, unit="B", unit_scale=True)
            if lines:  # not known before
                self._bar.bar_format += ", {remaining} left"
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def is_live() -> bool:
    """Whether standard error is a terminal that knows its width: on others, as in some containers, tqdm is blank."""
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


def bar(form: str | None, **how: Any) -> "tqdm":
    """A tqdm bar on standard error; where that is no terminal, a line every ten seconds instead."""
    from tqdm import tqdm

    live = is_live()
    return tqdm(
        dynamic_ncols=live,
        file=sys.stderr if live else _Lines(),
        mininterval=0.1 if live else 10,
        miniters=1,  # else tqdm's thread prints too when a line is late, and the next step once more
        bar_format=form,
        **how,
    )


class _Lines:
    """stderr for a bar that is not watched live: carriage returns become line ends, repeats and blanks go."""

    def __init__(self) -> None:
        self._last = ""

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line and line != self._last:
            print(line, file=sys.stderr)
            self._last = line

    def flush(self) -> None:
        sys.stderr.flush()
