"""The logger for TensorBoard: the metrics of metrics.csv, for `tensorboard --logdir runs`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .config import Config, ConfigError, LoggerConfig, to_yaml
from .loggers import Logger


class TensorBoardLogger(Logger):
    """Event files in RUN/tensorboard: scalars by the names of metrics.csv, texts for the config and the samples.

    A resumed run adds a file, and TensorBoard drops what older ones have from `step` on.
    """

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1, flush_secs=10)
        self._writer.add_text("config", _preformatted(to_yaml(config)), step)

    def log(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name != "step":
                self._writer.add_scalar(name, value, metrics["step"])

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._writer.add_text("sample", _preformatted(text), step)

    def finish(self, summary: dict[str, Any]) -> None:
        self._writer.close()


def _preformatted(text: str) -> str:
    """TensorBoard shows texts as Markdown, where four blanks begin a line of code."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def check_tensorboard(config: LoggerConfig) -> None:
    """Raise ConfigError if its package is not there."""
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard is not installed: pip install tensorboard, or use logger.tensorboard=false."
        )
