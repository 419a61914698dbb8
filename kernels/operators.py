"""How our functions become PyTorch operators, which torch.compile takes whole.

They live in a namespace named after this package, so that a checkout's `kernels` and an installed `tilegpt.kernels`
can share a process. `torch.library.custom_op` does the same with more Python in each call: LOG.md has its cost.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

NAMESPACE = __package__.replace(".", "_")
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def operator(
    function: Callable[..., Any],
    like: Callable[..., Any],
    differentiable: Callable[..., Any] | None = None,
    no_gradient: Callable[[], Exception] | None = None,
) -> torch._ops.OpOverload:
    """The operator of a function that changes none of its inputs, named and typed as the function is.

    Args:
        like: the function's uninitialised results, for a compiler that wants their shapes and strides.
        differentiable: the operator to autograd, an autograd.Function's `apply` around `below_autograd`; None where
            nothing has a gradient.
        no_gradient: instead of it, of an operator that is itself a gradient: the error of a second derivative.
    """
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", like, lib=LIBRARY)
    made = getattr(getattr(torch.ops, NAMESPACE), name).default

    def to_autograd(*inputs: object) -> Any:
        # torch.compile has the gradient in its own graph and calls the operator without: an autograd.Function and a
        # second way through PyTorch's dispatcher are 12 us there.
        wanted = torch.is_grad_enabled() or forward_ad._current_level >= 0
        return differentiable(*inputs) if wanted else below_autograd(made, *inputs)

    if no_gradient is not None:
        differentiable = _once(made, no_gradient)
    if differentiable is not None:
        LIBRARY.impl(name, to_autograd, "Autograd")
    return made


def below_autograd(of: torch._ops.OpOverload, *inputs: object) -> Any:
    """The results of an operator, without its gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        return of(*inputs)


def has_tangent(*tensors: torch.Tensor) -> bool:
    """Whether forward-mode differentiation goes through one of the tensors.

    An autograd.Function without a jvp refuses that; of `torch.library.custom_op` the derivative would be 0.
    """
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def _once(made: torch._ops.OpOverload, no_gradient: Callable[[], Exception]) -> Callable[..., Any]:
    """The operator to autograd, with an error where its gradient would be."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            return below_autograd(made, *inputs)

        @staticmethod
        def backward(ctx, *gradients):
            raise no_gradient()

    return Once.apply
