"""Hydra for the entry points: compose, type and check the config, call, and turn a user's mistake into one line."""

from __future__ import annotations

import math
import os
import re
import secrets
import select
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import jobs, torchrun
from .config import Config, ConfigError, cannot_load, from_hydra, is_users_mistake
from .corrections import CONFIGS, correction, explained, options_of
from .files import REMEDY
from .optimizer import OptimizerName

# A setting without effect of its own -> what reads it, in words; whether a config has that; settings that decide so.
_READ_WITH: dict[str, tuple[str, Callable[[Config], object], set[str]]] = {
    "trainer.init_positions": (
        "trainer.init_from",
        lambda config: config.trainer.init_from or config.trainer.resume,  # the run to resume had it
        {"trainer.init_from"},
    ),
    "optimizer.momentum": (
        "optimizer=muon",
        lambda config: config.optimizer.name is OptimizerName.muon,
        {"optimizer", "optimizer.name"},
    ),
    "trainer.sample_every": (
        "trainer.sample_tokens above 0",
        lambda config: config.trainer.sample_tokens or not config.trainer.sample_every,
        {"trainer.sample_tokens"},
    ),
}


@torchrun.said_once()
def launch(task: Callable[[Config, Path], float | None], *, makes_run: bool, usage: str = "") -> None:
    """Call `task(config, run_dir)` with the config that the command line says.

    Args:
        task: raises this project's subclasses of ValueError for errors that a user can fix. What it returns is for
            a sweeper that searches, such as hydra/sweeper=optuna: the smaller, the better.
        makes_run: whether the task fills a run directory; otherwise Hydra leaves no files, except a sweep's
            multirun.yaml.
        usage: what --help prints; empty: the help of train.py, from configs/train.yaml.
    """
    sys.stdout.reconfigure(errors="replace")  # for a model's text, where the terminal or file is not UTF-8
    arguments = [_expand_home(word) for word in sys.argv[1:]]
    options = _checked(arguments)
    # Rank 0 names the run directory, and tells the others.
    ours = [] if makes_run and torchrun.is_main_rank() else ["hydra.run.dir=."]
    if usage:
        ours.append("hydra.help.template=" + "'" + usage.replace("'", r"\'") + "'")
    # All settings go first, since Hydra takes them only in one block, and people also type SETTINGS -m SETTINGS.
    theirs, typed = options.overrides, [sys.argv[0], *arguments]
    sys.argv[1:] = [*theirs, *ours, *(word for word in arguments if word not in theirs)]
    ConfigStore.instance().store(name="config_schema", node=Config)
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise to us instead of printing several lines
    if "OMP_WAIT_POLICY" not in os.environ:
        # How long PyTorch's threads on a CPU look for work before they sleep. With one of two cores busy the default
        # run made 3.9 to 4.4 thousand tokens/s without this and 7.8 to 9.1 with it; with both free 15.0 and 16.1.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")

    job = _Job(task, makes_run, typed)
    Sweep.trains = makes_run

    def main(cfg: DictConfig) -> float | None:
        return job.run(cfg)

    try:
        with _one_line_errors(job):
            if options.cfg and not options.config_dir:  # Hydra prints settings without checking them
                composed(*theirs)
            hydra.main(config_path=str(CONFIGS), config_name="train", version_base="1.3")(main)()
    finally:
        jobs.Sweep.remove_if_empty()
    if job.refused:
        sys.exit("\n".join(job.refused))


