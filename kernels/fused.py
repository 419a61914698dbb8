"""What the fused layers (`linear_cross_entropy`, `linear_add_norm`, `linear_gelu`) have in common."""

import importlib.util
import os
import sys

import torch

from .registry import AttentionError


class FusedError(AttentionError):
    """A fused layer that was asked for cannot be had; the message is one line with the remedy."""


def check_fused(device: torch.device, option: str) -> None:
    """Raise FusedError where our Triton kernels cannot run. option: the setting that asked, as "model.loss"."""
    if importlib.util.find_spec("triton") is None:
        raise FusedError(f"{option}=fused needs triton, which is not installed; use {option}=torch")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise FusedError(
            f"{option}=fused needs a CUDA device, not {device.type}; use {option}=torch, or TRITON_INTERPRET=1"
        )


def check_vectors(x: torch.Tensor, vectors: tuple[torch.Tensor, ...]) -> None:
    """Raise ValueError unless the kernels can read x and `vectors`, which have a number for each of its columns."""
    for tensor in (x, *vectors):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"fused layers take float32, bfloat16 and float16, not {tensor.dtype}")
    for vector in vectors:
        if vector.shape != x.shape[-1:]:
            raise ValueError(f"expected shape {tuple(x.shape[-1:])}, got {tuple(vector.shape)}")


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
