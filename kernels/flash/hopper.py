"""Shared by the Hopper kernels: multi-stage rings of tiles in shared memory, filled by TMA, and TMA descriptors."""

import functools
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2_E = gl.constexpr(1.4426950408889634)
TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


class Ring(NamedTuple):
    """A multi-stage pipeline buffer: tiles in shared memory, with a full and an empty mbarrier for each."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(COUNT):
        mbarrier.init(barriers.index(each), count=ARRIVALS)
    return barriers


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A Ring of STAGES tiles of a descriptor's block, each read by READERS warpgroups."""
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)  # noqa: RUF005
    return Ring(tiles, make_barriers(STAGES, 1), make_barriers(STAGES, READERS))


@gluon.jit
def fetch(desc, coordinates, ring, stage, phase):
    """Wait until the stage is empty, then start the TMA load of a tile into it."""
    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, coordinates, ring.full.index(stage), ring.tiles.index(stage))


@gluon.jit
def arrive(barrier, pred=True):
    """One thread arrives on behalf of its warpgroup.

    The caller orders it after the reads it releases: by a warpgroup barrier, or by the wait for the wgmma that read
    the memory, as CUTLASS's PipelineTmaAsync does. (A claimed index was read a whole work item before.)

    mbarrier.arrive would do, but Triton treats it as an access to all of shared memory and puts barriers around it.
    An expect of 0 bytes arrives as well.
    """
    mbarrier.expect(barrier, 0, pred=pred)


@gluon.jit
def opaque(number):
    """The number, hidden from the optimiser: nothing is known about the value, and nothing folds into it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], gl.int32, True, 1)


class Descriptor(TensorDescriptor):
    """A TMA descriptor of a tensor, read or written `block` elements at a time.

    Skips the base class's checks, 2 us of host time each; `fits_tma` has made them.
    """

    def __init__(self, x: torch.Tensor, block: tuple[int, ...]) -> None:
        shape, strides = x.shape, x.stride()
        if 1 in shape:  # a size-1 dimension may have any stride, but TMA wants a valid one
            strides = [stride if size > 1 else shape[-1] for size, stride in zip(shape, strides, strict=True)]
        self.base = x
        self.shape = shape
        self.strides = strides
        self.block_shape = list(block)
        self.layout = layout_of(block, x.dtype)


def rows_of(x: torch.Tensor, rows: int) -> Descriptor:
    """The descriptor of x (batch, heads, length, head_dim), moving `rows` rows of one head at a time."""
    return Descriptor(x, (1, 1, rows, x.shape[3]))


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
