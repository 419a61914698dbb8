"""Files that are complete or absent: written elsewhere and renamed, and flushed to disk before they are relied on."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from . import DataError
from .progress import Progress

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def written_whole(path: Path, scratch: Path) -> Iterator[BinaryIO]:
    """Open a file in the folder `scratch` that becomes `path` when the block ends without an error.

    Whoever sees `path` sees all of it, also after a kill. After a power cut this holds only for files that were
    passed to flush_to_disk(). Raises DataError when the disk is full or the folder may not be written.
    """
    beside = scratch / f"{path.name}.{os.getpid()}.tmp"
    try:
        with open(beside, "wb") as file:
            yield file
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise unwritable(path, error) from None
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Wait until the files are on the disk; the system has been writing most of them all along."""

    def flush(path: Path) -> None:
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    paths = list(paths)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(flush, paths))
    except OSError as error:
        raise unwritable(paths[0].parent, error) from None


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError, setting: str = "data.cache_dir") -> DataError:
    """Return the error for a folder that `setting` can move elsewhere."""
    if error.errno in NO_ROOM:
        return DataError(
            f"no space to write {path} ({error.strerror}): free some, or choose another disk with {setting}; "
            "finished work is kept, and the same command continues from there"
        )
    return DataError(
        f"cannot write {path} ({error.strerror}): use {setting} to choose a folder that you can write to"
    )


@contextmanager
def readable() -> Iterator[None]:
    """Turn a file or folder that may not be read into a DataError that names it. Also a decorator."""
    try:
        yield
    except PermissionError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from None


class Need(NamedTuple):
    """Bytes that will be written to a folder, which `setting` can move elsewhere."""

    folder: Path
    size: int
    setting: str = "data.cache_dir"


def require_room(needs: Iterable[Need], name: str, what: str, progress: Progress) -> None:
    """State how many bytes will be written to each folder; raise DataError when a disk has less.

    Folders on one disk count together.
    """
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    for on_disk in disks.values():
        free = free_bytes(on_disk[0].folder)
        places = " and ".join(f"{human(need.size)} in {need.folder}" for need in on_disk)
        text = f"{name} needs about {places} ({what}); {human(free)} free"
        if sum(need.size for need in on_disk) > free:
            settings = " or ".join(need.setting for need in on_disk)
            raise DataError(
                f"not enough disk space: {text}: free some, or choose another disk with {settings}"
            )
        progress.say(text)


def human(size: float) -> str:
    """Return a number of bytes as people read it: 24.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def free_bytes(path: Path) -> int:
    """Return the room on the disk that holds `path` or would."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
