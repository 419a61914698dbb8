"""What experiments, benchmarks and comparisons of runs share: the user's mistake, writing a file, a text table."""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DIGITS = 8  # significant ones that are kept of a number: more than float32 has, or any clock here


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


def results_folder(name: str, about: str | None, argv: list[str]) -> Path:
    """The folder of a command whose only option is where the results are."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=about)
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: results")
    folder = parser.parse_args(argv).results
    if not folder.is_dir():
        raise ReproduceError(f"{folder} does not exist: name the folder that holds results, --results FOLDER")
    return folder


def text_table(header: Sequence[str], rows: list[list[str]], numbers: bool = True) -> str:
    """Align columns for a terminal: all to the left, or, of numbers, all but the first to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    first, others = str.ljust, str.rjust if numbers else str.ljust
    lines = []
    for name, *cells in [header, *rows]:
        lines.append("  ".join([first(name, widths[0]), *map(others, cells, widths[1:])]).rstrip())
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """A value for JSON, its numbers with at most DIGITS significant digits."""
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}")
        case dict():
            return {key: rounded(each) for key, each in value.items()}
        case list() | tuple():
            return [rounded(each) for each in value]
    return value


def as_lines(document: dict[str, Any], key: str = "samples") -> str:
    """JSON with a line for each entry of the document, and for each item of its list `key`."""

    def line(value: Any) -> str:
        return json.dumps(rounded(value), separators=(",", ":"))

    entries = [f"{json.dumps(name)}: {line(value)}" for name, value in document.items() if name != key]
    if key in document:
        items = ",\n".join(map(line, document[key]))
        entries.append(f"{json.dumps(key)}: [\n{items}\n]" if items else f"{json.dumps(key)}: []")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def markdown_table(header: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    """The lines of a table, and an empty one."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in rows:
        cells = " | ".join(cell.replace("|", r"\|") for cell in row)
        lines.append(f"| {cells} |")
    return [*lines, ""]
