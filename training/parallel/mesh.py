"""Who is who among the ranks: the mesh that they form, and the part of a batch that one of them takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import Config, ConfigError
from ..distributed import World
from ..optimizer import OptimizerName
from .config import GradientDtype, ParallelConfig, Shard

DATA = "data"  # the mesh's dimension along which ranks take different sequences
CONTEXT = "context"  # that along which they share each


@dataclass(frozen=True)
class Layout:
    """A rank's place in the mesh."""

    mesh: DeviceMesh | None = None  # None: one process, without a process group
    data_rank: int = 0  # which part of a batch this rank takes
    data_size: int = 1  # of how many
    context_group: ProcessGroup | None = None  # the ranks with which it shares each sequence; None: none
    context_rank: int = 0
    context_size: int = 1


def layout_of(config: ParallelConfig, ranks: World) -> Layout:
    """The mesh of a run: one dimension, along which the batch and, if asked for, the model are split.

    With parallel.context the ranks also form a mesh of two dimensions. Gradients and parts of the model still go over
    all of them, since each has tokens of its own.
    """
    if not ranks.launched:
        return Layout()
    mesh = init_device_mesh(ranks.device.type, (ranks.size,), mesh_dim_names=(DATA,))
    if config.context == 1:
        return Layout(mesh, mesh.get_local_rank(DATA), mesh.size())
    data_size = ranks.size // config.context
    both = init_device_mesh(ranks.device.type, (data_size, config.context), mesh_dim_names=(DATA, CONTEXT))
    data_rank, context_rank = both.get_local_rank(DATA), both.get_local_rank(CONTEXT)
    return Layout(mesh, data_rank, data_size, both.get_group(CONTEXT), context_rank, config.context)


def check_shard(config: Config, ranks: World, dtype: torch.dtype) -> None:
    """Raise ConfigError where a model cannot be split as parallel.shard says, or no rank exchanges gradients."""
    if config.parallel.gradient_dtype is not GradientDtype.fp32 and not ranks.launched:
        raise ConfigError("parallel.gradient_dtype is read with torchrun only: add that, or leave it out.")
    if config.parallel.shard is Shard.none:
        if config.parallel.blocks_at_once:
            raise ConfigError(
                "parallel.blocks_at_once is read with parallel.shard=full or optimizer; leave it out."
            )
        return
    at_once, blocks = config.parallel.blocks_at_once, config.model.n_layer
    if at_once is not None and at_once > blocks:
        raise ConfigError(
            f"parallel.blocks_at_once={at_once}, of a model of {blocks} blocks; the nearest is {blocks}."
        )
    asked = f"parallel.shard={config.parallel.shard.value}"
    if not ranks.launched:
        raise ConfigError(
            f"{asked} splits the model over the ranks of torchrun, and this is one process: start "
            "it with torchrun --standalone --nproc_per_node=2 train.py, or use parallel.shard=none."
        )
    if dtype is torch.float16:
        raise ConfigError(f"{asked} has no gradient scaler, which fp16 needs; use trainer.precision=bf16.")
    if config.optimizer.name is OptimizerName.muon:
        raise ConfigError(
            f"{asked} leaves a rank parts of matrices, and muon needs whole ones; use optimizer=adamw, or "
            "parallel.shard=none."
        )
