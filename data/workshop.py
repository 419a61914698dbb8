"""The working folder of a preparation, and what lies in it before the manifest makes it a corpus.

A unit is a sequence of parts, about a shard of text. Any process can do either step for any unit, and redo it after a
kill; a record written last says that what a step wrote is whole.

    partial/00000.tokens, .tokens.json    tokenise.py: its documents in order, and how many
    train-00000.bin                       split.py: its training documents
    partial/00000.val, .split.json        split.py: the others, and which they are
    val-00000.bin                         split.py, once: the validation documents of all units
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from .files import make_folder, unwritable, written_whole
from .progress import Progress

_READ_TOKENS = 1 << 20


@dataclass(frozen=True)
class Workshop:
    """Where one corpus is made, and with which tokenizer. Small and picklable: every job carries it."""

    directory: Path
    tokenizer: str
    dtype: str

    @property
    def partial(self) -> Path:
        return self.directory / "partial"

    def staged(self, unit: int) -> Path:
        return self.partial / f"{unit:05d}.tokens"

    def held_out(self, unit: int) -> Path:
        return self.partial / f"{unit:05d}.val"

    def shard(self, split: str, unit: int) -> Path:
        return self.directory / f"{split}-{unit:05d}.bin"

    def read(self, path: Path, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Yield tokens start to stop of a file, a million at a time.

        Not memory-mapped: what was read would count as memory, 2.1 GB for 1.1 GB of text in one compressed file.
        """
        stop = self._tokens(path) if stop is None else stop
        for at in range(start, stop, _READ_TOKENS):
            count = min(stop - at, _READ_TOKENS)
            yield np.fromfile(path, self.dtype, count, offset=at * np.dtype(self.dtype).itemsize)

    def record_staged(self, unit: int, documents: int, tokens: int) -> None:
        self._write(self._staged_record(unit), {"documents": documents, "tokens": tokens})

    def record_split(self, unit: int, record: dict[str, Any]) -> None:
        self._write(self._split_record(unit), record)
        self.staged(unit).unlink()

    def staged_documents(self, unit: int) -> int | None:
        """Return how many documents a unit has, None if it is not tokenised."""
        record = _read(self._staged_record(unit))
        if record and (self.split_record(unit) or self._tokens(self.staged(unit)) == record["tokens"]):
            return record["documents"]
        return None

    def split_record(self, unit: int) -> dict[str, Any] | None:
        """Return what split_unit() recorded of a unit, None if it is not done."""
        record = _read(self._split_record(unit))
        whole = (
            record
            # after a power cut, a file that was not yet flushed may be shorter
            and self._tokens(self.shard("train", unit)) == record.get("shard", {}).get("tokens", 0)
            and self._tokens(self.held_out(unit)) == sum(record["val_lengths"])
        )
        return record if whole else None

    def remove_half_written(self) -> None:
        """Remove files that written_whole() had begun; only while holding the lock, with no process at work."""
        for path in self.partial.glob("*.tmp"):
            path.unlink()

    def _staged_record(self, unit: int) -> Path:
        return self.partial / f"{unit:05d}.tokens.json"

    def _split_record(self, unit: int) -> Path:
        return self.partial / f"{unit:05d}.split.json"

    def _write(self, path: Path, record: dict[str, Any]) -> None:
        with written_whole(path, self.partial) as file:
            file.write(json.dumps(record).encode())

    def _tokens(self, path: Path) -> int:
        return path.stat().st_size // np.dtype(self.dtype).itemsize if path.exists() else 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


@contextmanager
def lock(directory: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time make a corpus. The system lets go of the lock when its holder dies."""
    held = FileLock(directory / ".lock")
    try:
        while not held.is_locked:
            make_folder(directory)
            with suppress(FileNotFoundError):  # its holder failed, and removed the folder
                try:
                    held.acquire(timeout=0)
                except Timeout:
                    progress.say(f"another process is preparing {directory}: waiting for it")
                    held.acquire()
    except OSError as error:
        raise unwritable(directory, error) from None
    try:
        yield
    finally:
        held.release()
