"""Who is who among the ranks: the mesh that they form, and the part of a batch that one of them takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import ConfigError
from ..distributed import World
from .config import ParallelConfig, Shard

DATA = "data"  # the mesh's dimension along which ranks take different sequences


@dataclass(frozen=True)
class Layout:
    """A rank's place in the mesh."""

    mesh: DeviceMesh | None = None  # None: one process, without a process group
    data_rank: int = 0  # which part of a batch this rank takes
    data_size: int = 1  # of how many


def layout(config: ParallelConfig, ranks: World) -> Layout:
    """The mesh of a run: one dimension, along which the batch and, if asked for, the model are split."""
    if not ranks.launched:
        return Layout()
    mesh = init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=(DATA,))
    return Layout(mesh, mesh.get_local_rank(DATA), mesh.size())


def check_shard(how: Shard, ranks: World, dtype: torch.dtype) -> None:
    """Raise ConfigError where a model cannot be split so."""
    if how is Shard.none:
        return
    if not ranks.launched:
        raise ConfigError(
            f"parallel.shard={how.value} splits the model over the ranks of torchrun, and this is one process: start "
            "it with torchrun --standalone --nproc_per_node=2 train.py, or use parallel.shard=none."
        )
    if dtype is torch.float16:
        raise ConfigError(
            f"parallel.shard={how.value} has no gradient scaler, which fp16 needs; use trainer.precision=bf16."
        )
