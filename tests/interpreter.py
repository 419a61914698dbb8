"""Triton's interpreter in half the time, for the tests: what a kernel computes stays the same."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def hasten() -> None:
    """In this process, once."""
    # It checks every integer sum for overflow, which sizes that a test can afford never reach.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = once_a_launch(interpreter._patch_lang)


def once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`patch` puts the interpreter's functions into triton.language, as the module of a function sees it.

    The interpreter does so when it launches a kernel, and to no effect again whenever that calls another function,
    be it tl.sum: up to half of its time. Now it does so when a launch first comes to a module.
    """
    scopes = {}  # by module, of the launch under way

    def restore() -> None:
        while scopes:
            scopes.popitem()[1].restore()  # the last one first

    def patch_once(fn: Callable[..., Any]) -> SimpleNamespace:
        if fn.__module__ not in scopes:
            scopes[fn.__module__] = patch(fn)
        return SimpleNamespace(restore=restore)  # which the launch calls at its end

    return patch_once
