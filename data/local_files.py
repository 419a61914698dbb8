"""Text from files on this machine: Python source, and .txt, .jsonl and .parquet files."""

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from . import DataError
from .cuts import holds
from .parts import Part
from .progress import Progress
from .read_json_lines import json_lines_parts
from .read_parquet import parquet_parts
from .read_text import TextPart, read_text, text_parts
from .source import Source, state_of, too_few

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_ESCAPES = (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t"))  # in a separator: as typed, and as meant
_OTHER_FORMATS = "; for other formats, such as CSV, use data=hub data.repo=FOLDER"


@dataclass(frozen=True)
class PythonSource(Source):
    """Every .py file below `roots`, one document each, in path order. No roots: this Python's standard library."""

    kind: ClassVar = "python_source"
    roots: tuple[str, ...] = ()

    def state(self) -> str:
        return state_of(self.paths())

    def paths(self) -> list[Path]:
        found: list[Path] = []
        for root in self.roots or (sysconfig.get_paths()["stdlib"],):
            # what is installed beside the standard library is not part of it
            if not (files := _files_below(root, (".py",), without=("site-packages", "dist-packages"))):
                raise DataError(f"no .py file with text below {root}: name other folders, data.roots=[...]")
            found += files
        return _once(found)

    def parts(self, step: int) -> list[Part]:
        # some files of the standard library's own tests are in other encodings, or in none
        return [TextPart(str(path), 0, path.stat().st_size, errors="replace") for path in self.paths()]


@dataclass(frozen=True)
class TextFiles(Source):
    """Local .txt, .jsonl (also .gz, .zst) and .parquet files, in the order of the patterns, sorted within each.

    A .txt file is one document, or several with `separator` between them; a line or a row of the others is one.
    parts.py says why they are not read through `datasets`.
    """

    kind: ClassVar = "text_files"
    files: tuple[str, ...]
    column: str = "text"
    separator: str = ""

    def __post_init__(self) -> None:
        if not self.files:
            raise DataError("text_files needs files: data.files='*.txt' (globs or folders, one or a list)")
        for typed, meant in _ESCAPES:
            object.__setattr__(self, "separator", self.separator.replace(typed, meant))

    def state(self) -> str:
        return state_of(self.paths())

    def paths(self) -> list[Path]:
        found: list[Path] = []
        for pattern in self.files:
            paths = _files_below(pattern, SUFFIXES) if os.path.isdir(pattern) else _files(pattern)
            if not paths:
                raise DataError(
                    f"no {', '.join(SUFFIXES)} file with text matches data.files={pattern}{_OTHER_FORMATS}"
                )
            for path in paths:
                _require_readable(path)
            found += paths
        with_text = [path for path in _once(found) if path.stat().st_size]
        if not with_text:
            raise DataError(f"the files that match data.files={','.join(self.files)} are all empty")
        return with_text

    def fetch(self, progress: Progress, directory: Path) -> None:
        """Nothing to download; but a .txt file without the separator would silently become one document."""
        if not self.separator:
            return
        texts = [path for path in self.paths() if path.suffix == ".txt"]
        lacking = [path for path in texts if not holds(path, self.separator)]
        unix = self.separator.replace("\r\n", "\n")
        for path in lacking:
            text = read_text(path)
            for line_ends, other in (("Unix", unix), ("Windows", unix.replace("\n", "\r\n"))):
                if other in text:
                    raise DataError(
                        f"{path} has {line_ends} line ends, so the separator was not found in it: use "
                        f"data.separator={_typed(other)}"
                    )
        if lacking:
            files = (
                f"{len(lacking)} of {len(texts)} .txt files ({lacking[0]}{', ...' if lacking[1:] else ''})"
            )
            if lacking == texts:
                raise DataError(f"data.separator={_typed(self.separator)} is missing in {files}")
            progress.say(
                f"data.separator={_typed(self.separator)} is missing in {files}: each is one document"
            )

    def parts(self, step: int) -> list[Part]:
        paths = self.paths()
        texts = [path for path in paths if path.suffix == ".txt"]
        if self.separator and not texts:
            raise DataError("data.separator is for .txt files, and data.files has none: leave it out")
        if texts == paths and len(paths) == 1 and not self.separator:
            raise too_few(self.name, 1)
        parts: list[Part] = []
        for path in paths:
            if path.suffix == ".txt":
                parts += text_parts(path, step, self.separator)
            elif path.suffix == ".parquet":
                parts += parquet_parts(path, step, self.column)
            else:
                parts += json_lines_parts(path, step, self.column)
        return parts


def _once(paths: list[Path]) -> list[Path]:
    """Without those that are an earlier one under another name, such as a link."""
    found: dict[str, Path] = {}
    for path in paths:
        found.setdefault(os.path.realpath(path), path)
    return [*found.values()]


def _typed(separator: str) -> str:
    """The separator as a command line passes it."""
    for typed, meant in _ESCAPES:
        separator = separator.replace(meant, typed)
    return f"'{separator}'"


def _require_readable(path: Path) -> None:
    if not path.name.endswith(SUFFIXES):
        raise DataError(
            f"{path} is not one of {', '.join(SUFFIXES)}: name only such files in data.files{_OTHER_FORMATS}"
        )
    # pyarrow opens only names in UTF-8, while a file system allows any bytes
    if not path.name.endswith((".txt", ".jsonl")) and any("\ud800" <= each <= "\udfff" for each in str(path)):
        raise DataError(f"the name of {path} is not UTF-8, and such a file cannot be read: rename it")


def _files(pattern: str) -> list[Path]:
    """The files that match a glob (or a name with brackets), in path order; below ** no folder is entered twice.

    The same as from glob.glob, which however follows a link to a folder above it 40 times, and two of them for ever.
    """
    if os.path.isfile(pattern):
        return [Path(pattern)]
    above, recursive, below = (pattern + "/*" if pattern.endswith("/**") else pattern).partition("/**/")
    matches: set[Path] = set()
    if not recursive:
        matches.update(Path(match) for match in glob.glob(pattern) if os.path.isfile(match))
    for root in filter(os.path.isdir, glob.glob(above or "/") if recursive else ()):
        for folder, folders, _ in _folders(root):
            folders[:] = [name for name in folders if not name.startswith(".")]  # as glob does
            matches.update(_files(os.path.join(glob.escape(folder), below)))
    return sorted(matches)


def _files_below(root: str, suffixes: tuple[str, ...], without: tuple[str, ...] = ()) -> list[Path]:
    """The files in a folder that have one of the suffixes and are not empty, in path order."""
    found = []
    for folder, folders, names in _folders(root):
        folders[:] = [name for name in folders if name not in without]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(path for path in found if path.is_file() and path.stat().st_size)


def _folders(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk, in the order of names, that follows links to folders and enters each folder once."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}")

    seen = set()
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # by another link, or this one leads to a folder that holds it
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield folder, folders, names
