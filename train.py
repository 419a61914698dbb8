"""Train GPT-2: `python train.py [group=option] [key=value]`; `--help` lists the groups."""

from pathlib import Path

import training.installed  # noqa: F401  (ends with one line if a package is missing)
from training.command_line import launch
from training.config import Config


def main(config: Config, run_dir: Path) -> float:
    from training.trainer import train  # loads torch, which --help and --cfg do without

    return train(config, run_dir)["val/loss"]  # for a sweeper that searches, such as hydra/sweeper=optuna


if __name__ == "__main__":
    launch(main, makes_run=True)
