"""The model's layers other than attention as fused functions, with their kernels.

    linear                a linear layer that can sum its weight's gradient over micro-steps
    linear_gelu           a linear layer with its GELU
    mlp                   that and the linear layer after it, on Hopper with GELU in the products
    linear_add_norm       a linear layer with the residual addition and LayerNorm that follow it
    linear_cross_entropy  the language model's head and its loss, without the full logits
    embedding             the token embedding, with a bitwise repeatable gradient
    dropout               from a seed

    from kernels.layers.linear_gelu import linear_gelu

They support backward() and torch.autograd.grad; torch.func's grad and jvp raise an error, except for `linear`.
sums.py takes weights' gradients past autograd; adamw.py has the optimizer's step. The files import triton; this
module does not, so that it can say that triton is missing.
"""

import os

import torch

from ..registry import AttentionError
from ..versions import INTERPRET, cuda_not, kernels_lack


class FusedError(AttentionError):
    """A requested fused layer cannot run; the message is one line with the remedy."""


def check_fused(device: torch.device, option: str) -> None:
    """Raise FusedError if our Triton kernels cannot run. option: the setting that asks, as "model.loss"."""
    if (missing := lacking(device.type)) is not None:
        raise FusedError(f"{option}=fused needs {missing}; use {option}=torch")


def lacking(device_type: str) -> str | None:
    """What our Triton kernels need and lack here, or None."""
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return cuda_not(device_type, INTERPRET)
    return kernels_lack()
