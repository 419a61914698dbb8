"""Who is who among the ranks: the mesh that they form, and the part of a batch that one of them takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..distributed import World
from .config import ParallelConfig

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
