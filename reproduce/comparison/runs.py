"""Read training runs back from their files, and find out what differs between them.

A run is a directory that `train.py` wrote, or a wandb offline folder, which is read with `wandb leet inspect`.
"""

import csv
import glob
import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, TextIO

import yaml

from training.config import DRIFTS_FROM, flatten
from training.console import speed_range
from training.loggers import csv_cell

from ..common import ReproduceError

# Settings that affect neither loss nor speed nor memory.
BOOKKEEPING = (
    "logger.*",
    "data.cache_dir",
    "data.workers",
    "parallel.timeout",
    "trainer.(eval_every|save_every|keep_checkpoints|keep_best|profile_step|sample_(tokens|prompt|every)|hellaswag(_file)?)",
)
# What a run resolved, and the settings it was resolved from; where all runs recorded the former, only it is compared.
_FACTS = ("dtype", "compiled", "cuda_graphs", "loss", "block", "world_size", "corpus")
_RESOLVED_SETTINGS = ("trainer.(precision|compile|cuda_graphs|device)", "model.(loss|block)")
# Settings that a comparison tells as numbers.
COUNTS = ("model.n_layer", "model.n_head", "model.n_embd", "model.seq_len")
COUNTS += ("trainer.batch_tokens", "trainer.steps")
_LEET_TIMEOUT = 120
_SPEED = "perf/tokens_per_second"
# A phase that attention does not affect is suspicious if its times in two runs differ by more than this ratio and by
# more than this share of a step. Between runs of 30 steps on two cores the optimizer's time varied by a factor of
# 1.3; 0.15 and 0.9 ms for data were 2 % of a step, too little to warn about.
PHASE_RATIO, PHASE_SHARE = 1.5, 0.05
# Phase of a step -> the column with its time; several ranks have another, exchange.
STEP_PHASES = {
    "data": "perf/data_ms",
    "forward+backward": "perf/forward_backward_ms",
    "optimizer": "perf/optimizer_ms",
}
_EXCHANGE = "perf/exchange_ms"


