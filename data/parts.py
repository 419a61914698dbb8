"""What a corpus is cut into, and what the readers of every format share.

A part is a small picklable description of some text: a byte range of a file (read_text.py, read_json_lines.py), rows
of one (read_parquet.py) or of a dataset (hub_dataset.py). Parts can be read in any order by any process, so
preparation is parallel and resumable.

Local files are read with json and pyarrow, which `datasets` uses itself, rather than through `datasets`. Tried with
5.2, streaming in each worker so that it makes no Arrow copy:

    .parquet  The same tokens, a row group a unit; but a worker takes 2 to 4 CPU seconds and 260 MB to import it and
              open the first file. With two workers 121 MB of text took 1.8 times fewer CPU seconds than nanoGPT's
              prepare.py, instead of 2.9, and 545 MB went 1.26 times as fast as with one, instead of 1.82.
    .jsonl    A file is one unit, for one process, and a kill loses all of it. A row without the column becomes an
              empty document; a field that first appears after 10 MB, or changes its type there, stops the reading;
              text that looks like a date becomes one. After a broken line it reads the file again as a whole, with
              974 MB of memory for 316 MB.
    .txt      A document is read whole, 1,145 MB of memory for 288 MB, and its \\r\\n become \\n.

Where that does not matter, and for other formats, data=hub data.repo=FOLDER goes through `datasets`; not for .txt.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from . import DataError

if TYPE_CHECKING:
    import pyarrow

# Where a long document is cut: at a space after a visible character, or at a stop or comma after a letter or digit,
# since Chinese and Japanese have no spaces. A new piece starts there in the split patterns of all of tiktoken's
# encodings, so the tokens are those of the uncut document (tried with every character of Unicode beside the cut).
CUT = re.compile(r"(?<=\S) |(?<=[^\W_])[.,、。\uff0c]")
PIECE_BYTES = 1 << 20  # of a long text


class Part(Protocol):
    @property
    def text_bytes(self) -> int:
        """Approximate."""

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield the text; the bool says that a document ends with this piece."""


def as_text(value: object, column: str, where: str) -> str:
    """Return the text of a row; a missing value is an empty document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r} holds {type(value).__name__}, not text; name a text column, data.column=..."
        )
    return value


def missing_column(column: str, columns: Iterable[str], where: str) -> DataError:
    return DataError(
        f"{where} has no column {column!r}; it has {', '.join(columns)}: name one with data.column=..."
    )


def in_pieces(value: "pyarrow.Scalar") -> Iterator[tuple[str, bool]]:
    """A long text of an Arrow column, in pieces of about a megabyte as pieces() yields them.

    As a single str, 210 MB with an emoji took 1,546 MB in a worker, since Python then holds every character in 4
    bytes; this way it takes 1,026, most of it pyarrow's.
    """
    if not value.is_valid:  # a missing value is an empty document
        yield "", True
        return
    utf8 = memoryview(getattr(value, "value", value).as_buffer())  # a dictionary's is in a scalar of its own
    decode, text = codecs.getincrementaldecoder("utf-8")().decode, ""
    for start in range(0, len(utf8), PIECE_BYTES):
        text += decode(utf8[start : start + PIECE_BYTES])
        more = start + PIECE_BYTES < len(utf8)
        if more and (cut := CUT.search(text, max(0, len(text) - PIECE_BYTES))):
            yield text[: cut.start()], False
            text = text[cut.start() :]
    yield text + decode(b"", True), True
