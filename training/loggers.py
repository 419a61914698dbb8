"""Where metrics go: metrics.csv always, wandb when it is asked for."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from .config import Config, ConfigError, LoggerConfig, WandbMode
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
    "perf/step_ms",
    # Parts of the above; on CUDA as the device saw it. The rest is logging and the loop itself.
    "perf/data_ms",
    "perf/forward_backward_ms",
    "perf/optimizer_ms",
    "perf/tokens_per_second",
    "perf/mfu",
    "perf/peak_allocated_gib",
    "perf/peak_reserved_gib",
    "perf/peak_resident_gib",
]


# How long a run waits for a server of wandb's: when it begins, and for the last of its rows when it ends. torchrun
# kills a rank 30 s after it was told to stop.
BEGIN_SECONDS, END_SECONDS = 20, 20
# What WANDB_MODE may be; dryrun is wandb's old word for offline.
_WANDB_MODES = ("online", "offline", "dryrun", "disabled")


class Logger(Protocol):
    def log(self, metrics: dict[str, float]) -> None:
        """Take a row: `step`, `tokens`, `seconds` and any of the other COLUMNS."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Close; `summary` is empty when the run did not end well."""


class CsvLogger:
    """metrics.csv: one row per log point, empty cells where nothing was measured, flushed at once.

    A run resumed in its own directory keeps its rows up to `step`, where it resumes. A checkpoint is older than the
    evaluation of its step, so that evaluation's row is dropped if it will be made again (`evaluates`). `seconds` is
    the time of the last row kept; it includes an evaluation after the checkpoint was written, if that is not made
    again.
    """

    def __init__(self, path: Path, step: int, evaluates: bool) -> None:
        kept = io.StringIO()
        writer = csv.DictWriter(kept, COLUMNS, restval="")
        writer.writeheader()
        self.seconds = 0.0
        if path.exists():
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    if None in row.values():  # cut short by a full disk or a dying machine
                        continue
                    again = evaluates and row["val/loss"]
                    if int(row["step"]) < step or (int(row["step"]) == step and not again):
                        writer.writerow(row)
                        self.seconds = float(row["seconds"])
        write_whole(path, kept.getvalue())  # a kill loses no row that is kept
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
    """A value as metrics.csv has it, of seven digits."""
    return f"{value:.7g}" if isinstance(value, float) else value


