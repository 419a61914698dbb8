"""Parts of a corpus and how each is read.

A part is a small picklable description of some text (a byte range of a file, row groups of a parquet file, ...)
with `text_bytes`, its approximate size, and `pieces()`, which yields (text, ends): `ends` says that the document
ends with this piece. Parts can be read in any order by any process, so preparation is parallel and resumable.

Local files are read with json and pyarrow, which `datasets` uses itself, rather than through `datasets`. Tried with
5.2, streaming in each worker so that it makes no Arrow copy:

    .parquet  The same tokens, a row group a unit; but a worker takes 2 to 4 CPU seconds and 260 MB to import it and
              open the first file. With two workers 121 MB of text took 1.8 instead of 2.9 times fewer CPU seconds
              than nanoGPT's prepare.py, and 545 MB went 1.26 instead of 1.82 times as fast as with one.
    .jsonl    A file is one unit, for one process, and a kill loses all of it. A row without the column becomes an
              empty document; a field that first appears after 10 MB, or changes its type there, stops the reading;
              text that looks like a date becomes one. A broken line has it read the file again as a whole, 974 MB of
              memory for 316 MB.
    .txt      A document is read whole, 1,145 MB of memory for 288 MB, and its \\r\\n become \\n.

Where that does not matter, and for other formats, data=hub data.repo=FOLDER goes through `datasets`; not for .txt.
"""

import codecs
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from . import DataError

if TYPE_CHECKING:
    import pyarrow

# Where no place to cut is found in this many bytes, a range is cut between any two characters.
_SEARCH_BYTES = 1 << 20
# Rows are read in batches of about this much where they are long: with rows of 12 MB 1.1 instead of 2.4 GB of memory,
# of which 1 GB is the single page that pyarrow had written them to.
_BATCH_BYTES = 8 << 20
_LONG_LINE = 32 << 20  # bytes of a line of JSON
_PIECE_BYTES = 1 << 20  # of a long text
# Where a long document is cut: at a space after a visible character, or at a stop or comma after a letter or digit,
# for Chinese and Japanese have no spaces. A new piece starts there in the split patterns of all of tiktoken's
# encodings, so the tokens are those of the uncut document (tried with every character of Unicode beside the cut).
CUT = re.compile(r"(?<=\S) |(?<=[^\W_])[.,、。\uff0c]")
# A row group is read from its start for every part of it, so more parts would read more than they tokenise.
_PARTS_PER_ROW_GROUP = 8


class Part(Protocol):
    text_bytes: int

    def pieces(self) -> Iterator[tuple[str, bool]]: ...


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
            text = _decoded(file.read(self.stop - self.start), self.path, self.start, self.errors)
        if not self.separator:
            yield text, self.ends
            return
        for document in text.split(self.separator):
            if document:
                yield document, True


@dataclass(frozen=True)
class JsonLinesPart:
    """Lines of a .jsonl file: bytes start to stop, or all of it where it is compressed (stop None)."""

    path: str
    column: str
    text_bytes: int
    start: int = 0
    stop: int | None = None

    def pieces(self) -> Iterator[tuple[str, bool]]:
        offset = self.start
        with _open_lines(self.path) as file:
            if self.start:
                file.seek(self.start)
            while line := _next_line(file):
                start, offset = offset, offset + len(line)
                if len(line) > _LONG_LINE and (text := self._long_text(line)) is not None:
                    del line
                    yield from _in_pieces(text)
                elif not line.isspace():
                    # No name keeps a copy that has done its work, nor the text while it is tokenised.
                    decoded = _decoded(line, self.path, start)
                    del line
                    texts = [self._text(decoded, start)]
                    del decoded
                    yield texts.pop(), True
                if offset == self.stop:
                    break

    def _long_text(self, line: bytes | bytearray) -> "pyarrow.Scalar | None":
        """The text of a line, never as a str; None where `_text` is to say what is the matter with it.

        As a str, a line of 210 MB with an emoji took 1,670 MB in a worker, since Python then holds every character in
        4 bytes; this way it takes 903.
        """
        import pyarrow
        import pyarrow.json

        try:
            table = pyarrow.json.read_json(
                pyarrow.BufferReader(line),
                pyarrow.json.ReadOptions(use_threads=False, block_size=min(len(line) + 1, 2**31 - 1)),
                pyarrow.json.ParseOptions(
                    explicit_schema=pyarrow.schema([(self.column, pyarrow.string())]),
                    unexpected_field_behavior="ignore",
                ),
            )
            table.validate(full=True)  # that it is UTF-8
        except pyarrow.ArrowInvalid:
            return None
        text = table[self.column][0] if table.num_rows == 1 else None
        return text if text is not None and text.is_valid else None

    def _text(self, line: str, offset: int) -> str:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{self.path}: the line at byte {offset} is not JSON ({error.msg})") from None
        except (ValueError, RecursionError) as error:  # an integer of 5,000 digits, 100,000 brackets
            reason = str(error).split(";")[0]
            raise DataError(f"{self.path}: the line at byte {offset} cannot be read ({reason})") from None
        if not isinstance(row, dict):
            raise DataError(f"{self.path}: the line at byte {offset} is not an object with a text field")
        if self.column not in row:
            raise missing_column(self.column, row, f"{self.path}, the line at byte {offset},")
        return as_text(row[self.column], self.column, self.path)


