"""Attention of DTensors on two gloo ranks, in the interpreter. About 15 s."""

from pathlib import Path

import pytest
import torch
from torch import distributed

import kernels
from kernels.flash.api import flash_attention
from tests.kernels.accuracy import inputs

if torch.cuda.is_available():
    pytest.skip("the interpreter's checks", allow_module_level=True)


def rank_of(rank: int, folder: Path) -> None:
    """What a rank checks: results and gradients of sharded inputs, and that they stayed sharded; and how often."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    kernels.register_sharding()
    *tensors, d_out = inputs(40, 40, 16, torch.float32, batch=2, heads=4, kv_heads=2)
    per_head = torch.linspace(0.1, 0.5, 4)
    offsets, lengths = torch.tensor([0, 30, 45, 80]).int(), torch.tensor([40, 25]).int()
    blocks = torch.ones(2, 1, 1, 1, dtype=torch.bool)
    features = [
        ({}, {}),
        ({"alibi_slopes": per_head, "kv_lengths": lengths, "causal": False}, {"alibi_slopes": 0}),
        ({"sinks": per_head, "softcap": 20.0, "block_mask": blocks}, {"sinks": 0}),
        ({"cu_seqlens": offsets, "window": (9, 0), "precise_delta": True}, {}),
        ({"cu_seqlens": offsets, "cu_seqlens_k": torch.tensor([0, 9, 50, 80]).int()}, {}),
        ({"dropout_p": 0.5, "dropout_seed": torch.tensor(3)}, {}),
    ]
    checked = 0
    for options, of_heads in features:
        if rank == 0:
            want = flash_attention(*tensors, return_lse=True, **options)
            want += torch.autograd.grad(want[0], tensors, d_out)
        for place in (Shard(0), Shard(1)):
            sharded = [distribute_tensor(x.detach(), mesh, [place]).requires_grad_() for x in tensors]
            asked = {
                name: distribute_tensor(
                    x, mesh, [Shard(of_heads[name]) if place.dim == 1 and name in of_heads else Replicate()]
                )
                if isinstance(x, torch.Tensor)
                else x
                for name, x in options.items()
            }
            d_sharded = distribute_tensor(d_out, mesh, [place])
            with CommDebugMode() as communication:
                got = flash_attention(*sharded, return_lse=True, **asked)
                got += torch.autograd.grad(got[0], sharded, d_sharded)
            if "dropout_p" not in options:
                assert [x.placements for x in got] == [(place,)] * 5, (place, list(options))
                assert communication.get_total_counts() == 0, (place, list(options))
            checked += 1
            whole = [x.full_tensor() for x in got]
            if rank == 0:
                for mine, theirs in zip(whole, want, strict=True):
                    torch.testing.assert_close(mine, theirs, msg=f"{place} {list(options)}")
    # A group of query heads on two ranks: gathered, and right.
    *tensors, _ = inputs(20, 20, 16, torch.float32, heads=6, kv_heads=3)
    got = flash_attention(*(distribute_tensor(x.detach(), mesh, [Shard(1)]) for x in tensors))
    torch.testing.assert_close(got.full_tensor(), flash_attention(*tensors).detach())
    distributed.destroy_process_group()
    (folder / f"checked_{rank}").write_text(str(checked))


@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_available(), reason="torch without torch.distributed")
def test_two_ranks_compute_what_one_does_where_the_shards_are(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank_of, args=(tmp_path,), nprocs=2)  # raises what a rank raises
    assert [(tmp_path / f"checked_{rank}").read_text() for rank in range(2)] == ["12", "12"]
