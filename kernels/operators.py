"""How our functions become PyTorch operators, which torch.compile takes whole.

They live in a namespace named after this package, so that a checkout's `kernels` and an installed `tilegpt.kernels`
can share a process. `torch.library.custom_op` does the same with more Python in each call: LOG.md has its cost.
"""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = __package__.replace(".", "_")
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def operator(
    function: Callable[..., Any],
    like: Callable[..., Any],
    differentiable: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """The operator of a function that changes none of its inputs, named and typed as the function is.

    Args:
        like: the function's uninitialised results, for a compiler that wants their shapes and strides.
        differentiable: the operator to autograd, an autograd.Function's `apply` around `below_autograd`; None where
            nothing has a gradient.
    """
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", like, lib=LIBRARY)
    if differentiable is not None:
        LIBRARY.impl(name, differentiable, "Autograd")
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def below_autograd(of: torch._ops.OpOverload, *inputs: object) -> Any:
    """The results of an operator, without its gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        return of(*inputs)
