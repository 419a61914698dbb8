"""Parts of a .jsonl file, one document a line; also compressed, .jsonl.gz and .jsonl.zst."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import DataError
from .cuts import after, byte_ranges
from .parts import as_text, in_pieces, missing_column
from .read_text import decoded

if TYPE_CHECKING:
    import pyarrow

LONG_LINE = 32 << 20  # bytes; read so that it is never in memory as one str
_READ_BYTES = 1 << 20


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
                if len(line) > LONG_LINE and (text := self._long_text(line)) is not None:
                    del line
                    yield from in_pieces(text)
                elif not line.isspace():
                    # No name keeps a copy that is no longer needed, nor the text while it is tokenised.
                    line_text = decoded(line, self.path, start)
                    del line
                    texts = [self._text(line_text, start)]
                    del line_text
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
        where = f"{self.path}: the line at byte {offset}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also an integer of 5,000 digits, or 100,000 brackets
            reason = getattr(error, "msg", str(error).split(";")[0])
            raise DataError(f"{where} is not JSON ({reason})") from None
        if not isinstance(row, dict):
            raise DataError(f"{where} is not an object with a text field")
        if self.column not in row:
            raise missing_column(self.column, row, where)
        return as_text(row[self.column], self.column, self.path)


def json_lines_parts(path: Path, step: int, column: str) -> list[JsonLinesPart]:
    if path.suffix != ".jsonl":
        # how much text is in a compressed file is not known before it is read; 3 to 1 is usual
        return [JsonLinesPart(str(path), column, 3 * path.stat().st_size)]
    cuts = byte_ranges(path, step, after(b"\n"))
    return [JsonLinesPart(str(path), column, stop - start, start, stop) for start, stop in cuts]


def _open_lines(path: str) -> io.BufferedIOBase:
    if path.endswith(".jsonl"):
        return open(path, "rb")
    import pyarrow

    compression = "gzip" if path.endswith(".gz") else "zstd"
    return io.BufferedReader(pyarrow.input_stream(path, compression=compression))


def _next_line(file: io.BufferedIOBase) -> bytes | bytearray:
    """The next line, b"" at the end. Just readline() would hold a long line twice, and malloc may keep its pieces."""
    piece = file.readline(_READ_BYTES)
    if len(piece) < _READ_BYTES:
        return piece
    line = bytearray(piece)
    while not line.endswith(b"\n") and (piece := file.readline(_READ_BYTES)):
        line += piece
    return line
