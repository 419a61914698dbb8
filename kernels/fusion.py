"""torch.compile, told to fuse multiplications with additions as our own kernels do (`launch.FUSION`)."""

import os
from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """torch.compile(function, **options); a user's own TRITON_DEFAULT_FP_FUSION is kept."""
    # Unset, fusion is on up to Triton 3.9, which warns, and off from 3.10. TorchInductor (2.13) asks for it in its
    # own kernels, but not in its templates, such as FlexAttention's. Read when something is first compiled.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    return torch.compile(function, **options)
