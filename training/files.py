"""Writing files so that they are complete or absent."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from .config import ConfigError

REMEDY = (
    "free some disk space, or name a writable directory: hydra.run.dir=..., or with -m hydra.sweep.dir=..."
)


def replace_file(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that no reader sees half a file, even after a kill."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """As `replace_file`, for a run directory: if that cannot be written, a ConfigError says what to do."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise unwritable(path, error) from None


def write_json(path: Path, record: dict) -> None:
    write_whole(path, as_json(record))


def as_json(record: dict) -> str:
    return json.dumps(record, indent=2) + "\n"


def unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror}): {REMEDY}")