@dataclass
class Run:
    """One training run.

    Attributes:
        path: the run directory or wandb folder.
        config: settings by dotted name, as in config.yaml.
        environment: as in environment.json; empty if unknown.
        rows: the rows of metrics.csv by column name, without empty cells.
        summary: as in summary.json; empty for a run that did not finish.
        facts: what the run resolved, as far as it is known: attention, dtype, compiled, loss, block, world_size,
            corpus. Of a resumed run, facts, config and environment are those of its last part.
        label: a name that distinguishes the run from the others; see `name_runs`.
    """

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    rows: list[dict[str, float]]
    summary: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def attention(self) -> str:
        """The backend that ran; if that is unknown, the one that was asked for, or else the folder's name."""
        return str(self.facts.get("attention") or self.config.get("attention.name", self.path.name))

    @property
    def interpreted(self) -> bool:
        """Whether Triton's interpreter ran the run's Triton kernels."""
        return self.environment.get("TRITON_INTERPRET") == "1"

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    def last(self, column: str) -> float | None:
        """The final value of `column`: from the summary, or else from the last row that has it."""
        if column in self.summary:
            return self.summary[column]
        return next((row[column] for row in reversed(self.rows) if column in row), None)

    def speed(self, column: str) -> float | None:
        """A perf/ figure since the last resume: the summary's mean or, if unfinished, the median over the rows."""
        if column in self.summary:
            return self.summary[column]
        values = [row[column] for row in self.last_part if column in row]
        return statistics.median(values) if values else None

    @property
    def speed_range(self) -> tuple[float, float] | None:
        """The lowest and the highest tokens/s of a row since the last resume."""
        return speed_range(row[_SPEED] for row in self.last_part if _SPEED in row)

    @property
    def resumed(self) -> dict[int, dict[str, list]]:
        """The steps after which the run was resumed, each with the settings that changed: [before, after]."""
        return {int(step): changed for step, changed in self.facts.get("resumed", {}).items()}

    @property
    def began(self) -> int:
        """The step after which it was last resumed, or 0; speeds and memory are measured from there on."""
        return max(self.resumed, default=0)

    @property
    def last_part(self) -> list[dict[str, float]]:
        """The rows after `began`."""
        return [row for row in self.rows if row["step"] > self.began]

    @property
    def whole(self) -> bool:
        """Whether the rows begin with the training's first step; not so if it was resumed in another directory."""
        return not self.rows or self.rows[0]["step"] <= 1

    def curve(self, column: str, against: str = "tokens") -> dict[float, float]:
        """x (`against`) -> y, of the rows that have `column`."""
        return {row[against]: row[column] for row in self.rows if column in row and against in row}

    def evaluations(self, against: str = "tokens") -> dict[tuple[float, int | None], float]:
        """(x, how many tokens were predicted; None: the whole split, as at the end) -> validation loss."""
        first, steps = self.config.get("trainer.eval_tokens"), self.config.get("trainer.steps")
        first = None if first and first >= self.summary.get("val/tokens", math.inf) else first
        return {
            (row[against], None if row["step"] == steps else first): row["val/loss"]
            for row in self.rows
            if "val/loss" in row and against in row
        }

    @property
    def peak_memory(self) -> tuple[str, float] | None:
        """("allocated", GiB) from the CUDA allocator, or ("resident", GiB) of the process on a CPU."""
        for kind in ("allocated", "resident"):
            if (peak := self.last(f"perf/peak_{kind}_gib")) is not None:
                return kind, peak
        return None

    def step_split(self) -> dict[str, float] | None:
        """Milliseconds of each phase of a step; None if nothing has been timed yet.

        `exchange`, which several ranks log, is of gradients and parts, and of it what no computation hid. `other` is
        the rest of the step: logging and the loop itself.
        """
        step_ms = self.speed("perf/step_ms")
        split = {name: self.speed(column) for name, column in STEP_PHASES.items()}
        if None in (step_ms, *split.values()):
            return None
        if (exchange := self.speed(_EXCHANGE)) is not None:
            split["exchange"] = exchange
        return {**split, "other": max(0.0, step_ms - sum(split.values()))}

    def time_split(self) -> dict[str, float] | None:
        """How the run's seconds were spent, or None if the rows do not allow it to be computed.

        steps: each counted with the step time in the row that follows it, or with the mean if that row has none.
        start-up: what the first step took beyond an ordinary one (compilation). rest: evaluation, checkpoints, and
        the start-up of each resume.
        """
        step_ms = self.speed("perf/step_ms")
        if step_ms is None or not self.rows or self.rows[0]["step"] != 1 or "seconds" not in self.rows[-1]:
            return None
        startup = max(0.0, self.rows[0]["seconds"] - step_ms / 1e3)
        steps = sum(
            (row["step"] - before["step"]) * row.get("perf/step_ms", step_ms) / 1e3
            for before, row in pairwise([{"step": 0}, *self.rows])
        )
        rest = max(0.0, self.rows[-1]["seconds"] - startup - steps)
        return {"steps": steps, "rest": rest, "start-up": startup}


def find_runs(arguments: list[str]) -> list[Run]:
    """The runs that `arguments` name: run directories, sweeps, folders of runs, wandb folders, or globs of them.

    A shell's SWEEP/* also names the files beside the runs: files are skipped silently, folders without a run with a
    note on stderr, and so are runs that cannot be read. Raises ReproduceError if an argument does not exist, or if
    there is no run at all.
    """
    paths: dict[Path, None] = {}  # a set that keeps the order
    empty = []
    for argument in arguments:
        matches = sorted(glob.glob(argument, recursive=True), key=_natural) or [argument]
        found = [path for match in matches for path in _run_paths(Path(match), depth=3)]
        paths.update(dict.fromkeys(path.resolve() for path in found))
        if not found:
            empty.append(argument)
            if not Path(matches[0]).exists():
                raise _no_run(argument)
    if not paths:
        raise _no_run(empty[0])
    for argument in empty:
        if Path(argument).is_dir():
            print(f"note: {argument}: no run found", file=sys.stderr)
    runs, wrong = [], []
    for path in paths:
        try:
            runs.append(_read_wandb(path) if _wandb_file(path) else _read_directory(path))
        except ReproduceError as error:
            wrong.append(error)
    if not runs:
        raise wrong[0]
    for error in wrong:
        print(f"note: left out: {error}", file=sys.stderr)
    name_runs(runs)
    return runs


def _no_run(argument: str) -> ReproduceError:
    return ReproduceError(
        f"{argument}: no run found; a run directory has config.yaml and metrics.csv, a wandb folder a .wandb file"
    )


def _run_paths(path: Path, depth: int) -> list[Path]:
    if not path.is_dir():
        return []
    if (path / "config.yaml").is_file() or (path / "metrics.csv").is_file() or _wandb_file(path):
        return [path]
    if not depth:
        return []
    folders = (each for each in path.iterdir() if each.is_dir() and not each.is_symlink())
    inside = sorted((each for each in folders if not each.name.startswith(".")), key=_natural)
    return [run for each in inside for run in _run_paths(each, depth - 1)]


