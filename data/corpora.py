"""Where text comes from: Python source and local text files here, the rest in openwebtext.py and hub_dataset.py."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from . import DataError
from .progress import Progress
from .readers import Part, TextPart, holds, json_lines_parts, parquet_parts, read_text, text_parts

# Every source, and the arguments of make_corpus() that it uses besides limit_documents.
USES = {
    "python_source": ("roots",),
    "text_files": ("files", "column", "separator"),
    "openwebtext": ("files", "revision"),
    "hub": ("repo", "config", "split", "revision", "column", "files", "streaming"),
}
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_OTHER_FORMATS = "; for other formats, such as CSV, use data=hub data.repo=FOLDER"

_ESCAPES = (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t"))  # as typed, and as meant

Paths = Sequence[str | os.PathLike] | str | os.PathLike  # one or several


class Source(Protocol):
    """A corpus before it is prepared."""

    limit_documents: int | None  # take only so many documents, from the start

    @property
    def name(self) -> str:
        """Short, for the folder and the manifest."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What make_corpus() takes to make it again."""

    def state(self) -> str:
        """A string that changes when the text does: a commit, or a hash of the names, sizes and times of files."""

    def fetch(self, progress: Progress, directory: Path) -> None:
        """Download what is not on this machine yet; the tokens will go to `directory`."""

    def parts(self, step: int) -> list[Part]:
        """The text, in order, in parts of about `step` bytes."""

    def expected(self, tokenizer_sha256: str, val_fraction: float) -> dict[str, int] | None:
        """The published counts (documents, and tokens of train and val) that a preparation must arrive at."""


def make_corpus(
    source: str,
    *,
    roots: Paths = (),
    files: Paths = (),
    column: str = "text",
    separator: str = "",
    repo: str = "",
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    streaming: bool = False,
    limit_documents: int | None = None,
) -> Source:
    """Return the corpus called `source` (python_source, text_files, openwebtext, hub); nothing is read yet.

    In `separator`, \\n, \\r and \\t may be written as two characters, as a command line passes them. Raises DataError
    for values no corpus can have, and for an argument that the source would ignore.
    """
    if source not in USES:
        raise DataError(f"there is no data source {source!r}: choose one of {', '.join(USES)}")
    given = {
        "roots": roots,
        "files": files,
        "separator": separator,
        "column": column != "text" and column,
        "repo": repo,
        "config": config,
        "split": split != "train" and split,
        "revision": revision,
        "streaming": streaming,
    }
    for name, value in given.items():
        if value and name not in USES[source]:
            raise DataError(
                f"data.{name} does not apply to source {source}, which uses {', '.join(USES[source])}"
            )
    roots, files = _names(roots), _names(files)
    if limit_documents is not None and limit_documents < 2:
        raise DataError(
            f"data.limit_documents={limit_documents}: it must be at least 2, one to train on and one to validate on"
        )
    if source == "python_source":
        return PythonSource(_absolute(roots), limit_documents)
    if source == "text_files":
        if not any(files):
            raise DataError("text_files needs files: data.files='*.txt' (globs or folders, one or a list)")
        for typed, meant in _ESCAPES:
            separator = separator.replace(typed, meant)
        return TextFiles(_absolute(files), column, separator, limit_documents)
    from .hub_dataset import HubDataset
    from .openwebtext import OPENWEBTEXT_COMMIT, OpenWebText

    if source == "openwebtext":
        return OpenWebText(tuple(files), revision or OPENWEBTEXT_COMMIT, limit_documents)
    repo = os.path.expanduser(repo)
    return HubDataset(repo, config, split, revision, column, tuple(files), streaming, limit_documents)


def _typed(separator: str) -> str:
    for typed, meant in _ESCAPES:
        separator = separator.replace(meant, typed)
    return f"'{separator}'"


def _names(paths: Paths) -> list[str]:
    return list(map(os.fspath, [paths] if isinstance(paths, str | os.PathLike) else paths))


def _absolute(paths: Iterable[str]) -> tuple[str, ...]:
    """Absolute, since a repair may run in another folder, with ~ expanded, which shells leave in data.files=~/x."""
    return tuple(os.path.abspath(os.path.expanduser(path)) for path in paths if path)


def state_of(paths: Iterable[Path]) -> str:
    """A hash of the names, sizes and times of files."""
    digest = hashlib.sha256()
    for path in paths:
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


@dataclass(frozen=True)
class LocalFiles:
    """What corpora of files on this machine have in common."""

    def fetch(self, progress: Progress, directory: Path) -> None:
        """Nothing to do: the files are here."""

    def paths(self) -> list[Path]:
        raise NotImplementedError

    def state(self) -> str:
        return state_of(self.paths())

    def expected(self, tokenizer_sha256: str, val_fraction: float) -> None:
        """No published counts are known for them."""


