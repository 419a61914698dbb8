"""Shards the model by FSDP2; what each rank keeps are its "parts". When they are gathered, and how they are updated.

Zhao et al. 2023, arXiv 2304.11277. shard=full is ZeRO's third stage (Rajbhandari et al. 2020, arXiv 1910.02054):
parameters are gathered a few blocks at a time, for the forward and again for the backward. shard=optimizer is the
second: the same parts and the same update, but a step gathers the parameters once and reduces the gradients once, as
many bytes as data parallel sends.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from model.gpt import GPT

from .config import GradientDtype, ParallelConfig, Shard

# Bounds of a group of blocks gathered at once. At least these FLOPs in a micro-step: FSDP costs a host 5 ms for a
# group, besides what each block costs (four H200s, torch 2.13; kernels/log/step.md), and an H200 computes them in 12.
# At most these parameters: they are whole while the next ones are, and at both ends nothing hides their exchange.
ENOUGH_FLOPS, MOST_PARAMETERS = 6e12, 64_000_000


def blocks_at_once(model: GPT, tokens: int) -> int:
    """How many blocks of `model` to gather at once, in groups of similar size. tokens: of a micro-step on a rank.

    Measured, ms a step on four H200s, with 1, 2 and 4: GPT-2 small with 32 sequences of 1024 (1.7e12 FLOPs a block)
    108, 81 and 62; XL with 16 (3.3e12) 676 and 691 with 1 and 4. XL gets 2, which was not measured: on eight H200s,
    whose hosts were slower, it took 477 with 1 for 330 of computing.
    """
    config, blocks = model.config, len(model.h)
    parameters = sum(each.numel() for each in model.h.parameters()) // blocks
    flops = (6 * parameters + 12 * config.n_embd * config.seq_len) * tokens  # as GPT.flops_per_token
    return group_size(blocks, parameters, flops)


def group_size(blocks: int, parameters: int, flops: float) -> int:
    """How many of `blocks` to gather at once. parameters: of a block. flops: of one in a micro-step on a rank."""
    wanted = max(1, min(math.ceil(ENOUGH_FLOPS / flops), MOST_PARAMETERS // parameters))
    return math.ceil(blocks / math.ceil(blocks / wanted))


def shard(model: GPT, mesh: DeviceMesh, config: ParallelConfig, dtype: torch.dtype, at_once: int) -> None:
    """Split every parameter of `model` over the mesh, in place; `at_once` blocks are gathered at once, in `dtype`.

    A model on the CPU goes to the mesh's devices as it is gathered, so that no device ever holds all of a large one.
    A forward has to run every block of a group: the last one to run frees them all (torch 2.11).

    Embeddings and the last norm are gathered in float32, and inputs are not cast: the residual stream is what it is
    on one GPU. Within blocks, autocast would round the matrices all the same, but not biases and gains.
    """
    reduced = torch.bfloat16 if config.gradient_dtype is GradientDtype.bf16 else torch.float32
    in_blocks = MixedPrecisionPolicy(dtype, reduced, cast_forward_inputs=False)
    at_ends = MixedPrecisionPolicy(torch.float32, reduced, cast_forward_inputs=False)
    blocks: list[nn.Module] = list(model.h)
    for first in range(0, len(blocks), at_once):
        group = blocks[first : first + at_once]
        fully_shard(group, mesh=mesh, mp_policy=in_blocks, reshard_after_forward=config.shard is Shard.full)
    fully_shard(model, mesh=mesh, mp_policy=at_ends, reshard_after_forward=False)
    for method in ("hidden", "logits"):  # as `generate` calls them
        register_fsdp_forward_method(model, method)


def begin_micro_step(model: GPT, how: Shard, last: bool) -> None:
    """Say whether this micro-batch is the last of its step, before its forward.

    With shard=full every micro-batch reduces its gradients: kept whole until the last, they would need as much memory
    as whole parameters.
    """
    if how is Shard.optimizer:
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


@torch.no_grad()
def update_shards(model: GPT, optimizer: torch.optim.Optimizer, clip: float) -> Tensor:
    """`optimizer.update` for a sharded model: each rank updates its parts, by its parts of the gradients.

    Returns the norms of the whole gradients before clipping: float32 (parameters,), the same on all ranks.
    """
    parts = [parameter.grad.to_local() for parameter in model.parameters()]
    squares = torch.stack(torch._foreach_norm(parts)).float().square()
    torch.distributed.all_reduce(squares, group=next(model.parameters()).device_mesh.get_group())
    norms = squares.sqrt()
    torch._foreach_mul_(parts, (clip / (norms.norm() + 1e-6)).clamp(max=1.0))  # as clip_grads_with_norm_
    optimizer.step()
    optimizer.zero_grad()
    return norms


def put(whole: Tensor, into: Tensor) -> None:
    """Copy a tensor that every rank has whole into one that may be in parts."""
    whole = whole.to(into.device)
    if isinstance(into, DTensor):
        whole = distribute_tensor(whole, into.device_mesh, into.placements, src_data_rank=None)
    into.copy_(whole)