class _Job:
    """What Hydra calls with each run's composed config; pickled where runs of a sweep have their own processes."""

    def __init__(
        self, task: Callable[[Config, Path], float | None], makes_run: bool, command: list[str]
    ) -> None:
        self.task, self.makes_run, self.command = task, makes_run, command
        self.begun = self.elsewhere = False  # Hydra has called `run`; this is a copy in a process of its own
        self.refused: list[str] = []  # printed at the end: a sweep continues with its other runs

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"elsewhere": True}

    def run(self, cfg: DictConfig) -> float | None:
        self.begun = True
        hydra_config = HydraConfig.get()
        run_dir = Path(hydra_config.runtime.output_dir)
        sweeps = hydra_config.mode is RunMode.MULTIRUN
        sys.argv = self.command  # as it was typed, for environment.json
        if self.elsewhere:
            jobs.join_ranks()
        try:
            config = _typed(cfg, hydra_config.overrides.task, self.command)
            if sweeps and config.logger.group is None:
                config.logger.group = run_dir.parent.name
            if recipe := hydra_config.runtime.choices.get("experiment"):
                config.logger.tags.append(recipe)
            return self.task(config, Path(os.path.relpath(run_dir)))
        except ValueError as error:
            if not is_users_mistake(error):
                raise
            self._refuse(f"error: {run_dir.name}: {error}" if sweeps else f"error: {error}", run_dir)
            return math.inf  # a search avoids what diverges, or does not fit into memory
        except (ImportError, OSError) as error:
            if not (line := cannot_load(error)):
                raise
            self._refuse(f"error: {line}", run_dir)
            return math.inf
        except SystemExit as stopped:
            if self.elsewhere:
                jobs.hand_on(stopped)
            raise
        finally:
            if self.makes_run and torchrun.is_main_rank() and not any(run_dir.iterdir()):
                run_dir.rmdir()  # the run ended before it wrote anything

    def _refuse(self, line: str, run_dir: Path) -> None:
        self.refused.append(line)
        if self.elsewhere and torchrun.is_main_rank():
            jobs.note_refused(run_dir.parent, line)


class Sweep(jobs.Sweep):
    """Hydra's callback: prints before a sweep which of its runs will be refused. (A search picks its runs later.)"""

    trains = True  # set by `launch`: whether the runs train; if so, attention is checked on their device too

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        super().on_multirun_start(config)
        if not config.hydra.sweeper._target_.endswith("BasicSweeper"):
            return
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        given = parser.parse_overrides(OmegaConf.to_container(config.hydra.overrides.task))
        here = config.hydra.launcher._target_.endswith("BasicLauncher")  # others may find other devices
        for number, overrides in enumerate(BasicSweeper.split_arguments(given, None)[0]):
            try:
                typed = _typed(hydra.compose(config.hydra.job.config_name, overrides), overrides, sys.argv)
                if self.trains and here:
                    _check_device(typed)
            except (HydraException, OmegaConfBaseException):
                return  # Hydra refuses all; or ${hydra:...} is not known yet
            except ValueError as error:
                if not is_users_mistake(error):
                    raise
                print(f"run {number} will be refused: {error}", flush=True)


def _check_device(config: Config) -> None:
    """Raise what a run in this process would raise for its device, such as for an attention that cannot run there."""
    from .distributed import World, resolve_device  # loads torch
    from .plan import checked

    checked(config, World(resolve_device(config.trainer.device)))


@contextmanager
def _one_line_errors(job: _Job) -> Iterator[None]:
    """Exit with one line for a user's mistake, an interrupt or a closed pipe; a bug keeps its traceback."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(f"error: {explained(error)}")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
        print("error: the program that this output is piped to has exited", file=sys.stderr)
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError) as error:
        if job.begun:
            raise
        if isinstance(error, OSError):
            sys.exit(f"error: cannot create the run directory ({error}); {REMEDY}")
        # Hydra's own error, about its options or a group that is null.
        sys.exit(f"error: {str(error).splitlines()[0]}")
    except SystemExit:  # a run of a sweep was told to stop, and ends the sweep
        sys.stderr.writelines(f"{each}\n" for each in job.refused)
        raise
    except KeyboardInterrupt:
        # The trainer handles the first Ctrl-C, and saves: this one came before the first step, or was the second.
        print(*job.refused, "interrupted", sep="\n", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _nobody_reads(pipe: TextIO) -> bool:
    """Whether the reader of a pipe is gone, as in `train.py ... | head` once head has its lines."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def composed(*overrides: str) -> Config:
    """The config of a command line with these overrides; raises Hydra's errors, and ConfigError."""
    ConfigStore.instance().store(name="config_schema", node=Config)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return _typed(hydra.compose("train", list(overrides)), overrides, overrides)


