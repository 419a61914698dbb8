"""What experiments, benchmarks and comparisons of runs share: the user's mistake, writing a file, a text table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ReproduceError(ValueError):
    """A mistake in what the user asked for; the message is one line with the remedy."""


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Create the folder of `path` for a write inside the block; if it fails, name the option for another place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ReproduceError(
            f"{path} cannot be written ({error.strerror}): choose another place with {option}"
        ) from None


def text_table(header: list[str], rows: list[list[str]]) -> str:
    """Align columns for a terminal: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)
