"""What the Hopper kernels share: rings of tiles in shared memory that TMA fills, and how TMA reads a tensor."""

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
    """Tiles in shared memory; barriers that say of each that it has come, and that it may be overwritten."""

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
    """A Ring of STAGES tiles of a descriptor, each of which READERS warpgroups read."""
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)  # noqa: RUF005
    return Ring(tiles, make_barriers(STAGES, 1), make_barriers(STAGES, READERS))


@gluon.jit
def fetch(desc, coordinates, ring, stage, phase):
    """Start the copy of a tile once its readers have left the stage."""
    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, coordinates, ring.full.index(stage), ring.tiles.index(stage))


@gluon.jit
def arrive(barrier, pred=True):
    """One thread arrives for its warpgroup. Before it stands a barrier of the warpgroup, or the wait for the product
    that read the memory: CUTLASS's PipelineTmaAsync releases so too. A claim was read a whole work before.

    mbarrier.arrive would do, but Triton takes it for an access to all shared memory and puts barriers around it.
    expect announces no bytes and arrives as well.
    """
    mbarrier.expect(barrier, 0, pred=pred)


@gluon.jit
def opaque(number):
    """The number, of which the compiler knows nothing any more."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], gl.int32, True, 1)


class Descriptor(TensorDescriptor):
    """How TMA is to read or write a tensor, `block` of it at a time.

    Without the checks of its base, which `fits_tma` has made: they are 2 us of host time each.
    """

    def __init__(self, x: torch.Tensor, block: tuple[int, ...]) -> None:
        shape, strides = x.shape, x.stride()
        if 1 in shape:  # the stride of a dimension of one may be anything, but not for TMA
            strides = [stride if size > 1 else shape[-1] for size, stride in zip(shape, strides, strict=True)]
        self.base = x
        self.shape = shape
        self.strides = strides
        self.block_shape = list(block)
        self.layout = layout_of(block, x.dtype)


def rows_of(x: torch.Tensor, rows: int) -> Descriptor:
    """Of (batch, heads, length, head_dim): `rows` rows of one head at a time."""
    return Descriptor(x, (1, 1, rows, x.shape[3]))


@functools.cache
def layout_of(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How what TMA moves at a time lies in shared memory: as wgmma reads it, but a float32 sum row by row."""
    if dtype is torch.float32:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    return gl.NVMMASharedLayout.get_default_for(list(block), TYPES[dtype])


def fits_tma(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a 16-bit (batch, heads, length, head_dim) has elements, and rows on multiples of 16 bytes, none twice.

    The tensor itself must begin on one.
    """
    apart = [stride for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    return 0 not in shape and strides[3] == 1 and all(stride > 0 and stride % 8 == 0 for stride in apart)
