"""Sources of text by name: a corpus before it is prepared."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any, ClassVar

from . import DataError
from .hub_dataset import HubDataset
from .local_files import PythonSource, TextFiles
from .openwebtext import OpenWebText
from .source import Source


@dataclass(frozen=True)
class Mix:
    """Prepared corpora: the folder of each, or of a run that was trained on it, and its weight (mix.py)."""

    kind: ClassVar = "mix"
    corpora: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.corpora) < 2:
            raise DataError(
                "mix needs prepared corpora, at least two: data.corpora='{FOLDER: 0.7, OTHER: 0.3}'"
            )


SOURCES: dict[str, type[Source] | type[Mix]] = {
    source.kind: source for source in (PythonSource, TextFiles, OpenWebText, HubDataset, Mix)
}
Paths = Sequence[str | os.PathLike] | str | os.PathLike  # one or several


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
    corpora: Mapping[str, float] | None = None,
    limit_documents: int | None = None,
) -> Source | Mix:
    """Return the corpus called `source` (python_source, text_files, openwebtext, hub, mix); nothing is read yet.

    In `separator`, \\n, \\r and \\t may be written as two characters, as a command line passes them. Raises DataError
    for values no corpus can have, and for an argument that the source would ignore.
    """
    if source not in SOURCES:
        raise DataError(f"there is no data source {source!r}: choose one of {', '.join(SOURCES)}")
    if limit_documents is not None and limit_documents < 2:
        raise DataError(
            f"data.limit_documents={limit_documents}: it must be at least 2, one to train on and one to validate on"
        )
    given: dict[str, Any] = {
        "roots": _absolute(_names(roots)),
        "files": _absolute(_names(files)) if source == "text_files" else _names(files),
        "column": column,
        "separator": separator,
        "repo": os.path.expanduser(repo),
        "config": config,
        "split": split,
        "revision": revision,
        "streaming": streaming,
        "corpora": dict(corpora or {}) or None,
        "limit_documents": limit_documents,
    }
    uses = [field.name for field in fields_of(SOURCES[source])]
    unused = {
        name: default for name, default in (make_corpus.__kwdefaults__ or {}).items() if name not in uses
    }
    for name, default in unused.items():
        if given[name] != default:
            raise DataError(f"data.{name} does not apply to source {source}, which uses {', '.join(uses)}")
    settings = {name: given[name] for name in uses if given[name] is not None}
    return SOURCES[source](**settings)


def _names(paths: Paths) -> tuple[str, ...]:
    return tuple(os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths))


def _absolute(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Absolute, since a repair may run in another folder, with ~ expanded, which shells leave in data.files=~/x."""
    return tuple(os.path.abspath(os.path.expanduser(path)) for path in paths if path)
