"""One process or many: who am I, which device is mine, and the few collectives training needs.

Launched by torchrun, a run is data-parallel: every rank holds the model and takes its share of each batch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kernels.versions import mismatched_libraries, no_cuda

from . import torchrun
from .config import ConfigError
from .precision import forget_compiled


@dataclass(frozen=True)
class World:  # this process's device and rank, and collectives over all ranks
    device: torch.device
    rank: int = 0
    size: int = 1
    launched: bool = False  # by torchrun: there is a process group, even of one rank

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum of `values` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def totals(self, values: torch.Tensor) -> list[float]:
        """That sum as Python numbers.

        Not by `tolist`: while a thread waits in a copy into pageable memory, no other can copy, and `rescue` has to
        while this one waits for a lost rank (measured: kernels/log/step.md). `item` does not use such memory.
        """
        return [each.item() for each in self.sum(values)]

    def gather(self, value: float) -> list[float]:
        """Every rank's `value`, in the order of ranks."""
        values = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        values[self.rank] = value
        return self.totals(values)

    def share(self, value: Any) -> Any:
        """Rank 0's `value`, on every rank; None says nothing and only makes the others wait for rank 0."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def disagreeing(self, disagrees: bool) -> int | None:
        """The first rank whose `disagrees` is true, None if none is."""
        said = self.gather(disagrees)
        return said.index(1.0) if any(said) else None

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that a clock read next tells the truth."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def resolve_device(name: str, option: str = "trainer.device=") -> torch.device:
    """The device called `name`; under torchrun each rank takes the GPU of its local rank. `option`: for errors."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ConfigError(f"{option}{name} is not supported; use auto, cpu, cuda or cuda:N.")
    device = torch.device(name)
    if device.type == "cuda":
        if torchrun.launched() and device.index is not None:
            raise ConfigError(
                f"{option}{name}: under torchrun each rank takes its own GPU; use {option}cuda."
            )
        if not torch.cuda.is_available():
            raise ConfigError(f"{option}{name}: {no_cuda()}; or use {option}cpu.")
        if mismatch := mismatched_libraries():
            raise ConfigError(f"{option}{name}: {mismatch}.")
        index = int(os.environ["LOCAL_RANK"]) if torchrun.launched() else device.index or 0
        found = torch.cuda.device_count()
        ranks = max(index + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if torchrun.launched() and ranks > found:  # so all ranks of a host say it
            raise ConfigError(
                f"{option}{name}: CUDA devices found: {found}, for {ranks} ranks of this host; use torchrun's "
                f"--nproc_per_node={found}, in jobs hydra.launcher.tasks_per_node={found} or gpus_per_node={ranks}."
            )
        if index >= found:
            raise ConfigError(f"{option}cuda:{index}: CUDA devices found: {found}, counted from cuda:0.")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


@contextmanager
def world(device_name: str) -> Iterator[World]:
    """The process group of a torchrun launch (nccl between GPUs, gloo between CPUs), or the single process."""
    device = resolve_device(device_name)
    if not torchrun.launched():
        yield World(device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if store := store_of_restart():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group(backend)
    try:
        yield World(device, dist.get_rank(), dist.get_world_size(), launched=True)
    finally:
        forget_compiled()  # NCCL waits for ever while CUDA graphs have its messages (torch 2.13, two H200s)
        dist.destroy_process_group()


def store_of_restart() -> dist.Store | None:
    """Where ranks that torchrun has restarted find each other; None at the first start.

    torchrun keeps its store across restarts (--max-restarts). Under the same names gloo found the addresses of the
    earlier ranks, and in one of two restarts could not connect (torch 2.13).
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not restarts:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(f"restart/{restarts}", dist.TCPStore(address, port, is_master=False))
