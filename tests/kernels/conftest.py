"""Triton's interpreter, a quarter faster."""

import dataclasses
import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    # It checks every integer sum for overflow, which sizes that a test can afford never reach.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
