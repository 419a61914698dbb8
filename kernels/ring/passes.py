"""The two passes over a ring: who computes what, while what travels.

In step s a rank holds the keys and values of the rank s places before it. All sums are in a fixed order, so equal
runs give equal bits. Partial results are summed in float32 (float64 for float64 inputs).
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Block, Layout
from .compute import Compute, Gradients, Mask, Whole
from .group import RingGroup


class Pass(NamedTuple):
    """What both passes are given. cu_seqlens: of packed documents in this rank's part alone."""

    ring: RingGroup
    layout: Layout
    compute: Compute
    scale: float
    cu_seqlens: Tensor | None = None

    def mask(self, block: Block) -> Mask:
        return Mask(block.causal, self.cu_seqlens if block.own_documents else None)


def forward(how: Pass, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out like q, and lse (batch, heads, queries), over the keys of all ranks."""
    ring = how.ring
    held = torch.stack([k, v])  # one message
    for step in range(ring.size):
        last = step == ring.size - 1
        if not last:
            arriving = ring.pass_on(held)
        if step == 0:  # first, since each query sees its own key, and so lse is finite from here on
            out, lse = how.compute.forward(q, k, v, how.mask(how.layout.own_whole()), how.scale)
            out = out.to(_wide(q))
        for block in how.layout.between(ring.source(step)):
            part = how.compute.forward(*_inputs(block, q, *held), how.mask(block), how.scale)
            merge(block.of_queries(out), block.of_queries(lse), *part)
        if not last:
            held = arriving.wait()
    return torch.empty_like(q).copy_(out), lse


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over more keys into `out`, which is wide, and `lse`, which is finite."""
    share = torch.sigmoid(part_lse - lse)  # exp(part_lse) / (exp(lse) + exp(part_lse))
    out.lerp_(part.to(out.dtype), share.to(out.dtype)[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


def backward(how: Pass, whole: Whole, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """dq, dk and dv of this rank's q, k and v. `whole` is over the keys of all ranks.

    The gradient of keys and values travels one step behind them, a sum to which each rank adds, and is home after the
    last. A rank's own keys are computed in two parts, which overlap the first transfer and the last.
    """
    ring = how.ring
    dq = torch.zeros_like(q, dtype=_wide(q))
    dkv = torch.zeros((2, *k.shape), dtype=_wide(k), device=k.device)

    def compute(blocks: list[Block], keys: Tensor, values: Tensor) -> Iterator[tuple[Block, Gradients]]:
        for block in blocks:
            inputs = _inputs(block, q, keys, values)
            yield block, how.compute.backward(whole.of(block), *inputs, how.mask(block), how.scale)

    def add(parts: Iterable[tuple[Block, Gradients]], total: Tensor) -> None:
        for block, part in parts:
            for each, gradient in zip((dq, *total), part, strict=True):
                (block.of_queries if each is dq else block.of_keys)(each).add_(gradient)

    first, rest = how.layout.own()
    arriving = ring.pass_on(torch.stack([k, v]))
    add(compute(first, k, v), dkv)
    returning = None
    for step in range(1, ring.size):
        held = arriving.wait()
        if step < ring.size - 1:
            arriving = ring.pass_on(held)
        parts = list(compute(how.layout.between(ring.source(step)), *held))
        total = torch.zeros_like(dkv) if returning is None else returning.wait()
        add(parts, total)
        returning = ring.pass_on(total)
    add(compute(rest, k, v), dkv)
    if returning is not None:
        dkv += returning.wait()
    dk, dv = dkv.to(k.dtype)
    return dq.to(q.dtype), dk, dv


def _inputs(block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return block.of_queries(q), block.of_keys(k), block.of_keys(v)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype that parts are summed in."""
    return torch.promote_types(x.dtype, torch.float32)