class WandbLogger:
    """One wandb run per training run; online when a key is configured, otherwise offline, and never a prompt.

    A run resumed in its own directory continues its wandb run. Offline, each start leaves a folder of its own with
    the same id, and `wandb sync` makes one run of them. wandb ignores steps that it already has.

    Training survives the failure of wandb: of its server at the start (the run is then offline) and at the end, and
    of its own process at any time. With logger.mode=online, a server that does not answer raises ConfigError.
    """

    def __init__(
        self, config: Config, run_dir: Path, facts: dict[str, Any], environment: dict[str, Any]
    ) -> None:
        import wandb
        from omegaconf import OmegaConf

        self.mode = wandb_mode(config.logger.mode)
        resolved = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
        options = {
            "dir": run_dir,
            "id": _wandb_id(run_dir),
            "resume": "allow",
            "project": config.logger.project,
            "name": run_dir.name,
            "group": config.logger.group,
            "job_type": "train",
            "tags": [facts["attention"], *config.logger.tags],
            "config": resolved | {"resolved": facts, "environment": environment},
            # Without a limit, a run whose server was gone had not ended after 480 s.
            "settings": wandb.Settings(
                init_timeout=BEGIN_SECONDS,
                finish_timeout=END_SECONDS,
                finish_timeout_raises=True,
                silent=True,
            ),
        }
        self._why, self._gone = "offline", False
        try:
            self._run = wandb.init(mode=self.mode, **options)
        except wandb.errors.UsageError:
            raise
        except Exception as error:
            reason = f"wandb stopped ({type(error).__name__})"
            if isinstance(error, wandb.errors.CommError):
                answered = re.search(r"returned error \d+", str(error))
                reason = f"the server {answered[0] if answered else 'did not answer'}"
            if config.logger.mode is WandbMode.online:
                raise ConfigError(
                    f"logger.mode=online: {reason}; use logger.mode=offline, or auto."
                ) from None
            self.mode, self._why = "offline", f"offline, since {reason}"
            with suppress(Exception):  # it raises if that process is gone
                wandb.teardown()  # otherwise its process considers the id in use
            self._run = wandb.init(mode="offline", **options)
        self._run.define_metric("tokens")
        for namespace in ("train/*", "val/*", "perf/*"):
            self._run.define_metric(namespace, step_metric="tokens")
        self._run.define_metric("val/loss", step_metric="tokens", summary="min")

    def where(self) -> list[tuple[str, str]]:
        """How to look at the run, as rows of the banner."""
        if self.mode == "online":
            return [("wandb", self._run.url)]
        if self.mode == "disabled":
            return [("wandb", "disabled by WANDB_MODE")]
        look, upload = f"wandb leet {self._folder}", f"wandb sync {self._folder}"
        return [("wandb", f"{self._why}; view: {look}"), ("", f"upload: {upload}")]

    @property
    def _folder(self) -> str:
        return os.path.relpath(Path(self._run.dir).parent)

    def log(self, metrics: dict[str, float]) -> None:
        self._send(lambda: self._run.log(metrics, step=metrics["step"]))

    def finish(self, summary: dict[str, Any]) -> None:
        def end() -> None:
            # The open row is written first: written after the summary, its last window would replace the run's means.
            self._run.log({}, commit=True)
            self._run.summary.update(summary)
            self._run.finish(exit_code=0 if summary else 1)

        self._send(end)

    def _send(self, call: Callable[[], None]) -> None:
        """Call wandb, unless it is gone. Its own process may die at any time, for example when memory is full."""
        if self._gone:
            return
        try:
            call()
        except TimeoutError:
            told = f"the wandb server did not accept everything within {END_SECONDS} s"
            tqdm.write(f"{told}; to upload the rest later: wandb sync {self._folder}")
        except Exception as error:  # of many classes, some of them private
            import wandb

            self._gone = True
            told = f"wandb stopped ({type(error).__name__}: {error}); metrics.csv has the whole run"
            tqdm.write(f"{told}; to upload what wandb recorded: wandb sync {self._folder}")
            with suppress(Exception):
                wandb.teardown()  # otherwise it tries again when Python exits, with a traceback


def _wandb_id(run_dir: Path) -> str:
    kept = run_dir / "wandb_id"
    if not kept.exists():
        write_whole(kept, secrets.token_hex(4))
    return kept.read_text()


def wandb_mode(mode: WandbMode) -> str:
    """online or offline (or what WANDB_MODE says), decided without a prompt and without the network."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("wandb is not installed: pip install wandb, or use logger=none.")
    if mode is WandbMode.offline:
        return "offline"
    if mode is WandbMode.auto:
        chosen = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        if chosen not in _WANDB_MODES:
            raise ConfigError(f"WANDB_MODE={chosen}: it must be {', '.join(_WANDB_MODES)}, or unset.")
    else:
        chosen = mode.value
    if chosen == "online" and not _has_wandb_key():
        raise ConfigError(
            "wandb online needs an API key: run `wandb login`, set WANDB_API_KEY, or use logger.mode=offline."
        )
    return chosen


def check_names(config: LoggerConfig) -> None:
    """Raise ConfigError for a project or tag that wandb would refuse only once the run has begun."""
    import wandb

    try:
        wandb.Settings(project=config.project, run_tags=tuple(config.tags))
    except (wandb.errors.UsageError, ValueError) as error:
        # pydantic's own text has many lines
        told = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
        raise ConfigError(f"logger.project, logger.tags: {told}.") from None


def _has_wandb_key() -> bool:
    """Whether `wandb login` or a variable left a key. wandb.login() would ask the server, 10 s without a network."""
    import wandb
    from requests.utils import get_netrc_auth

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    return bool(settings.api_key or get_netrc_auth(settings.base_url))
