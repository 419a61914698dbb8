"""Parts of a .txt file, or of any other that is text as it stands."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import DataError
from .cuts import after, at_space, byte_ranges


@dataclass(frozen=True)
class TextPart:
    """Bytes start to stop of a text file, in UTF-8; `errors` says what becomes of other bytes, as in bytes.decode."""

    path: str
    start: int
    stop: int
    separator: str = ""
    ends: bool = True
    errors: str = "strict"

    @property
    def text_bytes(self) -> int:
        return self.stop - self.start

    def pieces(self) -> Iterator[tuple[str, bool]]:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            text = decoded(file.read(self.stop - self.start), self.path, self.start, self.errors)
        if not self.separator:
            yield text, self.ends
            return
        for document in text.split(self.separator):
            if document:
                yield document, True


def text_parts(path: Path, step: int, separator: str = "") -> list[TextPart]:
    """Cut a text file into parts of about `step` bytes, between documents or, within one, at a space."""
    if separator:
        cuts = byte_ranges(path, step, after(separator.encode()))
        return [TextPart(str(path), start, stop, separator) for start, stop in cuts]
    cuts = byte_ranges(path, step, at_space)  # as at CUT, the tokens stay those of the uncut document
    return [TextPart(str(path), start, stop, ends=stop == cuts[-1][1]) for start, stop in cuts]


def read_text(path: Path) -> str:
    """A whole file. Raises DataError if it is not UTF-8."""
    return decoded(path.read_bytes(), str(path), 0)


def decoded(content: bytes | bytearray, path: str, offset: int, errors: str = "strict") -> str:
    """Return the text of bytes that begin at `offset` of a file, without the mark that Windows puts before it."""
    try:
        text = content.decode("utf-8", errors)
        return text if offset else text.removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        # as Windows writes it; read as latin1 it would train on a NUL behind every letter
        utf16 = not offset and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise DataError(
            f"{path}: byte {offset + error.start} ({content[error.start]:#04x}) is not UTF-8: convert the file, "
            f"{'it looks like UTF-16:' if utf16 else 'for example with'} iconv -f {'utf-16' if utf16 else 'latin1'} "
            "-t utf-8"
        ) from None
