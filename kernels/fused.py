"""What `linear_cross_entropy`, `linear_add_norm`, `linear_gelu`, `embedding` and `dropout` have in common.

Their gradients are those of backward() and torch.autograd.grad; torch.func's grad and jvp end in an error.
"""

import functools
import importlib
import importlib.util
import os
import sys
from types import ModuleType

import torch

from .registry import AttentionError

# What a user calls, by the module of its Triton kernels.
_LAYERS = {
    "add_norm": "linear_add_norm",
    "bias_gelu": "linear_gelu",
    "embedding_gradient": "embedding",
    "row_dropout": "dropout",
    "softmax_gradient": "linear_cross_entropy",
}


class FusedError(AttentionError):
    """A fused layer that was asked for cannot be had; the message is one line with the remedy."""


def check_fused(device: torch.device, option: str) -> None:
    """Raise FusedError where our Triton kernels cannot run. option: the setting that asked, as "model.loss"."""
    if (lacking := _lacking(device.type)) is not None:
        raise FusedError(f"{option}=fused needs {lacking}; use {option}=torch")


def _lacking(device_type: str) -> str | None:
    """What our Triton kernels would need, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton, which is not installed"
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"a CUDA device, not {device_type} (TRITON_INTERPRET=1 interprets it, slowly)"
    return None


@functools.cache
def kernels_of(module: str, device_type: str) -> ModuleType:
    """A module of Triton kernels for a fused layer: imported when it is first needed, since triton may be absent.

    Raises FusedError where they cannot run.
    """
    if (lacking := _lacking(device_type)) is not None:
        raise FusedError(f"{_LAYERS[module]} needs {lacking}")
    return importlib.import_module(f".{module}", __package__)


def check_operands(product: torch.Tensor, x: torch.Tensor | None = None, **vectors: torch.Tensor) -> None:
    """Raise ValueError unless the kernels can read a linear layer's product, x like it, and vectors as wide."""
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
    """Raise ValueError unless the kernels can read a tensor."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} is {tensor.dtype}; fused layers take float32, bfloat16 and float16")


def no_second_derivative() -> FusedError:
    """The error of differentiating a gradient of a block's layer."""
    return FusedError("model.block=fused has no second derivative; use model.block=torch")


def make_known_to_inductor(operator: torch._ops.OpOverload) -> None:
    """To be called from an operator's fake, if the operator comes late in a graph.

    torch.compile of PyTorch before 2.13 puts into words an operator that it meets for the first time, its arguments,
    theirs, and so on. Behind our layers, each of which reads two results of the one before, that is 2^24 of them for
    GPT-2 small: it never ends.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    before = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    if before and lowering is not None and operator not in lowering.lowerings:
        # As that version would, without a word.
        lowering.make_fallback(operator, layout_constraint=lowering.constrain_to_fx_strides)
