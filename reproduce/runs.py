"""Training runs read back from their files, and what makes two of them differ.

A run is a directory that `train.py` wrote, or a wandb offline folder, read through `wandb leet inspect`.
"""

from __future__ import annotations

import csv
import glob
import json
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

from training.config import flatten
from training.console import speed_range
from training.loggers import csv_cell

from .experiment import ReproduceError

# Settings that can change neither loss nor speed nor memory.
_BOOKKEEPING = (
    "logger.*",
    "data.cache_dir",
    "data.workers",
    "trainer.(eval_every|save_every|keep_checkpoints|keep_best|profile_step|sample_tokens|sample_prompt)",
)
# Facts a run resolved, and the settings it resolved them from; where the facts are known, only they are compared.
_FACTS = ("dtype", "compiled", "loss", "block", "world_size", "corpus")
_RESOLVED_SETTINGS = ("trainer.precision", "trainer.compile", "trainer.device", "model.(loss|block)")
_LEET_TIMEOUT = 120
_SPEED = "perf/tokens_per_second"
# Beyond these a phase's time is the machine's doing. Of runs of 30 steps on two cores the optimizer varied 1.3 times;
# 0.15 and 0.9 ms for data were 2 % of a step, and nothing to warn of.
PHASE_RATIO, PHASE_SHARE = 1.5, 0.05
# What a step's time goes to, and the column that says how much.
STEP_PHASES = {
    "data": "perf/data_ms",
    "forward+backward": "perf/forward_backward_ms",
    "optimizer": "perf/optimizer_ms",
}


@dataclass
class Run:
    """One training run.

    Attributes:
        path: the run directory or wandb folder.
        config: settings by dotted name, as in config.yaml.
        environment: as in environment.json; empty where it is not known.
        rows: metrics.csv by column name, cells that were not measured left out.
        summary: as in summary.json; empty for a run that did not finish.
        facts: attention, dtype, compiled, loss, block, world_size, corpus: what was resolved, where it is known;
            of its last part, as are config and environment.
        label: a name that tells the run from the others; see `name_runs`.
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
        """The backend that ran; what was asked for where the run never said, its folder where not even that."""
        return self.facts.get("attention") or str(self.config.get("attention.name", self.path.name))

    @property
    def machine(self) -> str | None:
        return self.environment.get("device_name")

    @property
    def interpreted(self) -> bool:
        """Whether Triton interpreted the kernels that the run had in it."""
        return self.environment.get("TRITON_INTERPRET") == "1"

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def last(self, column: str) -> float | None:
        """The end result in `column`: of the summary, or of the newest row that has it."""
        if column in self.summary:
            return self.summary[column]
        return next((row[column] for row in reversed(self.rows) if column in row), None)

    def speed(self, column: str) -> float | None:
        """A perf/ figure of the last part: the summary's mean, or the median of an unfinished run's windows."""
        if column in self.summary:
            return self.summary[column]
        values = [row[column] for row in self.last_part if column in row]
        return statistics.median(values) if values else None

    @property
    def speed_range(self) -> tuple[float, float] | None:
        """The slowest and the fastest row's tokens/s in the last part."""
        return speed_range(row[_SPEED] for row in self.last_part if _SPEED in row)

    @property
    def resumed(self) -> dict[int, dict[str, list]]:
        """The steps after which it was resumed, each with the settings that changed: [was, is]."""
        return {int(step): changed for step, changed in self.facts.get("resumed", {}).items()}

    @property
    def began(self) -> int:
        """The step after which it was last resumed, 0 if it never was: speeds and memory are of what followed."""
        return max(self.resumed, default=0)

    @property
    def last_part(self) -> list[dict[str, float]]:
        """The rows after `began`."""
        return [row for row in self.rows if row["step"] > self.began]

    @property
    def whole(self) -> bool:
        """Whether its rows begin where the training did: not those of a run resumed in another directory."""
        return not self.rows or self.rows[0]["step"] <= 1

    def curve(self, column: str, against: str = "tokens") -> tuple[list[float], list[float]]:
        """(x, y) of the rows that have `column`."""
        points = [(row[against], row[column]) for row in self.rows if column in row and against in row]
        return [x for x, _ in points], [y for _, y in points]

    @property
    def peak_memory(self) -> tuple[str, float] | None:
        """(allocated or resident, GiB): of the CUDA allocator, or of the process on a CPU."""
        for kind in ("allocated", "resident"):
            if (peak := self.last(f"perf/peak_{kind}_gib")) is not None:
                return kind, peak
        return None

    def step_split(self) -> dict[str, float] | None:
        """Milliseconds of each phase of a step, None for a run of which nothing was timed yet.

        `other` is the rest of the step: logging and the loop itself.
        """
        step_ms = self.speed("perf/step_ms")
        split = {name: self.speed(column) for name, column in STEP_PHASES.items()}
        if None in (step_ms, *split.values()):
            return None
        return {**split, "other": max(0.0, step_ms - sum(split.values()))}

    def time_split(self) -> dict[str, float] | None:
        """Seconds of the run by what took them, or None where the rows do not tell.

        steps: each as long as the row after it says, or the mean where that row has no time. start-up: what the
        first step took beyond an ordinary one (compilation). rest: evaluation, checkpoints, the start of each resume.
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

    A shell's SWEEP/* also names the files beside the runs: files are passed over, folders without a run with a note
    on stderr. Raises ReproduceError for what does not exist, and where no run is left.
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
            print(f"note: {argument}: no run there", file=sys.stderr)
    runs = [_read_wandb(path) if _wandb_file(path) else _read_directory(path) for path in paths]
    name_runs(runs)
    return runs


def _no_run(argument: str) -> ReproduceError:
    return ReproduceError(
        f"{argument}: no run there; a run directory has config.yaml and metrics.csv, a wandb folder a .wandb file"
    )


def _run_paths(path: Path, depth: int) -> list[Path]:
    if not path.is_dir():
        return []
    if (path / "config.yaml").is_file() or (path / "metrics.csv").is_file() or _wandb_file(path):
        return [path]
    if not depth:
        return []
    inside = sorted(
        (each for each in path.iterdir() if each.is_dir() and not each.is_symlink()), key=_natural
    )
    return [run for each in inside for run in _run_paths(each, depth - 1)]


def _natural(path: Path | str) -> list[Any]:
    """Sorts 2_nano before 10_nano."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def _wandb_file(path: Path) -> Path | None:
    return next(path.glob("*.wandb"), None)


