"""How the programs of a Hopper kernel share its works: each claims one after another by a counter in memory.

As many programs run as the GPU has processors, and the next work goes to the one that first has time for it. A work
is claimed by a program that runs, after all before it: it may wait for those (hopper_dq.py does) wherever and
whenever a GPU runs the programs.

One warp of a program claims, a work ahead of the others, and hands them its index through shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper import Ring, make_barriers

CLAIMS = gl.constexpr(2)  # indices on their way: that of the work that a program does, and of the next


@gluon.jit
def make_claims(READERS: gl.constexpr):
    """The indices of works on their way from the warp that claims them to READERS others."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    indices = gl.allocate_shared_memory(gl.int32, [CLAIMS, 1], flat)
    return Ring(indices, make_barriers(CLAIMS, 1), make_barriers(CLAIMS, READERS))


# One thread counts and goes on; `tell` reads the count from its register. After gl.atomic_add the warp would wait for
# it at once.
ASK = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    mov.b32 $0, 0;
    @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
}""")
FIRST = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;")


@gluon.jit
def ask(Counter):
    """Begin to claim this program's next work. The answer is for `tell`."""
    return gl.inline_asm_elementwise(ASK, "=r,l", [Counter], gl.int32, False, 1)


@gluon.jit
def tell(answer, claims, place, works):
    """Tell the other warps the place-th work of this program: its index, or -1 where none is left."""
    alone: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    index = gl.inline_asm_elementwise(FIRST, "=r,r", [answer], gl.int32, False, 1)
    index = gl.where(index < works, index, -1)
    slot = place % CLAIMS
    mbarrier.wait(claims.empty.index(slot), (place // CLAIMS & 1) ^ 1)
    claims.tiles.index(slot).store(gl.full([1], 0, gl.int32, alone) + index)
    mbarrier.arrive(claims.full.index(slot))
    return index


@gluon.jit
def claimed(claims, place):
    """What `tell` told. The reader releases claims.empty of place % CLAIMS when all its threads have it."""
    alone: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = place % CLAIMS
    mbarrier.wait(claims.full.index(slot), place // CLAIMS & 1)
    return gl.max(claims.tiles.index(slot).load(alone), 0)
