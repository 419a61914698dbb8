"""The ranks of a ring, and what they exchange: what one passes on to the next, or all at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

if hasattr(dist, "all_gather_single"):  # new in torch 2.13, where the older names warn
    all_gather, reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    all_gather, reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


class Arriving(NamedTuple):
    """A tensor on its way from the previous rank, while `sent` is on its way to the next, and must live."""

    tensor: torch.Tensor
    sent: torch.Tensor
    transfers: list[dist.Work]

    def wait(self) -> torch.Tensor:
        """The tensor; on a GPU the stream waits for it, not the host."""
        for transfer in self.transfers:
            transfer.wait()
        return self.tensor


class RingGroup:
    """The ranks of a process group (None: all), each of which sends to the next one."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group or dist.distributed_c10d._get_default_group()
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def source(self, step: int) -> int:
        """The rank whose tensors are here after that many steps."""
        return (self.rank - step) % self.size

    def pass_on(self, tensor: torch.Tensor) -> Arriving:
        """Send a contiguous tensor to the next rank and receive the previous rank's, while the caller computes.

        Over NCCL it runs on a stream of its own, and starts when what is queued on the caller's has ended.
        """
        if self.size == 1:
            return Arriving(tensor, tensor, [])
        received = torch.empty_like(tensor)
        next_rank, previous = (
            dist.get_global_rank(self.group, (self.rank + by) % self.size) for by in (1, -1)
        )
        transfers = [
            dist.P2POp(dist.isend, tensor, next_rank, self.group),
            dist.P2POp(dist.irecv, received, previous, self.group),
        ]
        return Arriving(received, tensor, dist.batch_isend_irecv(transfers))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's contiguous tensor, one after the other along the first axis."""
        received = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        all_gather(received, tensor, self.group)
        return received

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """This rank's part, cut along the first axis, of the sum over the ranks of a contiguous tensor."""
        mine = parts.new_empty((parts.shape[0] // self.size, *parts.shape[1:]))
        reduce_scatter(mine, parts, group=self.group)
        return mine
