"""Files that are whole or not there."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from .config import ConfigError

REMEDY = "free some room, or name a folder you may write with hydra.run.dir"


def write_whole(path: Path, text: str) -> None:
    """Write beside and rename, so that neither a reader nor a kill sees half a file.

    Raises ConfigError where the disk is full or the folder may not be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise unwritable(path, error) from None


def write_json(path: Path, record: dict) -> None:
    write_whole(path, json.dumps(record, indent=2) + "\n")


def unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror}): {REMEDY}")
