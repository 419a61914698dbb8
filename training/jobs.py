"""Runs of a sweep that submitit starts as jobs of their own: hydra/launcher=slurm, or local.

A job is another process, often on another machine. What it needs from the process that started it travels in a pickle
and in environment variables; what it says goes into files below the sweep's directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

CHECKOUT = Path(__file__).resolve().parent.parent
REFUSED = "refused.txt"  # in the sweep's directory, a line for each run that was refused in a job


def prepare(overrides: list[str]) -> None:
    """Let the jobs of a sweep import this checkout, wherever they run; exit if there cannot be any."""
    launcher = next((word for word in overrides if word.startswith("hydra/launcher=")), None)
    if launcher is None:
        return
    if launcher.endswith("slurm") and not shutil.which("srun"):
        sys.exit(
            f"error: {launcher}: there is no srun here; use a cluster's login node, or hydra/launcher=local"
        )
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def extra_with(config: str) -> str | None:
    """The pip extra that installs a plugin's config, such as hydra/sweeper/optuna."""
    brings = {"hydra/sweeper/optuna": "search", "hydra/launcher/submitit_": "slurm"}
    return next((extra for start, extra in brings.items() if config.startswith(start)), None)


def join_ranks() -> None:
    """In a job of several tasks, tell each its rank as torchrun would."""
    from submitit import JobEnvironment
    from submitit.helpers import TorchDistributedEnvironment

    if JobEnvironment().num_tasks > 1:
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)


def hand_on(stopped: SystemExit) -> None:
    """For a run that was told to stop and has saved: if its time was up, submitit's handler requeues its job."""
    from submitit import JobEnvironment

    job = JobEnvironment()
    if stopped.code == 128 + job._usr_sig():
        signal.raise_signal(job._usr_sig())
        sys.exit(0)  # the handler ends the first task; srun would end that too if another one failed


def note_refused(sweep: Path, line: str) -> None:
    with (sweep / REFUSED).open("a") as file:
        file.write(f"{line}\n")


def _check_search(hydra: DictConfig) -> None:
    """Exit if a sweeper that searches has nothing to vary, so that all of its runs would be one."""
    sweeper = hydra.sweeper
    if "n_trials" not in sweeper or sweeper.get("custom_search_space"):
        return
    words = [f"{name}={value}" for name, value in (sweeper.params or {}).items()]
    given = OverridesParser.create().parse_overrides([*words, *hydra.overrides.task])
    last = {each.key_or_group: each for each in given}
    if not any(each.is_sweep_override() for each in last.values()):
        sys.exit("error: all settings are fixed; a search varies one: 'optimizer.lr=interval(1e-4,1e-2)'")


class Sweep(Callback):
    """Hydra's callback around a sweep, with any sweeper and launcher."""

    folder: Path | None = None  # that this process made

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Write multirun.yaml, which marks a folder as a sweep's: Optuna's sweeper does not."""
        _check_search(config.hydra)
        folder = Path(config.hydra.sweep.dir)
        Sweep.folder = None if folder.exists() else folder
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, folder / "multirun.yaml")
        if "submitit" in config.hydra.launcher._target_:  # else they print here
            print(f"output       {folder}/.submitit/*/*_log.out", flush=True)
            print(f"compare      python -m reproduce compare {folder}", flush=True)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """When all its jobs have ended, exit with what was refused in them."""
        said = Path(config.hydra.sweep.dir) / REFUSED
        if said.exists():
            sys.exit(said.read_text().rstrip())

    @staticmethod
    def remove_if_empty() -> None:
        """Leave nothing of a sweep that was refused as a whole."""
        if Sweep.folder and [file.name for file in Sweep.folder.glob("*")] == ["multirun.yaml"]:
            (Sweep.folder / "multirun.yaml").unlink(missing_ok=True)
            with suppress(OSError):  # the current directory
                Sweep.folder.rmdir()
