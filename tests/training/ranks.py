"""Runs on several gloo ranks: one launch of torchrun trains them one after the other, as `train.py` would each.

    python -m torch.distributed.run --nproc_per_node=2 ranks.py '[["hydra.run.dir=a", ...], ...]' cpu

A launch takes ten seconds of importing torch, a run in it one. Errors that a user can fix are printed, by rank 0, and
at the end how many models are left in memory.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.conftest import ROOT, rows
from tests.warm import ranks_of


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """The command that starts `arguments` on so many ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, *arguments]


def run(name: str, *settings: str) -> list[str]:
    """A run, as `train_on` takes it."""
    return [f"hydra.run.dir={name}", *settings]


def train_on(
    ranks: int, runs: list[list[str]], folder: Path, environment: dict[str, str], device: str = "cpu"
) -> subprocess.CompletedProcess:
    """Train with each of these lists of settings, on so many ranks (gloo on a CPU, NCCL on GPUs), in `folder`."""
    return done_on(ranks, [__file__, json.dumps(runs), device], folder, environment)


def done_on(
    ranks: int, script: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess:
    """`ended_on` of what has to succeed."""
    done = ended_on(ranks, script, folder, environment)
    assert done.returncode == 0, done.stderr
    return done


def ended_on(
    ranks: int, script: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess:
    """A script with its arguments, run to its end on so many ranks, in `folder`; it finds our packages."""
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]  # it may hold another torch
    return subprocess.run(
        torchrun(ranks, *script),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def started_on(
    ranks: int, settings: list[str], folder: Path, environment: dict[str, str], *options: str
) -> subprocess.Popen:
    """torchrun of train.py itself. options: torchrun's own."""
    return subprocess.Popen(
        torchrun(ranks, *options, str(ROOT / "train.py"), *settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment,
    )


def processes(launcher: subprocess.Popen) -> dict[int, int]:
    """Rank -> process id, of what torchrun has started so far."""
    found = ranks_of(launcher.pid)
    for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        with suppress(OSError):  # it may end
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found |= {int(each[5:]): int(child) for each in variables if each.startswith(b"RANK=")}
    return found


def wait_until(ready: Callable[[], bool], launcher: subprocess.Popen) -> None:
    while not ready():
        assert launcher.poll() is None, launcher.stdout and launcher.stdout.read()
        time.sleep(0.05)


def logged(run: Path) -> int:
    """Rows of training that a run has written."""
    return sum(bool(row["train/loss"]) for row in rows(run)) if (run / "metrics.csv").exists() else 0


def main() -> None:
    from model.gpt import GPT
    from training.command_line import composed
    from training.config import is_users_mistake
    from training.distributed import world
    from training.trainer import Trainer

    # One process group for all: gloo cannot make a second one of the same name in a launch.
    with world(sys.argv[2]) as ranks:
        for settings in json.loads(sys.argv[1]):
            folder = next(
                each.removeprefix("hydra.run.dir=") for each in settings if "hydra.run.dir=" in each
            )
            config = composed(*(each for each in settings if "hydra.run.dir=" not in each))
            try:
                Trainer(config, Path(folder), ranks).run()
            except ValueError as error:
                if not is_users_mistake(error):
                    raise
                if ranks.is_main:
                    print(f"refused {folder}: {error}", flush=True)
            gc.collect()
        if ranks.is_main:
            left = sum(issubclass(type(each), GPT) for each in gc.get_objects())
            print(f"models left: {left}", flush=True)


if __name__ == "__main__":
    main()
