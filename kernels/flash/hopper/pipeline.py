"""Shared by the Hopper kernels: multi-stage rings of tiles in shared memory, filled by TMA."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .primitives import tma_load

LOG2_E = gl.constexpr(1.4426950408889634)


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
    tma_load(desc, coordinates, ring.full.index(stage), ring.tiles.index(stage))


@gluon.jit
def arrive(barrier, pred=True):
    """One thread arrives on behalf of its warpgroup.

    The caller orders it after the reads it releases: by a warpgroup barrier, or by the wait for the wgmma that read
    the memory, as CUTLASS's PipelineTmaAsync does. (A claimed index was read a whole work item earlier. TMA stores
    are waited for by the threads that issued them, so a warpgroup barrier follows.)

    mbarrier.arrive would do, but Triton treats it as an access to all of shared memory and puts barriers around it.
    An expect of 0 bytes arrives as well.
    """
    mbarrier.expect(barrier, 0, pred=pred)


@gluon.jit
def opaque(number):
    """The number, hidden from the optimiser: nothing is known about the value, and nothing folds into it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], gl.int32, True, 1)


@gluon.jit
def sync_consumers():
    """Synchronise the two consumer warpgroups, by named barrier 8."""
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    token = gl.full([128], 0, gl.int32, one_each)
    gl.inline_asm_elementwise("bar.sync 8, 256; mov.b32 $0, $1;", "=r,r", [token], gl.int32, False, 1)
