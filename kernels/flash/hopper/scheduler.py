"""Dynamic tile scheduling for the persistent Hopper kernels: programs claim work items by an atomic counter.

One program runs for each SM, and the next work item goes to whichever program is free first. Items are
claimed in ascending order, by programs that are running. So an item may wait for earlier ones (dq.py does)
without deadlock, wherever and whenever the GPU schedules the programs. (Not in forwards that claim late: there each
program begins with the item of its own number.)

In each program one warp claims, one item ahead of the others, and passes them the index through shared memory. It
claims when it begins to fetch an item, or, where items are few and of unequal cost, when all of one is being fetched:
else those that are left are all claimed while most programs are at their first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .pipeline import Ring, make_barriers

CLAIM_STAGES = gl.constexpr(2)  # indices in flight: of the current work item, and of the next


@gluon.jit
def make_claims(READERS: gl.constexpr):
    """A ring of claimed indices, written by the claiming warp and read by READERS other warps or warpgroups."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    indices = gl.allocate_shared_memory(gl.int32, [CLAIM_STAGES, 1], flat)
    return Ring(indices, make_barriers(CLAIM_STAGES, 1), make_barriers(CLAIM_STAGES, READERS))


# Lane 0 issues the atomic and the warp continues; `publish_claim` broadcasts the result from lane 0's register.
# gl.atomic_add would make the warp wait for the result at once.
ATOMIC_ADD = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    mov.b32 $0, 0;
    @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
}""")
BROADCAST = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;")


@gluon.jit
def issue_claim(Counter):
    """Issue the claim of this program's next work item; the result, not waited for, is for `publish_claim`."""
    return gl.inline_asm_elementwise(ATOMIC_ADD, "=r,l", [Counter], gl.int32, False, 1)


@gluon.jit
def broadcast(pending):
    """Lane 0's number."""
    return gl.inline_asm_elementwise(BROADCAST, "=r,r", [pending], gl.int32, False, 1)


@gluon.jit
def publish_claim(pending, claims, ordinal, items):
    """Publish this program's ordinal-th work item to the other warps: its index, or -1 when none is left."""
    alone: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    index = broadcast(pending)
    index = gl.where(index < items, index, -1)
    slot = ordinal % CLAIM_STAGES
    mbarrier.wait(claims.empty.index(slot), (ordinal // CLAIM_STAGES & 1) ^ 1)
    claims.tiles.index(slot).store(gl.full([1], 0, gl.int32, alone) + index)
    mbarrier.arrive(claims.full.index(slot))
    return index


@gluon.jit
def read_claim(claims, ordinal):
    """The index that `publish_claim` published. The reader must arrive on claims.empty[ordinal % CLAIM_STAGES] once
    all its threads have it."""
    alone: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = ordinal % CLAIM_STAGES
    mbarrier.wait(claims.full.index(slot), ordinal // CLAIM_STAGES & 1)
    return gl.max(claims.tiles.index(slot).load(alone), 0)
