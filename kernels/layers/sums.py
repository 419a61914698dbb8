"""Gradients of weights that a backward adds to `weight.grad` itself: autograd gets none, and adds nothing.

Under autocast, autograd computes a weight's gradient in 16 bits, casts it, and adds it to what earlier micro-steps
have left: 20 bytes of traffic an element. A matrix product that adds to a float32 matrix moves 8, and rounds nothing
to 16 bits. On an H100 this saves 3 of 127 ms in a step of GPT-2 small with four micro-steps (kernels/log/step.md); on
several GPUs, whose last micro-step goes without it, the gain was not measured separately.

`training.cuda_graphs` asks for it, a weight at a time, and it applies to forwards in `summing()`. weight.grad must
exist, and what the weight multiplies must need a gradient, or there is no backward. Hooks of the weight do not see
its gradient, so a DistributedDataParallel, whose hooks wait for one, has its forward outside of `summing()`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_summing = False


@contextmanager
def summing() -> Iterator[None]:
    """The backwards of forwards in it add to weight.grad. torch.compile sees the `with` if that is compiled too."""
    global _summing
    before, _summing = _summing, True
    try:
        yield
    finally:
        _summing = before


def sum_in_place(weight: Tensor) -> None:
    """The gradients of `embedding` and `linear_cross_entropy`, which may share a weight, are added to weight.grad."""
    weight.summed = True  # type: ignore[attr-defined]
    torch._dynamo.mark_static_address(weight.grad)  # or a replayed graph would add to a copy


def sum_in_product(weight: Tensor, dtype: torch.dtype) -> None:
    """Likewise for `linear`, which multiplies by a copy in `dtype` (autocast's) that `next_sums` updates."""
    sum_in_place(weight)
    weight.low = weight.detach().to(dtype)  # type: ignore[attr-defined]
    torch._dynamo.mark_static_address(weight.low)  # type: ignore[attr-defined]


@torch.no_grad()
def next_sums(weights: Iterable[Tensor], cast: bool = True) -> None:
    """After an optimizer's step: cast the weights that `linear` uses, once for all micro-steps that follow.

    cast: False if the step has done so (adamw.py).

    In its first two steps DistributedDataParallel moves gradients into buckets, which are other tensors. torch
    compares addresses before a replay, and records again; what it compiles from then on needs the mark.
    """
    summed = [weight for weight in weights if hasattr(weight, "summed")]
    for weight in summed:
        torch._dynamo.mark_static_address(weight.grad)
    stale = [weight for weight in summed if cast and hasattr(weight, "low")]
    if stale:
        torch._foreach_copy_([weight.low for weight in stale], stale)


def total_of(weight: Tensor) -> Tensor | None:
    """What a backward is to add the weight's gradient to, without autograd; None: nothing."""
    summed = _summing and hasattr(weight, "summed") and weight.requires_grad
    return weight.grad if summed and torch.is_grad_enabled() else None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with total in float32."""
    if a.device.type == "cuda" and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