@dataclass(frozen=True)
class ParquetPart:
    """Rows first to last of one row group, column by column and never as a whole in memory."""

    path: str
    column: str
    text_bytes: int
    row_group: int
    first: int
    last: int

    def pieces(self) -> Iterator[tuple[str, bool]]:
        import pyarrow
        import pyarrow.parquet

        row = 0
        try:
            # a buffered stream: otherwise the whole column chunk, a gigabyte in some files, is read first
            file = pyarrow.parquet.ParquetFile(
                self.path, metadata=_parquet_metadata(self.path), buffer_size=1 << 20, pre_buffer=False
            )
            row_bytes = 1 + self.text_bytes // max(1, self.last - self.first)
            for batch in file.iter_batches(
                max(1, min(64, _BATCH_BYTES // row_bytes)),
                row_groups=[self.row_group],
                columns=[self.column],
                use_threads=False,
            ):
                keep = batch.column(0).slice(
                    max(self.first - row, 0), max(self.last - max(row, self.first), 0)
                )
                if keep.nbytes > 2 * _BATCH_BYTES:
                    for value in keep:
                        yield from _in_pieces(value)
                else:
                    for text in keep.to_pylist():
                        yield as_text(text, self.column, self.path), True
                row += len(batch)
                if row >= self.last:
                    break
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise damaged_parquet(self.path, error) from None


def text_parts(path: Path, step: int, separator: str = "") -> list[TextPart]:
    """Cut a text file into parts of about `step` bytes, between documents or, within one, at a space."""
    if separator:
        cuts = _cuts(path, step, _after(separator.encode()))
        return [TextPart(str(path), start, stop, separator) for start, stop in cuts]
    cuts = _cuts(path, step, _at_space)  # as at CUT, the tokens stay those of the uncut document
    return [TextPart(str(path), start, stop, ends=stop == cuts[-1][1]) for start, stop in cuts]


def holds(path: Path, mark: str) -> bool:
    """Whether `mark` is in a file, which is read up to there."""
    wanted, window = mark.encode(), b""
    with open(path, "rb") as file:
        while block := file.read(_SEARCH_BYTES):
            window += block
            if wanted in window:
                return True
            window = window[-len(wanted) :]
    return False


def read_text(path: Path) -> str:
    """A whole file. Raises DataError if it is not UTF-8."""
    return _decoded(path.read_bytes(), str(path), 0)


def json_lines_parts(path: Path, step: int, column: str) -> list[JsonLinesPart]:
    if path.suffix != ".jsonl":
        # how much text is in a compressed file is not known before it is read; 3 to 1 is usual
        return [JsonLinesPart(str(path), column, 3 * path.stat().st_size)]
    cuts = _cuts(path, step, _after(b"\n"))
    return [JsonLinesPart(str(path), column, stop - start, start, stop) for start, stop in cuts]


def parquet_parts(path: Path, step: int, column: str) -> list[ParquetPart]:
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = _parquet_metadata(str(path))
        schema = metadata.schema.to_arrow_schema()
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged_parquet(str(path), error) from None
    if column not in schema.names:
        raise missing_column(column, schema.names, str(path))
    if schema.names.count(column) > 1:
        raise DataError(f"{path} has {schema.names.count(column)} columns {column!r}: rename all but one")
    kind = schema.field(column).type
    values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind  # a category of pandas or polars
    if not any(
        is_text(values)
        for is_text in (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    ):
        raise DataError(
            f"{path}: column {column!r} holds {kind}, not text; name a text column, data.column=..."
        )
    index = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
    parts = []
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        text_bytes = metadata.row_group(group).column(index).total_uncompressed_size
        count = max(1, min(rows, text_bytes // step, _PARTS_PER_ROW_GROUP))
        edges = [rows * i // count for i in range(count + 1)]
        parts += [
            ParquetPart(str(path), column, text_bytes // count, group, first, last)
            for first, last in pairwise(edges)
        ]
    return parts


def _parquet_metadata(path: str) -> "pyarrow.parquet.FileMetaData":
    stat = os.stat(path)
    return _metadata_of(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(1)
def _metadata_of(path: str, _size: int, _mtime_ns: int) -> "pyarrow.parquet.FileMetaData":
    """Kept for the parts of the file: with 8,000 row groups it takes 20 ms, 200 times as long as one of ten rows."""
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(path)


def _in_pieces(value: "pyarrow.Scalar") -> Iterator[tuple[str, bool]]:
    """A long text of an Arrow column, in pieces of about a megabyte as pieces() yields them.

    As a single str, 210 MB with an emoji took 1,546 MB in a worker, since Python then holds every character in 4
    bytes; this way it takes 1,026, most of it pyarrow's.
    """
    if not value.is_valid:  # a missing value is an empty document
        yield "", True
        return
    utf8 = memoryview(getattr(value, "value", value).as_buffer())  # a dictionary's is in a scalar of its own
    decode, text = codecs.getincrementaldecoder("utf-8")().decode, ""
    for start in range(0, len(utf8), _PIECE_BYTES):
        text += decode(utf8[start : start + _PIECE_BYTES])
        more = start + _PIECE_BYTES < len(utf8)
        if more and (cut := CUT.search(text, max(0, len(text) - _PIECE_BYTES))):
            yield text[: cut.start()], False
            text = text[cut.start() :]
    yield text + decode(b"", True), True


def as_text(value: object, column: str, where: str) -> str:
    """Return the text of a row; a missing value is an empty document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r} holds {type(value).__name__}, not text; name a text column, data.column=..."
        )
    return value


def _decoded(content: bytes | bytearray, path: str, offset: int, errors: str = "strict") -> str:
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


def missing_column(column: str, columns, where: str) -> DataError:
    return DataError(
        f"{where} has no column {column!r}; it has {', '.join(columns)}: name one with data.column=..."
    )


def damaged_parquet(path: str, error: Exception) -> DataError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(
        f"{path} cannot be read as parquet ({reason}): get the file again, then rerun the command"
    )


def _open_lines(path: str) -> io.BufferedIOBase:
    if path.endswith(".jsonl"):
        return open(path, "rb")
    import pyarrow

    compression = "gzip" if path.endswith(".gz") else "zstd"
    return io.BufferedReader(pyarrow.input_stream(path, compression=compression))


def _next_line(file: io.BufferedIOBase) -> bytes | bytearray:
    """The next line, b"" at the end. Just readline() would hold a long line twice, and malloc may keep its pieces."""
    piece = file.readline(_SEARCH_BYTES)
    if len(piece) < _SEARCH_BYTES:
        return piece
    line = bytearray(piece)
    while not line.endswith(b"\n") and (piece := file.readline(_SEARCH_BYTES)):
        line += piece
    return line


def _cuts(path: Path, step: int, next_cut: Callable[[BinaryIO, int], int]) -> list[tuple[int, int]]:
    """Return byte ranges that cover the file, each but the last ending at the first cut after `step` bytes."""
    size = path.stat().st_size
    edges = [0]
    with open(path, "rb") as file:
        while edges[-1] + step < size:
            edges.append(next_cut(file, edges[-1] + step))
    if edges[-1] != size:
        edges.append(size)
    return list(pairwise(edges))


def _after(mark: bytes) -> Callable[[BinaryIO, int], int]:
    """A cut after the next `mark`, however far; else the end of the file.

    Not after one that another overlaps on its left: of three newlines a text that is split at pairs of them, from its
    start, takes the first two, and a cut after the last two would leave a document that the whole text does not have.
    """
    pattern, context = re.escape(mark), len(mark) - 1
    for shift in range(1, len(mark)):
        if mark.startswith(mark[shift:]):  # it can begin again `shift` bytes on
            pattern += b"(?<!%s)" % re.escape(mark[:shift] + mark)
    compiled = re.compile(pattern)

    def next_cut(file: BinaryIO, start: int) -> int:
        at = start - context
        file.seek(at)
        window = file.read(context)  # a mark may begin in it that overlaps another
        while block := file.read(_SEARCH_BYTES):
            window += block
            if match := compiled.search(window, context):
                return at + match.end()
            done = max(0, len(window) - 2 * context)
            at, window = at + done, window[done:]
        return at + len(window)

    return next_cut


def _at_space(file: BinaryIO, start: int) -> int:
    """A cut before the next space after a visible character, or as CUT has it; else the end of the file.

    Between any two characters where none of these is near.
    """
    file.seek(start)
    window = file.read(_SEARCH_BYTES)
    # visible in ASCII: the last byte of another character does not say whether it is one of Unicode's spaces
    if match := re.search(rb"(?<=[!-~]) ", window):
        return start + match.start()
    begun = re.match(rb"[\x80-\xbf]*", window).end()  # of a character
    text = window[begun:].decode(errors="ignore")  # the last one may end beyond
    if match := CUT.search(text):
        return start + begun + len(text[: match.start()].encode())
    return start + (begun if len(window) == _SEARCH_BYTES else len(window))
