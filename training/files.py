"""Writing files so that they are complete or absent."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def readable_as(other: Path, *paths: Path) -> None:
    """Let those read `paths` who may read `other`: what safetensors 0.8 writes, the owner alone may read."""
    for path in paths:
        with suppress(OSError):  # a file system without modes
            shutil.copymode(other, path)


def write_json(path: Path, record: dict) -> None:
    write_whole(path, as_json(record))


def as_json(record: dict) -> str:
    """JSON has no infinity and no NaN: they become null, as in a diverged run's perplexity."""
    return json.dumps(_finite(record), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be written ({error.strerror}): {REMEDY}")
