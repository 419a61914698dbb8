"""Gradients of weights that a backward adds to `weight.grad` itself: autograd gets none, and adds nothing.

Under autocast, autograd computes a weight's gradient in 16 bits, casts it, and adds it to what earlier micro-steps
have left: 20 bytes of traffic an element. A matrix product that adds to a float32 matrix moves 8, and rounds nothing
to 16 bits. On an H100 what is here takes 3 ms of 127 from a step of GPT-2 small in four micro-steps
(kernels/log/step.md).

`training.cuda_graphs` asks for it. weight.grad must be there, and stay in its place. Hooks of the weight do not see
its gradient, so it is not for weights where DistributedDataParallel or FSDP wait for one.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def sum_in_product(weight: Tensor, dtype: torch.dtype) -> None:
    """From now on, `linear`'s backward adds to weight.grad. It multiplies by a copy in `dtype`, autocast's, which
    `cast_again` brings up to date."""
    low = weight.detach().to(dtype)
    for tensor in (low, weight.grad):  # or a replayed graph would read and add to copies
        torch._dynamo.mark_static_address(tensor)
    weight.low = low  # type: ignore[attr-defined]


def sum_in_place(weight: Tensor) -> None:
    """Likewise for `embedding` and `linear_cross_entropy`, which may share a weight: both add to weight.grad."""
    torch._dynamo.mark_static_address(weight.grad)
    weight.summed = True  # type: ignore[attr-defined]


@torch.no_grad()
def cast_again(weights: Iterable[Tensor]) -> None:
    """After an optimizer's step: cast the weights that `linear` uses, once for all micro-steps that follow."""
    cast = [weight for weight in weights if hasattr(weight, "low")]
    if cast:
        torch._foreach_copy_([weight.low for weight in cast], cast)


def total_of(weight: Tensor) -> Tensor | None:
    """What a backward is to add the weight's gradient to, without autograd; None: nothing."""
    return weight.grad if hasattr(weight, "summed") and torch.is_grad_enabled() else None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with total in float32."""
    if a.device.type == "cuda" and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
