"""Triton's interpreter in a third of the time, for the tests: what a kernel computes stays the same."""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter


def hasten() -> None:
    """In this process, once."""
    # It checks every integer sum for overflow, which sizes that a test can afford never reach.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_attr = patch_directly
    interpreter._patch_lang = once_a_launch(interpreter._patch_lang)
    # What is left is types: every result's is described anew, and every operation's compared.
    core.block_type.__init__ = once_a_shape(core.block_type.__init__)
    core.tensor.__init__ = of_known_shape
    core.dtype.__eq__ = same_first(core.dtype.__eq__)
    core._unwrap_if_constexpr = unless_plain(core._unwrap_if_constexpr)
    interpreter.TensorHandle.__init__ = of_right_size
    interpreter._get_np_dtype = once_a_type(interpreter._get_np_dtype)
    language = semantic.TritonSemantic
    language.broadcast_impl_value = if_shapes_differ(language.broadcast_impl_value)
    language.binary_op_type_checking_impl = if_types_differ(language.binary_op_type_checking_impl)


def patch_directly(
    obj: object, name: str, member: Callable[..., Any], builder: Any, scope: interpreter._LangPatchScope
) -> None:
    """Triton's `_patch_attr`, without the wrapper that asks whether it was called from a kernel."""
    function, meaning = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = meaning
        return function(*args, **named)

    scope.set_attr(obj, name, call)


def once_a_launch(
    patch: Callable[[FunctionType], interpreter._LangPatchScope],
) -> Callable[[FunctionType], SimpleNamespace]:
    """Make `patch` run once in all, and what it found be put in place once a launch.

    The interpreter patches triton.language when it launches a kernel and, to no effect, again at every call of
    another function, even of tl.sum, which takes up to half of its time. What it patches depends on the names by
    which a module has the language, and on what is patched already.
    """
    languages = {}  # module -> those of (tl, tl.core) that it names
    scopes = {}  # those -> patch scope, for the current launch
    found = {}  # those of this launch, in order -> what the last one of them patched

    def restore() -> None:
        while scopes:
            scopes.popitem()[1].restore()  # the last one first

    def patch_once(fn: FunctionType) -> SimpleNamespace:
        module = fn.__module__
        if module not in languages:
            named = fn.__globals__.values()
            languages[module] = tuple(each.__name__ for each in (tl, core) if any(x is each for x in named))
        language = languages[module]
        if language not in scopes:
            order = (*scopes, language)
            if order in found:
                scopes[language] = scope = interpreter._LangPatchScope()
                for change in found[order]:
                    scope.set_attr(*change)
            else:
                scopes[language] = scope = patch(fn)
                found[order] = [(obj, name, getattr(obj, name)) for obj, name, _ in scope._changes]
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


def of_right_size(self: interpreter.TensorHandle, data: Any, dtype: core.dtype, attr: Any = None) -> None:
    """Triton's `TensorHandle.__init__`, which checks the size of its own results."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


def same_first(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def unless_plain(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = {int, float, bool, str, slice, type(None), core.dtype, core.tensor}

    def unwrap_unless_plain(o: Any) -> Any:
        kind = type(o)
        if kind is core.constexpr:
            return o.value
        return o if kind in plain else unwrap(o)

    return unwrap_unless_plain


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


def if_types_differ(check: Callable[..., Any]) -> Callable[..., Any]:
    """Two numbers of one type need no cast, unless they are divided."""

    def check_if(
        self: semantic.TritonSemantic,
        lhs: Any,
        rhs: Any,
        lhs_may_point: bool = False,
        rhs_may_point: bool = False,
        arithmetic: bool = True,
        divides: bool = False,
    ) -> Any:
        both = type(lhs) is type(rhs) is core.tensor
        if both and lhs.dtype is rhs.dtype and not (divides or lhs.dtype.is_ptr()):
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, lhs_may_point, rhs_may_point, arithmetic, divides)

    return check_if
