"""The logger for wandb: checks before the run, survives wandb's failures, and goes on with a wandb run on resume."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .banner import in_sweep
from .config import Config, ConfigError, LoggerConfig, WandbMode
from .files import write_whole
from .loggers import COLUMNS, Kept, Logger

# How long a run waits for wandb's server: when it begins, and for the last of its rows when it ends. torchrun
# kills a rank 30 s after it was told to stop.
BEGIN_SECONDS, END_SECONDS = 20, 20
# What WANDB_MODE may be; dryrun is wandb's old word for offline.
_WANDB_MODES = ("online", "offline", "dryrun", "disabled")


class WandbLogger(Logger):
    """One wandb run per training run; online when a key is configured, otherwise offline, and never a prompt.

    A run resumed in its own directory continues its wandb run. Offline, each start leaves a folder of its own with
    the same id, and `wandb sync` makes one run of them. wandb ignores steps that it already has, so a run that goes
    back to an older checkpoint with other settings begins another wandb run, with the rows of metrics.csv so far.

    Training survives the failure of wandb: of its server at the start (the run is then offline) and at the end, and
    of its own process at any time. With logger.mode=online, a server that does not answer raises ConfigError; the run
    directory is then as it was.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        facts: dict[str, Any],
        environment: dict[str, Any],
        kept: Kept,
        changed: bool,
    ) -> None:
        """changed: whether the settings are not those that the run was trained with so far."""
        import wandb
        from omegaconf import OmegaConf

        self.mode = wandb_mode(config.logger.mode)
        resolved = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
        self._notes = _unused_variables()
        run_id, continues = self._run_id(run_dir / "wandb_id", kept, changed)
        options = {
            "dir": run_dir,
            "id": run_id,
            "resume": "allow",
            "project": config.logger.project or os.environ.get("WANDB_PROJECT") or "tilegpt",
            "name": os.environ.get("WANDB_NAME") or _display_name(run_dir),
            "group": config.logger.group,
            "job_type": os.environ.get("WANDB_JOB_TYPE") or "train",
            "tags": [facts["attention"], *config.logger.tags, *_tags_of_environment()],
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
        self._samples: list[tuple[int, str, str]] = []
        with _unchanged_if_refused(run_dir / "wandb"):
            self._run = self._begin(config.logger.mode, options)
        write_whole(run_dir / "wandb_id", run_id)
        self._run.define_metric("tokens")
        for namespace in sorted({name.partition("/")[0] for name in COLUMNS if "/" in name}):
            self._run.define_metric(f"{namespace}/*", step_metric="tokens")
        self._run.define_metric("val/loss", step_metric="tokens", summary="min")
        for row in kept.rows if not continues else []:
            self.log({name: float(cell) for name, cell in row.items() if cell} | {"step": int(row["step"])})

    def _run_id(self, file: Path, kept: Kept, changed: bool) -> tuple[str, bool]:
        """The id of the wandb run, and whether it is the one that the directory has had so far."""
        known = file.read_text() if file.exists() else ""
        if not known.isalnum():  # a power cut leaves NUL bytes
            return _id_from_agent() or secrets.token_hex(4), False
        if kept.abandoned and changed:
            self._notes.append(f"a new run: {known} went on to step {kept.abandoned:,} with other settings")
            return secrets.token_hex(4), False
        if kept.abandoned:
            self._notes.append(f"it has rows up to step {kept.abandoned:,} already, and keeps those")
        return known, True

    def _begin(self, asked: WandbMode, options: dict[str, Any]) -> Any:
        import wandb

        try:
            return wandb.init(mode=self.mode, **options)
        except wandb.errors.UsageError as error:
            raise _cannot_start(error) from None
        except Exception as error:
            reason = f"wandb stopped ({type(error).__name__})"
            if isinstance(error, wandb.errors.CommError):
                answered = re.search(r"returned error \d+", str(error))
                reason = f"the server {answered[0] if answered else 'did not answer'}"
            if asked is WandbMode.online:
                raise ConfigError(
                    f"logger.mode=online: {reason}; use logger.mode=offline, or auto."
                ) from None
            self.mode, self._why = "offline", f"offline, since {reason}"
            with suppress(Exception):  # it raises if that process is gone
                wandb.teardown()  # otherwise its process considers the id in use
            try:
                return wandb.init(mode="offline", **options)
            except Exception as again:
                raise _cannot_start(again) from again

    def where(self) -> list[tuple[str, str]]:
        """How to look at the run, as rows of the banner."""
        if self.mode == "disabled":
            return [("wandb", "disabled by WANDB_MODE")]
        notes = [("", note) for note in self._notes]
        if self.mode == "online":
            return [("wandb", self._run.url), *notes]
        look, upload = f"wandb leet {self._folder}", f"wandb sync {self._folder}"
        return [("wandb", f"{self._why}; view: {look}"), ("", f"upload: {upload}"), *notes]

    @property
    def _folder(self) -> str:
        return os.path.relpath(Path(self._run.dir).parent)

    def log(self, metrics: dict[str, float]) -> None:
        self._send(lambda: self._run.log(metrics, step=metrics["step"]))

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Keep it for a table that is sent at the end: wandb waits for its server before it takes one."""
        self._samples.append((step, prompt, text))

    def alert(self, why: str) -> None:
        self._send(lambda: self._run.alert(title=f"{self._run.name} gave up", text=why, level="ERROR"))

    def finish(self, summary: dict[str, Any]) -> None:
        import wandb

        def end() -> None:
            if self._samples:
                table = wandb.Table(columns=["step", "prompt", "text"], data=self._samples)
                with suppress(Exception):  # the rest is worth more
                    self._run.log({"samples": table}, commit=False)
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


@contextmanager
def _unchanged_if_refused(folder: Path) -> Iterator[None]:
    """Leave a run directory's folder `wandb` as it was if wandb does not begin: it makes files before it fails."""
    import wandb

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)  # which otherwise ends Python at once
    before = [*folder.glob("*")]
    links = {path: path.readlink() for path in before if path.is_symlink()}
    try:
        yield
    except BaseException:
        with suppress(Exception):
            wandb.teardown()  # its process still writes there
        for path in folder.glob("*"):
            if path.is_symlink():
                path.unlink()
            elif path not in before:
                shutil.rmtree(path, ignore_errors=True)
        for path, target in links.items():
            path.symlink_to(target)
        if folder.is_dir() and not before:
            folder.rmdir()
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def check_wandb(config: LoggerConfig) -> None:
    """Raise ConfigError for what wandb would refuse only once the run has begun, each with a traceback of its own."""
    if not config.wandb:
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("wandb is not installed: pip install wandb, or use logger=none.")
    import wandb

    chosen = os.environ.get("WANDB_MODE") or "offline"
    if config.mode is WandbMode.auto and chosen not in _WANDB_MODES:
        raise ConfigError(f"WANDB_MODE={chosen}: it must be {', '.join(_WANDB_MODES)}, or unset.")
    try:
        wandb.Settings(project=config.project, run_tags=tuple(config.tags))
    except (wandb.errors.UsageError, ValueError) as error:
        raise ConfigError(f"logger.project, logger.tags: {_first_line(error)}.") from None
    for name, value in os.environ.items():
        if not name.startswith("WANDB_"):
            continue
        try:
            wandb.Settings().update_from_env_vars({name: value})
        except (wandb.errors.UsageError, ValueError) as error:
            raise ConfigError(f"{name}={value}: {_first_line(error)}; correct it, or unset it.") from None
        if name == "WANDB_IDENTITY_TOKEN_FILE" and not os.path.isfile(value):  # wandb's process would panic
            raise ConfigError(f"{name}={value}: there is no such file; correct it, or unset it.")
    try:
        wandb_mode(config.mode)
    except ConfigError:
        raise
    except Exception as error:
        raise _cannot_start(error) from error