def _typed(cfg: DictConfig, overrides: Iterable[str], command: Collection[str]) -> Config:
    """The typed config. Refuses a setting that nothing reads, unless a sweep varies the setting that decides so."""
    config = from_hydra(cfg)
    varies = {word.lstrip("+").partition("=")[0]: word not in command for word in overrides}
    for setting, (reader, reads, decided_by) in _READ_WITH.items():
        if setting in varies and not reads(config) and not any(map(varies.get, decided_by)):
            raise ConfigError(f"{setting} is read with {reader} only: add that, or leave it out.")
    if config.attention.tier != "auto" and (varies.get("attention") or varies.get("attention.name")):
        from kernels import ATTENTION  # loads torch

        if (backend := ATTENTION.get(config.attention.name)) and not backend.tier:
            config.attention.tier = "auto"  # the tier is for the sweep's other runs
    return config


def _expand_home(word: str) -> str:
    """The setting with ~ expanded: shells do not expand it after =, and Hydra cannot parse it."""
    if word.startswith("-") or re.search("['\"]", word):
        return word
    return re.sub(r"(?<=[=\[,])~(?=/)", lambda _: os.path.expanduser("~"), word)


def _checked(arguments: list[str]) -> Namespace:
    """The arguments as Hydra parses them; exits with a correction if one is not key=value, as in trainer.steps 5."""
    options, unknown = get_args_parser().parse_known_intermixed_args(arguments)
    words = {*unknown, *options.overrides}
    wrong = [
        word
        for word in arguments
        if word in words and (word.startswith("-") or not re.match(r"~|\+{0,2}[^=+]+=", word))
    ]
    if wrong:
        sys.exit(f"error: {correction(' '.join(wrong))}")
    if options.multirun and torchrun.launched():
        sys.exit(
            "error: -m does not work under torchrun: start one torchrun per setting, all with the same logger.group."
        )
    _check_groups(options.overrides)
    _check_directory(options)
    jobs.prepare(options.overrides)
    return options


def _check_directory(options: Namespace) -> None:
    """Exit if the run directory is an empty string, or for a setting that Hydra ignores with or without -m."""
    sweeps = options.multirun or "hydra.mode=MULTIRUN" in options.overrides
    for word in options.overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key in ("hydra.run.dir", "hydra.sweep.dir") and not value:  # an unset shell variable
            sys.exit(
                f"error: {word}: an empty value means the current directory; name a directory, or leave this out"
            )
        if key == "hydra.run.dir" and sweeps:
            sys.exit(
                f"error: {word}: with -m every run gets its own directory; "
                f"name the parent of them all with hydra.sweep.dir={value}"
            )
        if re.match(r"hydra[/.](launcher|sweeper)", key) and not sweeps:
            sys.exit(f"error: {word}: this needs -m")
        if key in ("hydra.sweep.dir", "hydra.sweep.subdir") and not sweeps:
            sys.exit(
                f"error: {word}: this needs -m; without -m, name the run directory with hydra.run.dir=..."
            )


def _check_groups(overrides: list[str]) -> None:
    """Exit if a group is given a list, of which Hydra would take the last, or what is no option's name to Hydra."""
    for word in overrides:
        group, _, option = word.partition("=")
        if not (CONFIGS / group).is_dir():
            continue
        wrong = f"error: {word}: {group} must be one of {', '.join(options_of(group))}"
        if re.fullmatch(r"\[.*\]", option):
            sys.exit(f"{wrong}; several values need -m: -m {group}={option.strip('[]')}")
        if option.lower() in ("null", "true", "false"):
            sys.exit(f"{wrong}, or left out")


def _run_name(*parts: str) -> str:
    """2026-11-20_09-15-02_nano_flash_7f3a: sorts by time, and two starts in one second still differ."""
    return "_".join([time.strftime("%Y-%m-%d_%H-%M-%S"), *parts, secrets.token_hex(2)])


OmegaConf.register_new_resolver("run_name", _run_name, use_cache=True, replace=True)  # here, for jobs too