def _read_directory(path: Path) -> Run:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
        if not isinstance(config, dict):
            raise ReproduceError(f"{path / 'config.yaml'} holds no settings by name: it is no run's")
    except FileNotFoundError:
        config = {}
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ReproduceError(f"{path / 'config.yaml'} cannot be read: {str(error).splitlines()[0]}") from None
    summary = _read_json(path / "summary.json")
    facts = _read_json(path / "facts.json")
    return Run(
        path, flatten(config), _read_json(path / "environment.json"), _read_rows(path), summary, facts=facts
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not UTF-8
        raise ReproduceError(f"{path} cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise ReproduceError(f"{path} cannot be read: it holds no values by name")
    return record


def _read_rows(path: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv; a killed run's last line may be cut short, and then does not count."""
    file = path / "metrics.csv"
    if not file.is_file():
        return []
    rows = []
    try:
        with file.open(newline="") as lines:
            for cells in csv.DictReader(lines):
                if None not in cells.values() and cells.get("step"):
                    rows.append({name: float(cell) for name, cell in cells.items() if cell})
    except ValueError as error:  # no number, or not UTF-8
        raise ReproduceError(f"{file} cannot be read: {error}") from None
    return rows


def _read_wandb(path: Path) -> Run:
    """A wandb folder without its run directory; wandb's own tool reads the file format."""
    wandb = Path(sys.executable).with_name("wandb")
    try:
        told = subprocess.run(
            [wandb, "leet", "inspect", "--json", path], capture_output=True, text=True, timeout=_LEET_TIMEOUT
        )
    except FileNotFoundError:
        raise ReproduceError(f"{path} is a wandb folder, and wandb is not installed to read it") from None
    except subprocess.TimeoutExpired:
        raise ReproduceError(
            f"{path}: wandb leet inspect did not read it within {_LEET_TIMEOUT} s; the run's own directory is read "
            "without it"
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
            item = content["item"]
            # With the digits of metrics.csv: with all of wandb's a run would differ from itself.
            rows.append({k: float(csv_cell(v)) for k, v in item.items() if isinstance(v, int | float)})
        elif kind == "summary":
            summary |= content.get("update", {})
        elif kind == "exit":
            finished = content.get("exit_code", 0) == 0
    rows = [row for row in rows if "step" in row]
    facts, environment = config.pop("resolved", {}), config.pop("environment", {})
    config.pop("_wandb", None)
    return Run(path, flatten(config), environment, rows, summary if finished else {}, facts=facts)


# ---- what makes runs differ --------------------------------------------------------------------------


def differing_settings(runs: list[Run]) -> dict[str, list[Any]]:
    """What the runs do not have in common beside attention: setting -> its value in each run.

    Facts a run resolved (dtype, compiled, ...) stand for the settings they were resolved from. Runs of unknown
    settings are left out.
    """
    known = [run for run in runs if run.config]
    facts_known = all(all(fact in run.facts for fact in _FACTS) for run in known)
    ignored = [*_BOOKKEEPING, "attention.name", *(_RESOLVED_SETTINGS if facts_known else ())]
    pattern = re.compile("|".join(f"(?:{each})" for each in ignored))
    settings = dict.fromkeys(key for run in known for key in run.config if not pattern.fullmatch(key))
    values = {key: [run.config.get(key) for run in runs] for key in settings}
    if "trainer.resume" in values and all(run.whole for run in known):
        del values["trainer.resume"]  # each went on in its own directory
    if facts_known:
        values |= {fact: [run.facts.get(fact) for run in runs] for fact in _FACTS}
    is_known = [bool(run.config) for run in runs]
    return {key: each for key, each in values.items() if _differ(list(compress(each, is_known)))}


def differing_environment(runs: list[Run]) -> dict[str, list[Any]]:
    """What the machines do not have in common: fact -> its value in each run; runs that never said are left out."""
    is_known = [bool(run.environment) for run in runs]
    known = list(compress(runs, is_known))
    keys = dict.fromkeys(key for run in known for key in run.environment if key not in ("command", "device"))
    values = {key: [run.environment.get(key) for run in runs] for key in keys}
    return {key: each for key, each in values.items() if _differ(list(compress(each, is_known)))}


def _differ(values: list[Any]) -> bool:
    return any(value != values[0] for value in values[1:])


def unexplained_phases(first: Run, other: Run) -> dict[str, tuple[float, float]]:
    """Phases of a step that attention cannot change and that took another time all the same: ms in each run."""
    splits = [run.step_split() for run in (first, other)]
    if None in splits or first.machine != other.machine or differing_settings([first, other]):
        return {}
    if first.interpreted or other.interpreted:  # beside which other phases are slower too
        return {}
    least = PHASE_SHARE * min(sum(split.values()) for split in splits)
    times = {name: tuple(split[name] for split in splits) for name in ("data", "optimizer")}
    return {
        name: each
        for name, each in times.items()
        if max(each) > PHASE_RATIO * min(each) and max(each) - min(each) > least
    }


def same_tokens(first: Run, other: Run) -> bool:
    """Whether both predict the same tokens, so that their losses can be compared."""
    if "corpus" in first.facts and "corpus" in other.facts:
        return first.facts["corpus"] == other.facts["corpus"]
    if not (first.config and other.config):
        return first is other
    return not any(key.startswith("data.") for key in differing_settings([first, other]))


def name_runs(runs: list[Run]) -> None:
    """Label each run by its attention, then by what else sets it apart, then by its directory."""
    labels = [run.attention for run in runs]
    differing = {key: values for key, values in differing_settings(runs).items() if key != "corpus"}
    if len(set(labels)) < len(runs) and len(differing) <= 2:
        for key, values in differing.items():
            name = key.rpartition(".")[2]
            labels = [f"{label} {name}={value}" for label, value in zip(labels, values, strict=True)]
    for run, label in zip(runs, labels, strict=True):
        run.label = label if labels.count(label) == 1 else f"{label} ({run.path.name})"
