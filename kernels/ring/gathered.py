"""The two passes where each rank gathers the keys and values of all ranks at once, instead of a rank's at a time.

Llama 3's context parallelism (arXiv 2407.21783, section 3.3.2): a message and two calls of attention, whatever the
number of ranks, so that a short sequence does not wait for the host. In return no message is hidden, and a rank holds
the keys and values of the whole sequence in each pass, and in the backward their gradients.
"""

import torch
from torch import Tensor

from .blocks import chunks_of
from .compute import Gradients, Whole
from .group import RingGroup
from .passes import Pass, _inputs, _wide

# FLOPs of a ring's step in the causal forward. Over four H200s, with 12 heads of 64, gathering took 0.85 of the
# ring's time, both passes, at 1.0e11 (8,192 tokens a rank), 1.00 at 4.1e11 and 1.17 at 1.6e12 (kernels/log/ring.md).
RING_FROM = 2e11
# Numbers in the keys and values of all ranks. The backward holds 12 bytes of each for a moment: 1.8 GB.
AT_MOST = 1.5e8


def gathers_keys(batch: int, heads: int, length: int, head_dim: int, ranks: int) -> bool:
    """Whether to gather: a ring would wait for the host, with so little to compute in a step, and all keys fit.

    length: the tokens of a rank. heads: of the queries; keys may have fewer.
    """
    tokens = batch * heads * length * head_dim
    return 2 * tokens * length < RING_FROM and 2 * tokens * ranks <= AT_MOST


def forward(how: Pass, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out like q, and lse (batch, heads, queries), over the keys of all ranks."""
    keys, values = gather(how.ring, k, v)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=_wide(q))
    for block in how.layout.with_all():
        part = how.compute.forward(*_inputs(block, q, keys, values), how.mask(block), how.scale)
        for each, its in zip((out, lse), part, strict=True):
            block.of_queries(each).copy_(its)
    return out, lse


def backward(how: Pass, whole: Whole, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """dq, dk and dv of this rank's q, k and v. `whole` is over the keys of all ranks.

    Keys and values are gathered again; to keep them would be to keep the whole sequence's for every layer.
    """
    keys, values = gather(how.ring, k, v)
    dq = torch.empty_like(q)
    total = torch.zeros((2, *keys.shape), dtype=_wide(k), device=k.device)
    for block in how.layout.with_all():
        inputs = _inputs(block, q, keys, values)
        part, *of_keys = how.compute.backward(whole.of(block), *inputs, how.mask(block), how.scale)
        block.of_queries(dq).copy_(part)
        for each, its in zip(total, of_keys, strict=True):
            block.of_keys(each).add_(its)
    dk, dv = scatter(how.ring, total).to(k.dtype)
    return dq, dk, dv


def gather(ring: RingGroup, k: Tensor, v: Tensor) -> Tensor:
    """The keys and values of all ranks in the order of the sequence, (2, batch, kv_heads, length, head_dim)."""
    halves = zip(k.chunk(2, dim=2), v.chunk(2, dim=2), strict=True)
    mine = torch.stack([x for half in halves for x in half]).unflatten(0, (2, 2))
    chunks = ring.gather(mine)
    held = _held(ring.size)
    return torch.cat([chunks[held.index(chunk)] for chunk in range(2 * ring.size)], dim=3)


def scatter(ring: RingGroup, total: Tensor) -> Tensor:
    """This rank's part of what `gather` returns, summed over the ranks."""
    chunks = total.chunk(2 * ring.size, dim=3)
    mine = ring.reduce_scatter(torch.stack([chunks[chunk] for chunk in _held(ring.size)]))
    return torch.cat([*mine], dim=3)


def _held(ranks: int) -> list[int]:
    """The chunks in the order in which the ranks hold them."""
    return [chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks)]
