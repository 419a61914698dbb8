"""Sharded checkpoints, by torch.distributed.checkpoint: every rank writes its part, and any number of ranks reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .shard import put

_MODEL, _OPTIMIZER = "model.", "optimizer."


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of them that a checkpoint holds, by name, as views; of a sharded model DTensors."""
    found = {_MODEL + name: weight for name, weight in model.state_dict().items()}
    for name, parameter in optimized(model, optimizer):
        found |= {f"{_OPTIMIZER}{name}.{key}": each for key, each in optimizer.state[parameter].items()}
    return found


def fill(into: dict[str, Tensor], weights: dict[str, Tensor], moments: dict[str, dict[str, Tensor]]) -> None:
    """Copy whole weights, which every rank has, into what `tensors` returned. moments: of each parameter, by name."""
    whole = {_MODEL + name: weight for name, weight in weights.items()}
    whole |= {f"{_OPTIMIZER}{name}.{key}": each for name, of in moments.items() for key, each in of.items()}
    for name, tensor in into.items():
        put(whole[name], tensor)


def optimized(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that the optimizer steps, with their names, in the order of its state dict."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter


def is_whole(folder: Path) -> bool:
    """Whether the folder holds all parts: the list of them is written last."""
    return (folder / ".metadata").is_file()


def read(folder: Path, into: dict[str, Tensor]) -> None:
    """Fill the tensors, whole or in parts, in place; a rank reads what it needs, without asking the others."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as asked for
            dcp.load(into, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:  # a BaseException that holds what each rank raised
        raise RuntimeError(str(next(iter(error.failures.values()))[0])) from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The model's state dict, whole, on the CPU."""
    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    whole = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in listed.items()
        if name.startswith(_MODEL) and isinstance(about, TensorStorageMetadata)
    }
    read(folder, whole)
    return {name.removeprefix(_MODEL): weight for name, weight in whole.items()}
