"""Parts of a .parquet file, one document a row."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from . import DataError
from .parts import as_text, in_pieces, missing_column

if TYPE_CHECKING:
    import pyarrow

# Long rows are read in batches of about this much: rows of 12 MB then take 1.1 instead of 2.4 GB of memory, of which
# 1 GB is the single page that pyarrow had written them to.
BATCH_BYTES = 8 << 20
# A row group is read from its start for every part of it, so more parts would read more than they tokenise.
_PARTS_PER_ROW_GROUP = 8


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
                self.path, metadata=_metadata(self.path), buffer_size=1 << 20, pre_buffer=False
            )
            row_bytes = 1 + self.text_bytes // max(1, self.last - self.first)
            for batch in file.iter_batches(
                max(1, min(64, BATCH_BYTES // row_bytes)),
                row_groups=[self.row_group],
                columns=[self.column],
                use_threads=False,
            ):
                texts = batch.column(0).slice(
                    max(self.first - row, 0), max(self.last - max(row, self.first), 0)
                )
                if texts.nbytes > 2 * BATCH_BYTES:
                    for value in texts:
                        yield from in_pieces(value)
                else:
                    for text in texts.to_pylist():
                        yield as_text(text, self.column, self.path), True
                row += len(batch)
                if row >= self.last:
                    break
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _damaged(self.path, error) from None


def parquet_parts(path: Path, step: int, column: str) -> list[ParquetPart]:
    """Cut every row group into parts of about `step` bytes. Raises DataError for a column that is not text."""
    import pyarrow

    try:
        metadata = _metadata(str(path))
        _require_text(metadata.schema.to_arrow_schema(), column, path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(str(path), error) from None
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


def _require_text(schema: "pyarrow.Schema", column: str, path: Path) -> None:
    from pyarrow import types

    if column not in schema.names:
        raise missing_column(column, schema.names, str(path))
    if schema.names.count(column) > 1:
        raise DataError(f"{path} has {schema.names.count(column)} columns {column!r}: rename all but one")
    kind = schema.field(column).type
    values = kind.value_type if types.is_dictionary(kind) else kind  # a category of pandas or polars
    if not (types.is_string(values) or types.is_large_string(values) or types.is_string_view(values)):
        raise DataError(
            f"{path}: column {column!r} holds {kind}, not text; name a text column, data.column=..."
        )


def _metadata(path: str) -> "pyarrow.parquet.FileMetaData":
    stat = os.stat(path)
    return _metadata_of(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(1)
def _metadata_of(path: str, _size: int, _mtime_ns: int) -> "pyarrow.parquet.FileMetaData":
    """Kept for the file's parts: with 8,000 row groups it takes 20 ms, 200 times as long as a group of ten rows."""
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(path)


def _damaged(path: str, error: Exception) -> DataError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(
        f"{path} cannot be read as parquet ({reason}): get the file again, then rerun the command"
    )
