"""Shared by `linear_cross_entropy`, `linear_add_norm`, `linear_gelu`, `embedding` and `dropout`.

They support backward() and torch.autograd.grad; torch.func's grad and jvp raise an error.
"""

import functools
import importlib
import os
import sys
from types import ModuleType

import torch

from .registry import AttentionError
from .versions import kernels_lack

# Module of Triton kernels -> the function that a user calls.
_LAYERS = {
    "add_norm": "linear_add_norm",
    "bias_gelu": "linear_gelu",
    "embedding_gradient": "embedding",
    "row_dropout": "dropout",
    "softmax_gradient": "linear_cross_entropy",
}


class FusedError(AttentionError):
    """A requested fused layer cannot run; the message is one line with the remedy."""


def check_fused(device: torch.device, option: str) -> None:
    """Raise FusedError if our Triton kernels cannot run. option: the setting that asks, as "model.loss"."""
    if (lacking := _lacking(device.type)) is not None:
        raise FusedError(f"{option}=fused needs {lacking}; use {option}=torch")


def _lacking(device_type: str) -> str | None:
    """What our Triton kernels need and lack here, or None."""
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"a CUDA device, not {device_type} (TRITON_INTERPRET=1 interprets it, slowly)"
    return kernels_lack()


@functools.cache
def kernels_of(module: str, device_type: str) -> ModuleType:
    """A module of Triton kernels for a fused layer, imported on first use, since triton may be absent.

    Raises FusedError if the kernels cannot run.
    """
    if (lacking := _lacking(device_type)) is not None:
        raise FusedError(f"{_LAYERS[module]} needs {lacking}")
    return importlib.import_module(f".{module}", __package__)


def check_operands(product: torch.Tensor, x: torch.Tensor | None = None, **vectors: torch.Tensor) -> None:
    """Raise ValueError unless product, x (same shape) and vectors (width,) match in shape and device, with dtypes
    that the kernels take."""
    given = {"the linear layer's output": product} | ({} if x is None else {"x": x}) | vectors
    for name, tensor in given.items():
        wanted = product.shape[-1:] if name in vectors else product.shape
        if tensor is None or tensor.shape != wanted:
            got = None if tensor is None else tuple(tensor.shape)
            raise ValueError(f"{name} is {got}; it must be {tuple(wanted)}")
        if tensor.device != product.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but the linear layer's output on {product.device}"
            )
        check_dtype(name, tensor)


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the kernels take the tensor's dtype."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} is {tensor.dtype}; fused layers take float32, bfloat16 and float16")


def no_second_derivative() -> FusedError:
    """The error for differentiating the gradient of a block's fused layer."""
    return FusedError("model.block=fused has no second derivative; use model.block=torch")


def make_known_to_inductor(operator: torch._ops.OpOverload) -> None:
    """Register a lowering for the operator. To be called from the fake of an operator that comes late in a graph.

    Before PyTorch 2.13, torch.compile formats an operator that it sees for the first time as text: its arguments,
    their arguments, and so on. After our layers, each of which reads two results of the previous one, that is 2^24 of
    them for GPT-2 small, and does not end.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    before = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    if before and lowering is not None and operator not in lowering.lowerings:
        # As that version would do it itself, but without the message.
        lowering.make_fallback(operator, layout_constraint=lowering.constrain_to_fx_strides)
