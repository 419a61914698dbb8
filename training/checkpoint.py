"""Checkpoints: one directory each, written under a temporary name, then renamed, so any that exists is complete.

    RUN/checkpoints/
      step-00001000/weights.safetensors  the model's state dict, all that sampling needs; the output projection is the
                                         embedding, so it is there once, as wte.weight
                    training.pt          optimizer, gradient scaler, step, seconds, and what must not change
                    parts/               with parallel.shard, weights and optimizer, as each rank had them
                    validation_loss      and its tokens, if it was the run's lowest; written after training.pt
      best                               with trainer.keep_best, a link to the checkpoint with the lowest loss

A directory whose name has a suffix is left over: half written, or being deleted. It is never read, and the next save
removes it.
Batches, dropout and the learning rate are functions of the step, so no loader or random state is stored.
"""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

from data import DataError
from data.files import flush_to_disk

from .config import ConfigError
from .files import REMEDY, readable_as, write_whole
from .parallel import parts

FOLDER = "checkpoints"
BEST = "best"
WEIGHTS = "weights.safetensors"
PARTS = "parts"
OLD_WEIGHTS = "weights.pt"  # pickled, of runs before 2026-11-25: still read


def save(run_dir: Path, step: int, weights: dict, training: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of `step` and drop all but the newest `keep`."""
    begin(run_dir, step, training, weights)
    return complete(run_dir, step, keep)


def begin(run_dir: Path, step: int, training: dict[str, Any], weights: dict | None = None) -> None:
    """Write into `partial` what one rank alone writes: training.pt and, if the model is not sharded, its weights."""
    folder = partial(run_dir, step)
    files = [folder / "training.pt"]
    _remove_leftovers(run_dir)
    with _unless_full(run_dir, step):
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, **training}, files[0])
        if weights is not None:
            files.append(folder / WEIGHTS)
            save_file(weights, files[1])
            readable_as(files[0], files[1])
        flush_to_disk(files)


def complete(run_dir: Path, step: int, keep: int) -> Path:
    """Give a checkpoint its name once all of it is written, and drop all but the newest `keep`."""
    final = at(run_dir, step)
    with _unless_full(run_dir, step):
        if final.exists():
            _put_aside(final)
        partial(run_dir, step).rename(final)
    _prune(run_dir, keep)
    return final


@contextmanager
def _unless_full(run_dir: Path, step: int) -> Iterator[None]:
    """Turn what a full disk raises into one line, and leave nothing half written."""
    try:
        yield
    # on a full disk torch's zip writer raises RuntimeError, flush_to_disk DataError
    except (OSError, RuntimeError, SafetensorError, DataError) as error:
        shutil.rmtree(partial(run_dir, step), ignore_errors=True)
        reason = f"is the disk full? {error}" if isinstance(error, RuntimeError) else error
        raise ConfigError(
            f"the checkpoint of step {step} could not be written to {run_dir / FOLDER}: {reason}; {REMEDY}"
        ) from error


def _prune(run_dir: Path, keep: int) -> None:
    with suppress(OSError):  # the new one is saved: failing to remove an old one must not end the run
        for old in saved(run_dir)[:-keep]:
            if old != _link_target(run_dir / FOLDER / BEST):
                _put_aside(old)
    _remove_leftovers(run_dir)


class Best(NamedTuple):
    """The checkpoint with the lowest validation loss, and how many tokens that loss is of."""

    path: Path
    loss: float
    tokens: int


def keep_best(run_dir: Path, step: int, loss: float, tokens: int, keep: int) -> None:
    """Make the checkpoint of `step`, with that validation loss, the best; it is kept besides the newest `keep`."""
    link = run_dir / FOLDER / BEST
    new_link = link.with_suffix(".partial")
    checkpoint = at(run_dir, step)
    write_whole(checkpoint / "validation_loss", f"{loss!r} {tokens}\n")
    new_link.unlink(missing_ok=True)
    new_link.symlink_to(checkpoint.name)
    if link.is_dir() and not link.is_symlink():  # as in a copy of the run directory that followed links
        _put_aside(link)
    new_link.replace(link)  # atomic: a kill leaves the old link or the new one, both valid
    _prune(run_dir, keep)


def best(run_dir: Path) -> Best | None:
    """The best checkpoint, where one is kept."""
    link = run_dir / FOLDER / BEST
    try:
        loss, tokens = (link / "validation_loss").read_text().split()
        return Best(_link_target(link), float(loss), int(tokens))
    except (OSError, ValueError):  # none is kept, or a power cut emptied the file
        return None


def _link_target(path: Path) -> Path:
    return path.parent / path.readlink() if path.is_symlink() else path


def drop_after(run_dir: Path, step: int) -> list[str]:
    """Remove the checkpoints newer than `step`, where the run resumes, and return their names."""
    newer = [path for path in saved(run_dir) if int(path.name.removeprefix("step-")) > step]
    if _link_target(run_dir / FOLDER / BEST) in newer:
        (run_dir / FOLDER / BEST).unlink()
    for path in newer:
        _put_aside(path)
    _remove_leftovers(run_dir)
    return [path.name for path in newer]


def at(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, or would be."""
    return run_dir / FOLDER / f"step-{step:08d}"


def partial(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written."""
    return at(run_dir, step).with_suffix(".partial")


def saved(run_dir: Path) -> list[Path]:
    """The checkpoints of a run directory, oldest first."""
    return sorted(path for path in (run_dir / FOLDER).glob("step-*") if not path.suffix)


def _put_aside(path: Path) -> None:
    """Rename it for _remove_leftovers to delete. Deleted in place, half of it could survive a kill under its name."""
    path.rename(path.with_suffix(f".{time.time_ns()}"))  # a unique one: earlier leftovers may still be there


def _remove_leftovers(run_dir: Path) -> None:
    for leftover in (run_dir / FOLDER).glob("*.*"):
        shutil.rmtree(leftover, ignore_errors=True)


def find(path: str | Path) -> Path:
    """The checkpoint directory that `path` names: itself, or the newest of a run directory or its checkpoints/."""
    path = Path(path)
    if any((path / name).is_file() for name in (WEIGHTS, OLD_WEIGHTS)) or in_parts(path):
        return _link_target(path)
    if path.is_file():
        raise ConfigError(
            f"{path} is a file; name a run directory or one of its checkpoints, which are directories too."
        )
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist; name a run directory or one of its checkpoints.")
    if path.name == FOLDER:  # as a shell's completion leaves it
        path = path.parent
    if not (found := saved(path)):
        if runs := sorted(str(each.parent) for each in path.glob(f"*/{FOLDER}")):
            raise ConfigError(f"{path} holds runs; name one of them: {', '.join(runs)}.")
        raise ConfigError(f"{path} holds no checkpoint: looked for {path / FOLDER}/step-*.")
    return found[-1]


def load_weights(checkpoint: Path, device: torch.device | str) -> dict[str, torch.Tensor]:
    """The model's state dict. Raises ConfigError if it cannot be read, or holds a value that is not finite."""
    path = checkpoint / (PARTS if in_parts(checkpoint) else WEIGHTS)
    if not path.exists() and (checkpoint / OLD_WEIGHTS).is_file():
        path = checkpoint / OLD_WEIGHTS
    if path.name == PARTS:
        _check_parts(checkpoint)
    with _readable(path, checkpoint):
        if path.name == PARTS:
            weights = {name: weight.to(device) for name, weight in parts.read_weights(path).items()}
        elif path.name == OLD_WEIGHTS:
            weights = torch.load(path, map_location=device, weights_only=True)
        else:
            weights = load_file(path, device=str(device))
    _check_finite(path, weights)
    return weights


def load_parts(checkpoint: Path, into: dict[str, torch.Tensor]) -> None:
    """Fill `into`, which `parts.tensors` returned, in place from a sharded checkpoint; raises as `load_weights`."""
    path = checkpoint / PARTS
    _check_parts(checkpoint)
    with _readable(path, checkpoint):
        parts.read(path, into)
    _check_finite(path, into)


def _check_parts(checkpoint: Path) -> None:
    """Raise ConfigError if a file of the parts is missing or cut short: torch's own error names no file."""
    folder = checkpoint / PARTS
    if not parts.is_whole(folder):
        raise ConfigError(f"{folder} has lost .metadata, which lists the parts; {_remedy(checkpoint)}.")
    ends: dict[Path, int] = {}
    with _readable(folder / ".metadata", checkpoint, Exception):  # unpickling damaged bytes can raise any
        for part in FileSystemReader(folder).read_metadata().storage_data.values():
            file = folder / part.relative_path
            ends[file] = max(ends.get(file, 0), part.offset + part.length)
    for file, end in ends.items():
        with _readable(file, checkpoint):
            if (size := file.stat().st_size) < end:
                raise EOFError(f"it ends at byte {size:,} of {end:,}")


def _check_finite(path: Path, weights: dict[str, torch.Tensor]) -> None:
    if broken := not_finite(weights):
        raise ConfigError(f"{path} holds values that are not finite, in {broken}; {_remedy(path.parent)}.")


def not_finite(weights: dict[str, torch.Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity; of one in parts, only this rank's part is checked."""
    local = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in weights.items()}
    return next((name for name, weight in local.items() if not weight.isfinite().all()), None)


def load_training(checkpoint: Path) -> dict[str, Any]:
    """Everything else that was saved, on the CPU; a tensor is read only when it is used."""
    path = checkpoint / "training.pt"
    with _readable(path, checkpoint):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def in_parts(checkpoint: Path) -> bool:
    """Whether it is a sharded one, of which each rank wrote its part."""
    return (checkpoint / PARTS).is_dir()


@contextmanager
def _readable(path: Path, checkpoint: Path, *others: type[Exception]) -> Iterator[None]:
    """Turn what reading a damaged file of a checkpoint raises, and `others`, into one line."""
    try:
        yield
    except (OSError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError, *others) as error:
        path = Path(getattr(error, "filename", None) or path)
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = said.split(". ")[0].splitlines()[0].rstrip(".")
        raise ConfigError(f"{path} cannot be read ({reason}); {_remedy(checkpoint)}.") from error


def _remedy(checkpoint: Path) -> str:
    older = [path for path in saved(checkpoint.parent.parent) if path.name < checkpoint.name]
    return f"use the checkpoint before it, {older[-1]}" if older else "there is no older checkpoint"