def _cannot_start(error: Exception) -> ConfigError:
    """The error for all else that stops wandb: a variable read elsewhere, a settings file, its own process."""
    return ConfigError(f"wandb cannot start ({_first_line(error)}); correct that, or use logger=none.")


def wandb_mode(mode: WandbMode) -> str:
    """online or offline (or what WANDB_MODE says), decided without a prompt and without the network."""
    if mode is WandbMode.offline:
        return "offline"
    chosen = mode.value
    if mode is WandbMode.auto:
        chosen = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
    if chosen == "online" and not _has_wandb_key():
        raise ConfigError(
            "wandb online needs an API key: run `wandb login`, set WANDB_API_KEY, or use logger.mode=offline."
        )
    return chosen


def _display_name(run_dir: Path) -> str:
    """The directory's name, in a sweep followed by the sweep's own name or number: 0_nano_flash cba9."""
    if not in_sweep(run_dir):
        return run_dir.name
    sweep = run_dir.resolve().parent.name
    return f"{run_dir.name} {re.sub(r'^[0-9-]+_[0-9-]+_sweep_', '', sweep)}"


def _id_from_agent() -> str | None:
    """The id that `wandb agent` waits for, if it started this run."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None


def _tags_of_environment() -> list[str]:
    return [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag.strip()]


def _unused_variables() -> list[str]:
    """A note on the variables of wandb that a run cannot follow: what they decide belongs to its directory."""
    if _id_from_agent():  # which sets them all
        return []
    ours = [name for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR") if os.environ.get(name)]
    return (
        [f"{', '.join(ours)}: not used, since a run's id and files belong to its directory"] if ours else []
    )


def _first_line(error: Exception) -> str:
    """pydantic's own text has many lines."""
    text = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
    return (text.splitlines() or [type(error).__name__])[0].removesuffix(".")


def _has_wandb_key() -> bool:
    """Whether `wandb login` or a variable left a key. wandb.login() would ask the server, 10 s without a network."""
    import wandb
    from requests.utils import get_netrc_auth

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    return bool(settings.api_key or get_netrc_auth(settings.base_url))
