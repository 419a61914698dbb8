"""Loggers of metrics: the columns, the base class, and the logger that every run has, metrics.csv."""

from __future__ import annotations

import csv
import io
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .files import unwritable, write_whole

# One vocabulary for the CSV and wandb. `tokens` is the common axis of runs that differ in batch or length.
COLUMNS = [
    "step",
    "tokens",
    "seconds",
    "train/loss",
    "train/learning_rate",
    "train/grad_norm",
    "val/loss",
    "val/perplexity",
    "val/bits_per_byte",
    "val/hellaswag",
    "perf/step_ms",
    # Parts of the above, on CUDA timed on the device. The rest is logging and the loop itself.
    "perf/data_ms",
    "perf/forward_backward_ms",
    # The exchange between ranks, of gradients and of a sharded model's parts: the time that no computation hid.
    "perf/exchange_ms",
    "perf/optimizer_ms",
    "perf/tokens_per_second",
    "perf/tokens_per_second_per_device",
    # The rank that computed longest, and how many times as long as the median rank: waiting for others is left out.
    "perf/slowest_rank",
    "perf/slowest_rank_ratio",
    "perf/mfu",
    "perf/peak_allocated_gib",
    "perf/peak_reserved_gib",
    "perf/peak_resident_gib",
]


class Logger:
    def log(self, metrics: dict[str, float]) -> None:
        """Take a row: `step`, `tokens`, `seconds` and any of the other COLUMNS."""

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Take a text that the model wrote after `step` steps."""

    def alert(self, why: str) -> None:
        """Tell someone that the run ends with an error."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Close; `summary` is empty when the run did not end well."""


class Kept(NamedTuple):
    """The rows of metrics.csv that a run keeps when it is resumed in its own directory."""

    rows: list[dict[str, str]]
    abandoned: int  # the step of the last row that is dropped; 0: none is

    @property
    def seconds(self) -> float:
        """The time of the last row. It includes an evaluation after the checkpoint, if that is not made again."""
        return float(self.rows[-1]["seconds"]) if self.rows else 0.0


def kept_rows(path: Path, step: int, evaluates: bool) -> Kept:
    """The rows up to `step`, where the run resumes.

    A checkpoint is older than the evaluation of its step, so that evaluation's row is dropped if it will be made
    again (`evaluates`).
    """
    kept, abandoned = [], 0
    if path.exists():
        with path.open(newline="", errors="replace") as file:
            # A full disk or a dying machine cuts a row short, or fills it with NUL bytes.
            whole = (line for line in file if "\0" not in line)
            for row in csv.DictReader(whole):
                if None in row.values() or not row["step"].isdigit():
                    continue
                at = int(row["step"])
                if at < step or (at == step and not (evaluates and row["val/loss"])):
                    kept.append(row)
                else:
                    abandoned = at
    return Kept(kept, abandoned)


class CsvLogger(Logger):
    """metrics.csv: one row per log point, empty cells where nothing was measured, flushed at once."""

    def __init__(self, path: Path, kept: Kept) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(kept.rows)
        write_whole(path, text.getvalue())  # a kill loses no row that is kept
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="")

    def log(self, metrics: dict[str, float]) -> None:
        try:
            self._writer.writerow({name: csv_cell(value) for name, value in metrics.items()})
            self._file.flush()
        except OSError as error:
            raise unwritable(Path(self._file.name), error) from error

    def finish(self, summary: dict[str, Any]) -> None:
        with suppress(OSError):  # it tries again to write the row that `log` could not
            self._file.close()


def csv_cell(value: float) -> float | str:
    """A value as metrics.csv has it, with seven digits."""
    return f"{value:.7g}" if isinstance(value, float) else value
