"""What a source of text is, before it is prepared; and what the sources share."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from . import DataError
from .parts import Part
from .progress import Progress


@dataclass(frozen=True)
class Source(ABC):
    """A corpus before it is prepared: a frozen dataclass of the arguments of make_corpus() that it uses."""

    kind: ClassVar[str]  # what make_corpus() calls it
    limit_documents: int | None = field(default=None, kw_only=True)  # take only so many, from the start

    @property
    def name(self) -> str:
        """Short, for the folder and the manifest."""
        return limited(self.kind, self.limit_documents)

    @property
    def arguments(self) -> dict[str, Any]:
        """What make_corpus() takes to make it again."""
        return {"source": self.kind, **asdict(self)}

    @abstractmethod
    def state(self) -> str:
        """A string that changes when the text does: a commit, or a hash of the names, sizes and times of files."""

    @abstractmethod
    def parts(self, step: int) -> list[Part]:
        """The text, in order, in parts of about `step` bytes."""

    def fetch(self, progress: Progress, directory: Path) -> None:  # noqa: B027
        """Download what is not on this machine yet; the tokens will go to `directory`."""

    def expected(self, tokenizer_sha256: str, val_fraction: float) -> dict[str, int] | None:
        """The published counts (documents, and tokens of train and val) that a preparation must arrive at."""
        return None


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


def state_of(paths: Iterable[Path]) -> str:
    """A hash of the names, sizes and times of files."""
    digest = hashlib.sha256()
    for path in paths:
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