@dataclass(frozen=True)
class PythonSource(LocalFiles):
    """Every .py file below `roots`, one document each, in path order. No roots: this Python's standard library."""

    roots: tuple[str, ...] = ()
    limit_documents: int | None = None

    @property
    def name(self) -> str:
        return limited("python_source", self.limit_documents)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"source": "python_source", **asdict(self)}

    def paths(self) -> list[Path]:
        found: list[Path] = []
        for root in self.roots or (sysconfig.get_paths()["stdlib"],):
            if not (files := _files_below(root, (".py",))):
                raise DataError(f"no .py file with text below {root}: name other folders, data.roots=[...]")
            found += files
        return found

    def parts(self, step: int) -> list[Part]:
        # some files of the standard library's own tests are in other encodings, or in none
        return [TextPart(str(path), 0, path.stat().st_size, errors="replace") for path in self.paths()]


@dataclass(frozen=True)
class TextFiles(LocalFiles):
    """Local .txt, .jsonl (also .gz, .zst) and .parquet files, in the order of the patterns, sorted within each.

    A .txt file is one document, or several with `separator` between them; a line or a row of the others is one.
    readers.py says why they are not read through `datasets`.
    """

    files: tuple[str, ...]
    column: str = "text"
    separator: str = ""
    limit_documents: int | None = None

    @property
    def name(self) -> str:
        return limited("text_files", self.limit_documents)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"source": "text_files", **asdict(self)}

    def paths(self) -> list[Path]:
        found: dict[tuple[str, str], Path] = {}  # by real folder and name, in order
        real_folder = cache(os.path.realpath)
        for pattern in self.files:
            paths = _files_below(pattern, SUFFIXES) if os.path.isdir(pattern) else _files(pattern)
            if not paths:
                raise DataError(
                    f"no {', '.join(SUFFIXES)} file with text matches data.files={pattern}{_OTHER_FORMATS}"
                )
            for path in paths:
                found.setdefault((real_folder(path.parent), path.name), path)
        for path in found.values():
            if not path.name.endswith(SUFFIXES):
                raise DataError(
                    f"{path} is not one of {', '.join(SUFFIXES)}: name only such files in data.files{_OTHER_FORMATS}"
                )
            if not path.name.endswith((".txt", ".jsonl")) and not _is_utf8(str(path)):
                raise DataError(f"the name of {path} is not UTF-8, and such a file cannot be read: rename it")
        with_text = [path for path in found.values() if path.stat().st_size]
        if not with_text:
            raise DataError(f"the files that match data.files={','.join(self.files)} are all empty")
        return with_text

    def fetch(self, progress: Progress, directory: Path) -> None:
        """Nothing to download; but a .txt file without the separator would be one document without a word."""
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


class Unfit(DataError):
    """The text that was read makes no corpus; the work done so far is of no use to a later preparation."""


def too_few(name: str, documents: int) -> Unfit:
    return Unfit(
        f"{name} has {documents} {'document' if documents == 1 else 'documents'}, but training and validation need "
        "one each: give more files, or say what separates the documents within a .txt file, "
        "data.separator='\\n\\n' for paragraphs"
    )


def limited(name: str, limit_documents: int | None) -> str:
    return name if limit_documents is None else f"{name}-first-{limit_documents}"


def _is_utf8(name: str) -> bool:
    """pyarrow opens only names in UTF-8, where a file system allows any bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _files(pattern: str) -> list[Path]:
    """The files that match a glob (or a name with brackets), in path order; below ** no folder is entered twice.

    Those that glob.glob finds, but that follows a link to a folder above it 40 times, and two such links for ever.
    """
    if os.path.isfile(pattern):
        return [Path(pattern)]
    above, recursive, below = (pattern + "/*" if pattern.endswith("/**") else pattern).partition("/**/")
    matches = set()
    if not recursive:
        matches.update(Path(match) for match in glob.glob(pattern) if os.path.isfile(match))
    for root in filter(os.path.isdir, glob.glob(above or "/") if recursive else ()):
        for folder, folders, _ in _folders(root):
            folders[:] = [name for name in folders if not name.startswith(".")]  # as glob does
            matches.update(_files(os.path.join(glob.escape(folder), below)))
    return sorted(matches)


def _files_below(root: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files in a folder that have one of the suffixes and are not empty, in path order."""
    found = []
    for folder, folders, names in _folders(root):
        # what is installed beside the standard library is not part of it
        folders[:] = [name for name in folders if name not in ("site-packages", "dist-packages")]
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
