"""Checkpoints: a directory each, written beside and renamed, so that one that exists is whole.

    RUN/checkpoints/step-00001000/weights.pt    the model's state dict, all that sampling needs
                                  training.pt   optimizer, gradient scaler, step, and what must not change on resume

Batches, dropout and the learning rate are functions of the step, so no loader or random state is stored.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

from data import DataError
from data.files import flush_to_disk

from .config import ConfigError

FOLDER = "checkpoints"


def save(run_dir: Path, step: int, weights: dict, training: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step` and drop all but the newest `keep`."""
    final = run_dir / FOLDER / f"step-{step:08d}"
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = partial / "weights.pt", partial / "training.pt"
    try:
        torch.save(weights, files[0])
        torch.save({"step": step, **training}, files[1])
        flush_to_disk(files)
    except (
        OSError,
        RuntimeError,
        DataError,
    ) as error:  # torch's zip writer raises RuntimeError on a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(
            f"the checkpoint of step {step} could not be written to {final.parent}: {error}"
        ) from error
    replaced = final.with_suffix(".replaced")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in _checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old)
    return final


def find(path: str | Path) -> Path:
    """The checkpoint directory that `path` names: itself, or the newest of a run directory."""
    path = Path(path)
    if (path / "weights.pt").is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist; name a run directory or one of its checkpoints.")
    if not (found := _checkpoints(path)):
        raise ConfigError(f"{path} holds no checkpoint: looked for {path / FOLDER}/step-*.")
    return found[-1]


def load_weights(checkpoint: Path, device: torch.device | str) -> dict[str, torch.Tensor]:
    return _load(checkpoint / "weights.pt", device)


def load_training(checkpoint: Path, device: torch.device | str) -> dict[str, Any]:
    return _load(checkpoint / "training.pt", device)


def _load(path: Path, device: torch.device | str) -> Any:
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).split(". ")[0].splitlines()[0]
        raise ConfigError(f"{path} cannot be read ({reason}); resume from an older checkpoint.") from error


def _checkpoints(run_dir: Path) -> list[Path]:
    return sorted(path for path in (run_dir / FOLDER).glob("step-*") if not path.suffix)
