"""The checks that the fused layers share, and two things that PyTorch needs of them."""

import functools
import sys

import torch

from . import FusedError, lacking

# Triton's blocks have up to 2^20 elements, and a program of `embedding`'s gradient holds four rows.
LARGEST_WIDTH = 2**18


@functools.cache
def check_device(layer: str, device_type: str) -> None:
    """Raise FusedError if the kernels cannot run on such a device. On meta none does: results have shapes alone."""
    if device_type != "meta" and (missing := lacking(device_type)) is not None:
        raise FusedError(f"{layer} needs {missing}")


def block_of(width: int) -> int:
    """Columns of a block that holds a whole row of the width."""
    if width > LARGEST_WIDTH:
        raise FusedError(
            f"fused layers take a width up to {LARGEST_WIDTH}, not {width}; use model.block=torch"
        )
    return 1 << max(width - 1, 0).bit_length()


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
