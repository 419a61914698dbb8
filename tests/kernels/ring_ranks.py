"""What each rank of tests/kernels/test_ring.py does: its part of every case, gathered on rank 0."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.kernels.accuracy import inputs

Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A call of attention that some ranks share."""

    ranks: int
    attention: str = "naive"
    dtype: torch.dtype = torch.float64
    causal: bool = True
    heads: int = 4
    kv_heads: int = 2
    length: int = 64
    head_dim: int = 16
    gather_keys: bool = False
    # Lengths of packed documents in the two rows together; none: not packed.
    documents: tuple[int, ...] = ()
    # Whether a gradient of the log-sum-exp joins in; whether torch.compile takes part.
    with_d_lse: bool = False
    compiled: bool = False

    def tensors(self, device: str) -> tuple[torch.Tensor, ...]:
        """q, k, v and a gradient of the output, of whole sequences."""
        heads = {"batch": 2, "heads": self.heads, "kv_heads": self.kv_heads}
        return inputs(self.length, self.length, self.head_dim, self.dtype, device=device, **heads)

    def d_lse(self, device: str) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(1)
        dtype = torch.promote_types(self.dtype, torch.float32)
        return torch.randn(2, self.heads, self.length, generator=generator, device=device, dtype=dtype)

    def options(self, device: str) -> dict[str, object]:
        options: dict[str, object] = {"causal": self.causal}
        if self.documents:
            ends = torch.tensor([0, *self.documents], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            assert ends[-1] == 2 * self.length
            options["cu_seqlens"] = ends.to(device)
        return options


def of_all_ranks(cases: Iterable[Case], ranks: int, device: str, folder: Path) -> list[Results]:
    """out, lse, dq, dk, dv of whole sequences for each case; also whether rank 0 got the same bits when it ran again,
    and those under torch.compile."""
    path = folder / "results.pt"
    # One process imports these, in 3 s, and every rank is a fork of it.
    mp.set_forkserver_preload(["torch._dynamo", "triton"])
    mp.start_processes(_rank, (list(cases), ranks, device, path), nprocs=ranks, start_method="forkserver")
    return torch.load(path)


def _rank(rank: int, cases: list[Case], ranks: int, device: str, path: Path) -> None:
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.interpreter import hasten

        hasten()
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{path}.store", rank=rank, world_size=ranks)
    groups = {size: dist.new_group(list(range(size))) for size in sorted({case.ranks for case in cases})}
    results = [_of_case(case, groups[case.ranks], device) for case in cases if rank < case.ranks]
    if rank == 0:
        torch.save(results, path)
    dist.barrier()
    dist.destroy_process_group()


def _of_case(case: Case, group: dist.ProcessGroup, device: str) -> Results:
    from kernels.ring import ring_attention, shard_positions

    options = {**case.options(device), "attention": case.attention, "gather_keys": case.gather_keys}

    def attend(*qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ring_attention(*qkv, group, return_lse=True, **options)

    positions = shard_positions(case.length, dist.get_rank(group), case.ranks).to(device)
    q, k, v, d_out = (x.detach()[:, :, positions] for x in case.tensors(device))
    d_lse = case.d_lse(device)[:, :, positions]

    def run(attend) -> Results:
        qkv = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = attend(*qkv)
        if case.with_d_lse:
            gradients = torch.autograd.grad((out, lse), qkv, (d_out, d_lse))
        else:
            gradients = torch.autograd.grad(out, qkv, d_out)
        return dict(
            zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *gradients), strict=True)
        )

    mine = run(attend)
    whole = {name: _whole(x, case, group, positions) for name, x in mine.items()}
    others = {"repeats": attend}
    if case.compiled:
        others["compiles"] = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for name, other in others.items():
        again = run(other)
        whole[name] = torch.tensor(all(mine[each].equal(again[each]) for each in mine))
    return whole


def _whole(part: torch.Tensor, case: Case, group: dist.ProcessGroup, positions: torch.Tensor) -> torch.Tensor:
    parts, places = ([torch.empty_like(x) for _ in range(case.ranks)] for x in (part, positions))
    dist.all_gather(parts, part.contiguous(), group)
    dist.all_gather(places, positions, group)
    return torch.cat(parts, 2)[:, :, torch.cat(places).argsort()].cpu()
