"""TMA descriptors, made on the host: which tensors TMA can address, and the layout of a tile in shared memory."""

import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


class Descriptor(TensorDescriptor):
    """A TMA descriptor of a tensor, read or written `block` elements at a time.

    Skips the base class's checks, 2 us of host time each; `fits_tma` has made them.
    """

    def __init__(self, x: torch.Tensor, block: tuple[int, ...]) -> None:
        shape, strides = x.shape, x.stride()
        if 1 in shape:  # a size-1 dimension may have any stride, but TMA wants a valid one
            valid = [stride if size > 1 else shape[-1] for size, stride in zip(shape, strides, strict=True)]
            strides = tuple(valid)
        self.base = x
        self.shape = shape
        self.strides = strides
        self.block_shape = list(block)
        self.layout = layout_of(block, x.dtype)


def tile_width(head_dim: int) -> int:
    """Columns of a tile in shared memory. TMA fills those beyond head_dim with zeros, and does not store them."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def rows_of(x: torch.Tensor, rows: int, columns: int | None = None) -> Descriptor:
    """The descriptor of x (batch, heads, length, head_dim), moving `rows` rows of one head at a time, or `columns` of
    their columns."""
    return Descriptor(x, (1, 1, rows, columns or tile_width(x.shape[3])))


@functools.cache
def layout_of(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Shared-memory layout of a TMA block: swizzled for wgmma, or row-major for the float32 sum of dQ."""
    if dtype is torch.float32:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    return gl.NVMMASharedLayout.get_default_for(list(block), TYPES[dtype])


def fits_tma(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether TMA can address a 16-bit (batch, heads, length, head_dim): not empty, rows 16-byte aligned, no overlap.

    The caller checks that the data pointer is 16-byte aligned.
    """
    apart = [stride for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    return 0 not in shape and strides[3] == 1 and all(stride > 0 and stride % 8 == 0 for stride in apart)
