"""A run of seconds, and what is asked of its directory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import text_data
from training import checkpoint
from training.config import Config, LoggerConfig, ModelConfig, TrainerConfig
from training.distributed import World
from training.trainer import train

CPU = World(torch.device("cpu"))


@pytest.fixture(scope="session")
def config(text_file) -> Config:
    return Config(
        model=ModelConfig(seq_len=32, n_layer=1, n_head=2, n_embd=32),
        data=text_data(text_file),
        trainer=TrainerConfig(
            steps=8, batch_tokens=64, log_every=1, eval_every=2, device="cpu", sample_tokens=5
        ),
        logger=LoggerConfig(wandb=False),
    )


@pytest.fixture(scope="session")
def run_of_a_step(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one step, to be read only."""
    run = tmp_path_factory.mktemp("run_of_a_step") / "run"
    train(having(config, steps=1), run)
    return run


def having(config: Config, **settings) -> Config:
    return replace(config, trainer=replace(config.trainer, **settings))


def steps_saved(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint.saved(run)]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and link below a folder, but for the lock."""
    return {
        str(path.relative_to(folder)): str(path.readlink()).encode()
        if path.is_symlink()
        else path.read_bytes()
        for path in folder.rglob("*")
        if (path.is_symlink() or path.is_file()) and path.name != ".lock"
    }


class Killed(BaseException):
    """Stands for a SIGKILL: the run does nothing after it."""


def killed(*_args, **_options):
    raise Killed
