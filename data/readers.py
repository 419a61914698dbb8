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
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from . import DataError

# Where no place to cut is found in this many bytes, a range is cut between any two characters.
_SEARCH_BYTES = 1 << 20
# A row group is read from its start for every part of it, so more parts would read more than they tokenise.
_PARTS_PER_ROW_GROUP = 8


class Part(Protocol):
    text_bytes: int

    def pieces(self) -> Iterator[tuple[str, bool]]: ...


@dataclass(frozen=True)
class TextPart:
    """Bytes start to stop of a text file. Invalid UTF-8 becomes U+FFFD."""

    path: str
    start: int
    stop: int
    separator: str = ""
    ends: bool = True

    @property
    def text_bytes(self) -> int:
        return self.stop - self.start

    def pieces(self) -> Iterator[tuple[str, bool]]:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            text = file.read(self.stop - self.start).decode("utf-8", errors="replace")
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
            for line in file:
                if line.strip():
                    yield self._text(line, offset), True
                offset += len(line)
                if offset == self.stop:
                    break

    def _text(self, line: bytes, offset: int) -> str:
        try:
            row = json.loads(line.decode("utf-8", errors="replace"))
        except json.JSONDecodeError as error:
            raise DataError(f"{self.path}: the line at byte {offset} is not JSON ({error.msg})") from None
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
            file = pyarrow.parquet.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False)
            for batch in file.iter_batches(
                64, row_groups=[self.row_group], columns=[self.column], use_threads=False
            ):
                keep = batch.column(0).slice(
                    max(self.first - row, 0), max(self.last - max(row, self.first), 0)
                )
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
        cuts = _cuts(path, step, re.compile(re.escape(separator.encode())), after=True)
        return [TextPart(str(path), start, stop, separator) for start, stop in cuts]
    # A space after a visible character starts a new piece in the split patterns of all of tiktoken's
    # encodings, so the tokens are those of the uncut document.
    cuts = _cuts(path, step, re.compile(rb"(?<=\S) "), after=False)
    return [TextPart(str(path), start, stop, ends=stop == cuts[-1][1]) for start, stop in cuts]


def json_lines_parts(path: Path, step: int, column: str) -> list[JsonLinesPart]:
    if path.suffix != ".jsonl":
        # how much text is in a compressed file is not known before it is read; 3 to 1 is usual
        return [JsonLinesPart(str(path), column, 3 * path.stat().st_size)]
    cuts = _cuts(path, step, re.compile(rb"\n"), after=True)
    return [JsonLinesPart(str(path), column, stop - start, start, stop) for start, stop in cuts]


def parquet_parts(path: Path, step: int, column: str) -> list[ParquetPart]:
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged_parquet(str(path), error) from None
    if column not in schema.names:
        raise missing_column(column, schema.names, str(path))
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
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


def as_text(value: object, column: str, where: str) -> str:
    """Return the text of a row; a missing value is an empty document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r} holds {type(value).__name__}, not text; name a text column, data.column=..."
        )
    return value


def missing_column(column: str, columns, where: str) -> DataError:
    return DataError(f"{where} has no column {column!r}; it has {', '.join(columns)} (data.column=...)")


def damaged_parquet(path: str, error: Exception) -> DataError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"{path} cannot be read as parquet ({reason}): get the file again, then start again")


def _open_lines(path: str) -> io.BufferedIOBase:
    if path.endswith(".jsonl"):
        return open(path, "rb")
    import pyarrow

    compression = "gzip" if path.endswith(".gz") else "zstd"
    return io.BufferedReader(pyarrow.input_stream(path, compression=compression))


def _cuts(path: Path, step: int, place: re.Pattern[bytes], *, after: bool) -> list[tuple[int, int]]:
    """Return byte ranges that cover the file, each but the last ending at the first `place` after `step` bytes."""
    size = path.stat().st_size
    edges = [0]
    with open(path, "rb") as file:
        while edges[-1] + step < size:
            target = edges[-1] + step
            file.seek(target)
            window = file.read(_SEARCH_BYTES)
            while not (match := place.search(window)) and after and target + len(window) < size:
                window += file.read(_SEARCH_BYTES)  # documents are never cut where a separator was asked for
            if match:
                edges.append(target + (match.end() if after else match.start()))
            elif after:
                break
            else:
                continuation = next((i for i, byte in enumerate(window) if byte & 0xC0 != 0x80), 0)
                edges.append(target + continuation)
    if edges[-1] != size:
        edges.append(size)
    return list(pairwise(edges))