def _natural(path: Path | str) -> list[Any]:
    """Sort key that puts 2_nano before 10_nano."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def _wandb_file(path: Path) -> Path | None:
    return next(path.glob("*.wandb"), None)


def _read_directory(path: Path) -> Run:
    environment, summary, facts = (
        _read(path / f"{name}.json", json.load) for name in ("environment", "summary", "facts")
    )
    config = flatten(_read(path / "config.yaml", yaml.safe_load))
    figures = {name: value for name, value in summary.items() if "/" in name or name == "seconds"}
    _check(path / "summary.json", figures, "a number", lambda value: not isinstance(value, str | list | dict))
    counts = {name: config[name] for name in COUNTS if name in config}
    _check(path / "config.yaml", counts, "a number", lambda value: isinstance(value, int))
    resumed = {"resumed": facts.get("resumed", {})}
    _check(path / "facts.json", resumed, "steps with the settings that changed", _is_history)
    rows = _read(path / "metrics.csv", _load_rows, list)
    return Run(path, config, environment, rows, summary, facts)


def _check(file: Path, values: dict[str, Any], kind: str, is_it: Callable[[Any], bool]) -> None:
    for name, value in values.items():
        if not is_it(value):
            raise ReproduceError(f"{file} cannot be read: {name} is {value!r}, not {kind}")


def _is_history(resumed: Any) -> bool:
    """Whether this is what `Run.resumed` has, with its steps as text."""
    if not isinstance(resumed, dict) or not all(step.isdecimal() for step in resumed):
        return False
    changes = [
        pair for each in resumed.values() for pair in (each.values() if isinstance(each, dict) else [None])
    ]
    return all(isinstance(pair, list) and len(pair) == 2 for pair in changes)


def _read(path: Path, load: Callable[[TextIO], Any], kind: type = dict) -> Any:
    """The content of a file, which must be of that kind; empty if there is no file."""
    if not path.is_file():
        return kind()
    try:
        with path.open(newline="", encoding="utf-8") as file:
            found = load(file)
        if not isinstance(found, kind):
            raise ValueError("it has no named values")
    except (ValueError, yaml.YAMLError) as error:  # also what is not UTF-8
        raise ReproduceError(f"{path} cannot be read: {(str(error).splitlines() or [''])[0]}") from None
    return found


def _load_rows(file: TextIO) -> list[dict[str, float]]:
    """A killed run's last line may be incomplete, and is then ignored."""
    rows = [row for row in csv.DictReader(file) if None not in row.values() and row.get("step")]
    return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]


def _read_wandb(path: Path) -> Run:
    """Read a wandb folder that has no run directory around it, with wandb's own tool for the file format."""
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", path]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_LEET_TIMEOUT)
    except FileNotFoundError:
        raise ReproduceError(
            f"{path} is a wandb folder, and reading it needs wandb: pip install wandb"
        ) from None
    except subprocess.TimeoutExpired:
        raise ReproduceError(
            f"{path}: wandb leet inspect did not read it within {_LEET_TIMEOUT} s; name the run's own directory "
            "instead, which is read without it"
        ) from None
    if told.returncode:
        reason = (told.stderr or told.stdout).strip().splitlines()[-1:]
        raise ReproduceError(f"{path} cannot be read by wandb leet inspect: {''.join(reason)}")
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    rows: list[dict[str, float]] = []
    finished = False
    for record in map(json.loads, told.stdout.splitlines()):
        kind = record["type"]
        content = record.get(kind, {})
        if kind in ("run", "config"):
            config |= (content.get("config") or content).get("update", {})
        elif kind == "history":
            # Rounded as in metrics.csv: with wandb's full precision a run would differ from itself.
            numbers = {k: v for k, v in content["item"].items() if isinstance(v, int | float)}
            rows.append({k: float(csv_cell(v)) for k, v in numbers.items()})
        elif kind == "summary":
            summary |= content.get("update", {})
        elif kind == "exit":
            finished = content.get("exit_code", 0) == 0
    facts, environment, _ = (config.pop(name, {}) for name in ("resolved", "environment", "_wandb"))
    rows = [row for row in rows if "step" in row]
    return Run(path, flatten(config), environment, rows, summary if finished else {}, facts)


# ---- what makes runs differ --------------------------------------------------------------------------


def one_of(patterns: Iterable[str], setting: str) -> bool:
    return any(re.fullmatch(each, setting) for each in patterns)


