"""The model's layers other than attention as fused functions, with their kernels.

    linear                a linear layer that can sum its weight's gradient over micro-steps
    linear_gelu           a linear layer with its GELU
    mlp                   that and the linear layer after it, on Hopper with GELU in the products
    linear_add_norm       a linear layer with the residual addition and LayerNorm that follow it
    linear_cross_entropy  the language model's head and its loss, without the full logits; two of its products in 8
                          bits if asked
    embedding             the token embedding, with a bitwise repeatable gradient
    dropout               from a seed

    from kernels.layers.linear_gelu import linear_gelu

They support backward() and torch.autograd.grad; torch.func's grad and jvp raise an error. What takes a weight's
gradient past autograd is in sums.py, and the optimizer's step in adamw.py. The files import triton; this module does
not, so that it can say without triton that it is missing.
"""

import os

import torch

from ..registry import AttentionError
from ..versions import kernels_lack


class FusedError(AttentionError):
    """A requested fused layer cannot run; the message is one line with the remedy."""


def check_fused(device: torch.device, option: str, layers: str = "fused") -> None:
    """Raise FusedError if our Triton kernels cannot run. option: the setting that asks, as "model.loss"."""
    if (missing := lacking(device.type)) is not None:
        raise FusedError(f"{option}={layers} needs {missing}; use {option}=torch")


def check_fp8(device: torch.device, dtype: torch.dtype, *sizes: int) -> None:
    """Raise FusedError if the head has no products in 8 bits here. sizes: the width, the padded vocabulary."""
    missing = None
    if dtype is torch.float32:
        missing = "activations in 16 bits: trainer.precision=bf16 or fp16, or autocast"
    elif odd := [size for size in sizes if size % 16]:  # of cuBLAS
        missing = f"a width and a padded vocabulary that are multiples of 16, not {odd[0]}"
    elif device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 9)):
        missing = f"an NVIDIA GPU of Hopper or later, not {torch.cuda.get_device_name(device)}"
    if missing is not None:
        raise FusedError(f"model.loss=fused_fp8 needs {missing}; or use model.loss=fused")


def lacking(device_type: str) -> str | None:
    """What our Triton kernels need and lack here, or None."""
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"a CUDA device, not {device_type} (TRITON_INTERPRET=1 interprets it, slowly)"
    return kernels_lack()
