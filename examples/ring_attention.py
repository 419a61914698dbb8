"""Attention over a sequence that two ranks share, beside attention to all of it on each.

    torchrun --standalone --nproc_per_node=2 examples/ring_attention.py

It needs a CUDA device for each rank; with TRITON_INTERPRET=1 and NumPy it runs on a CPU, in seconds. In a checkout
`tilegpt` is the folder beside this file; elsewhere `pip install .` brings it.
"""

import os
import sys

import torch
import torch.distributed as dist
from tilegpt.kernels import get_attention
from tilegpt.kernels.ring import ring_attention, shard_positions
from tilegpt.kernels.versions import kernels_lack

if "LOCAL_RANK" not in os.environ:
    sys.exit("run by torchrun: torchrun --standalone --nproc_per_node=2 examples/ring_attention.py")
if missing := kernels_lack():
    sys.exit(f"our kernels need {missing}")
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

generator = torch.Generator(device).manual_seed(0)  # the same numbers on every rank
shape, dtype = (1, 2, 64 * ranks, 64), torch.float16
q, k, v, d_out = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4))

mine = shard_positions(q.shape[2], rank, ranks).to(device)
part = [x[:, :, mine].requires_grad_() for x in (q, k, v)]
out = ring_attention(*part)
gradients = torch.autograd.grad(out, part, d_out[:, :, mine])

whole = [x.requires_grad_() for x in (q, k, v)]
expected = get_attention("flash")(*whole)
of_whole = torch.autograd.grad(expected, whole, d_out)

pairs = zip((out, *gradients), (expected, *of_whole), strict=True)
difference = max((ours - theirs[:, :, mine]).abs().max().item() for ours, theirs in pairs)
print(f"rank {rank} of {ranks}: {len(mine)} of {q.shape[2]} tokens, largest difference {difference:.4f}")
dist.destroy_process_group()
