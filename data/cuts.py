"""Where a file can be cut into byte ranges to read one by one: between documents, or where no token changes."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from .parts import CUT

SEARCH_BYTES = 1 << 20  # read at a time

NextCut = Callable[[BinaryIO, int], int]  # the first place to cut at or after an offset


def byte_ranges(path: Path, step: int, next_cut: NextCut) -> list[tuple[int, int]]:
    """Return byte ranges that cover the file, each but the last ending at the first cut after `step` bytes."""
    size = path.stat().st_size
    edges = [0]
    with open(path, "rb") as file:
        while edges[-1] + step < size:
            edges.append(next_cut(file, edges[-1] + step))
    if edges[-1] != size:
        edges.append(size)
    return list(pairwise(edges))


def holds(path: Path, mark: str) -> bool:
    """Whether `mark` is in a file, which is read up to there."""
    wanted, window = mark.encode(), b""
    with open(path, "rb") as file:
        while block := file.read(SEARCH_BYTES):
            window += block
            if wanted in window:
                return True
            window = window[-len(wanted) :]
    return False


def after(mark: bytes) -> NextCut:
    """A cut after the next `mark`, however far; else the end of the file.

    Not after one that another overlaps on its left: a text that is split at pairs of newlines, from its start, takes
    the first two of three, and a cut after the last two would leave a document that the whole text does not have.
    """
    pattern, context = re.escape(mark), len(mark) - 1
    for shift in range(1, len(mark)):
        if mark.startswith(mark[shift:]):  # it can begin again `shift` bytes on
            pattern += b"(?<!%s)" % re.escape(mark[:shift] + mark)
    compiled = re.compile(pattern)

    def next_cut(file: BinaryIO, start: int) -> int:
        at = start - context
        file.seek(at)
        window = file.read(context)  # a mark that overlaps another may begin in it
        while block := file.read(SEARCH_BYTES):
            window += block
            if match := compiled.search(window, context):
                return at + match.end()
            done = max(0, len(window) - 2 * context)
            at, window = at + done, window[done:]
        return at + len(window)

    return next_cut


def at_space(file: BinaryIO, start: int) -> int:
    """A cut before the next space after a visible character, or at the next CUT; else the end of the file.

    Between any two characters if the next SEARCH_BYTES hold none of these.
    """
    file.seek(start)
    window = file.read(SEARCH_BYTES)
    # visible in ASCII: the last byte of another character does not say whether it is one of Unicode's spaces
    if match := re.search(rb"(?<=[!-~]) ", window):
        return start + match.start()
    begun = len(window) - len(window.lstrip(bytes(range(0x80, 0xC0))))  # where a character begins
    text = window[begun:].decode(errors="ignore")  # the last one may end beyond
    if place := CUT.search(text):
        return start + begun + len(text[: place.start()].encode())
    return start + (begun if len(window) == SEARCH_BYTES else len(window))
