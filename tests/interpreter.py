"""Triton's interpreter in half the time, for the tests: what a kernel computes stays the same."""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triton.language import core, semantic
from triton.runtime import interpreter


def hasten() -> None:
    """In this process, once."""
    # It checks every integer sum for overflow, which sizes that a test can afford never reach.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = once_a_launch(interpreter._patch_lang)
    # What is left is types: every result's is described anew, and every operation's compared.
    core.block_type.__init__ = once_a_shape(core.block_type.__init__)
    core.tensor.__init__ = of_known_shape
    core.dtype.__eq__ = same_first(core.dtype.__eq__)
    interpreter._get_np_dtype = once_a_type(interpreter._get_np_dtype)
    semantic.TritonSemantic.broadcast_impl_value = if_shapes_differ(
        semantic.TritonSemantic.broadcast_impl_value
    )


def once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make `patch` run once per module and launch; it puts the interpreter's functions into triton.language.

    The interpreter patches when it launches a kernel and, to no effect, again at every call of another function, even
    of tl.sum, which takes up to half of its time. Here it patches when a launch first enters a module.
    """
    scopes = {}  # module -> patch scope, for the current launch

    def restore() -> None:
        while scopes:
            scopes.popitem()[1].restore()  # the last one first

    def patch_once(fn: Callable[..., Any]) -> SimpleNamespace:
        if fn.__module__ not in scopes:
            scopes[fn.__module__] = patch(fn)
        return SimpleNamespace(restore=restore)  # which the launch calls at its end

    return patch_once


def once_a_shape(init: Callable[..., None]) -> Callable[..., None]:
    """Make the constructor of block types check and format each shape only once."""
    known = {}

    def init_once(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
        key = (element_ty.name, *map(core._unwrap_if_constexpr, shape))
        if key not in known:
            init(self, element_ty, shape)
            known[key] = (self.shape, self.numel, self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return init_once


@functools.cache
def shape_and_numel(*sizes: int) -> tuple[core.tuple, core.constexpr]:
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def of_known_shape(self: core.tensor, handle: Any, type: core.dtype) -> None:
    """Triton's `tensor.__init__`, with the objects of its shape shared by all tensors of that shape."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shape_and_numel(*(type.shape.values if type.is_block() else ()))


def same_first(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def once_a_type(numpys: Callable[[core.dtype], Any]) -> Callable[[core.dtype], Any]:
    known = {}

    def numpys_once(of: core.dtype) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = numpys(of)
        return known[name]

    return numpys_once


def if_shapes_differ(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_if(self: semantic.TritonSemantic, lhs: core.tensor, rhs: core.tensor) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return broadcast_if
