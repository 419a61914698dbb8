"""Registering our functions as PyTorch operators, which torch.compile treats as opaque.

The namespace is named after this package, so that a checkout's `kernels` and an installed `tilegpt.kernels` can share
a process. `torch.library.custom_op` does the same, with more Python in each call: LOG.md has its cost.
"""

import inspect
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
    rest: tuple[type, ...] = (),
    flops: Callable[..., int] | None = None,
) -> torch._ops.OpOverload:
    """Register a function that mutates none of its inputs as an operator, with the function's name and signature.

    Args:
        like: the fake implementation: returns uninitialised results of the right shapes and strides.
        differentiable: the Autograd implementation, an autograd.Function's `apply` around `below_autograd`; None if
            there is no gradient.
        no_gradient: in place of `differentiable`, for an operator that is itself a gradient: makes the error that a
            second derivative raises.
        rest: NamedTuples whose fields the functions take as their *arguments.
        flops: what torch.utils.flop_counter counts for it, from the shapes of its arguments; None: nothing.
    """
    name = function.__name__
    if rest:
        function.__signature__ = _with_fields(function, rest)  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(function, mutates_args=())
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", like, lib=LIBRARY)
    packet = getattr(getattr(torch.ops, NAMESPACE), name)
    made = packet.default
    if flops is not None:
        from torch.utils.flop_counter import register_flop_formula  # imports triton

        register_flop_formula(packet)(flops)
    if no_gradient is not None:
        differentiable = _once(made, no_gradient)
    if differentiable is None:
        return made

    def to_autograd(*inputs: object) -> Any:
        # Compiled graphs contain the backward already and call the operator with gradients off; skipping the
        # autograd.Function and a second pass through the dispatcher saves 12 us there.
        wanted = torch.is_grad_enabled() or forward_ad._current_level >= 0
        return differentiable(*inputs) if wanted else below_autograd(made, *inputs)

    LIBRARY.impl(name, to_autograd, "Autograd")
    return made


def below_autograd(of: Callable[..., Any], *inputs: object) -> Any:
    """Call an operator below the Autograd dispatch key, so without recording a gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        return of(*inputs)


def in_backward(of: Callable[..., Any], *inputs: object) -> Any:
    """Call a gradient's operator from an autograd.Function's backward: below Autograd, unless something must see it:
    create_graph, since the operator's own backward raises the error, or torch.compile (compiled autograd)."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return of(*inputs)
    return below_autograd(of, *inputs)


def has_tangent(*tensors: torch.Tensor) -> bool:
    """Whether one of the tensors carries a forward-mode tangent.

    An autograd.Function without jvp raises an error for it; `torch.library.custom_op` would silently give 0.
    """
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def _with_fields(function: Callable[..., Any], rest: tuple[type, ...]) -> inspect.Signature:
    """The function's signature, with the fields of `rest` in place of its *arguments."""
    signature = inspect.signature(function)
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_POSITIONAL]
    fields = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
        for fields in rest
        for name, annotation in fields.__annotations__.items()
    ]
    return signature.replace(parameters=[*named, *fields])


def _once(made: torch._ops.OpOverload, no_gradient: Callable[[], Exception]) -> Callable[..., Any]:
    """An Autograd implementation of the operator whose backward raises the error."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            return below_autograd(made, *inputs)

        @staticmethod
        def backward(ctx, *gradients):
            raise no_gradient()

    return Once.apply