def differing_settings(runs: list[Run]) -> dict[str, list[Any]]:
    """The settings, apart from attention, in which the runs differ: setting -> its value in each run.

    What a run resolved (dtype, compiled, ...) replaces the settings that it was resolved from. Runs whose settings
    are unknown do not count.
    """
    known = [run for run in runs if run.config]
    facts_known = all(fact in run.facts for run in known for fact in _FACTS)
    ignored = [*BOOKKEEPING, "attention.name", *(_RESOLVED_SETTINGS if facts_known else ())]
    settings = dict.fromkeys(key for run in known for key in run.config if not one_of(ignored, key))
    values = {key: [_value(run, key) for run in runs] for key in settings}
    if all(run.whole for run in known):
        values.pop("trainer.resume", None)  # each was resumed in its own directory
    if facts_known:
        values |= {fact: [run.facts.get(fact) for run in runs] for fact in _FACTS}
    return _differing(values, [bool(run.config) for run in runs])


def _value(run: Run, key: str) -> Any:
    value = run.config.get(key)
    short = run.config.get("model.seq_len", 0) < DRIFTS_FROM
    # false was the default before null, which below that length means the same.
    return None if key == "attention.precise_delta" and value is False and short else value


def environments(runs: list[Run]) -> dict[str, list[Any]]:
    """Fact -> its value in each run."""
    keys = dict.fromkeys(key for run in runs for key in run.environment if key != "command")
    return {key: [run.environment.get(key) for run in runs] for key in keys}


def differing_environment(runs: list[Run]) -> dict[str, list[Any]]:
    """Where the environments differ, as in `environments`. Runs with no environment do not count."""
    values = {key: each for key, each in environments(runs).items() if key != "device"}
    return _differing(values, [bool(run.environment) for run in runs])


def _differing(values: dict[str, list[Any]], known: list[bool]) -> dict[str, list[Any]]:
    """Those of the values that differ between the runs that are known."""

    found = {key: list(compress(each, known)) for key, each in values.items()}
    return {key: values[key] for key, each in found.items() if any(value != each[0] for value in each)}


def unexplained_phases(first: Run, other: Run) -> dict[str, tuple[float, float]]:
    """Phases that attention cannot affect (data, optimizer) but whose times differ: phase -> ms in each run."""
    splits = [run.step_split() for run in (first, other)]
    machines = [run.environment.get("device_name") for run in (first, other)]
    if None in splits or machines[0] != machines[1] or differing_settings([first, other]):
        return {}
    if first.interpreted or other.interpreted:  # the interpreter slows down other phases too
        return {}
    least = PHASE_SHARE * min(sum(split.values()) for split in splits)
    times = {name: tuple(split[name] for split in splits) for name in ("data", "optimizer")}
    return {
        name: each
        for name, each in times.items()
        if max(each) > PHASE_RATIO * min(each) and max(each) - min(each) > least
    }


def same_tokens(first: Run, other: Run) -> bool:
    """Whether both runs predict the same tokens, so that their losses can be compared."""
    if "corpus" in first.facts and "corpus" in other.facts:
        return first.facts["corpus"] == other.facts["corpus"]
    if not (first.config and other.config):
        return first is other
    return not any(key.startswith("data.") for key in differing_settings([first, other]))


def name_runs(runs: list[Run]) -> None:
    """Give each run a label of its own: its attention, where needed what it sets otherwise, then its path's end."""
    labels = [run.attention for run in runs]
    differing = {key: values for key, values in differing_settings(runs).items() if key != "corpus"}
    if len(set(labels)) < len(runs) and len(differing) <= 3:
        for key, values in differing.items():
            name = key.removesuffix(".name").rpartition(".")[2]  # optimizer=muon, lr=0.1
            labels = [
                label if value is None else f"{label} {name}={value}"
                for label, value in zip(labels, values, strict=True)
            ]
    for label in dict.fromkeys(labels):
        alike = [run for run, its in zip(runs, labels, strict=True) if its == label]
        for run, end in zip(alike, _path_ends(alike), strict=True):
            run.label = label if len(alike) == 1 else f"{label} ({end})"


def _path_ends(runs: list[Run]) -> list[str]:
    """The last folders of each run's path, as many as tell the runs apart; no two runs have one path."""
    depth = 1
    while len({run.path.parts[-depth:] for run in runs}) < len(runs):
        depth += 1
    return [Path(*run.path.parts[-depth:]).as_posix() for run in runs]
