"""What Gluon changes from one Triton release to the next, in one place: the primitives by one name each, and the
options that the Hopper kernels are compiled with. All else that they use of Gluon is the same from 3.7 to 3.9.

    3.7   async_copy_global_to_shared, async_copy_shared_to_global, _reinterpret; ptxas 12.8 for sm_90
    3.8   the copies are async_load and async_store too; async_atomic_add; ptxas 12.9; what one thread reduces is a
          tree, not a chain (softmax.py)
    3.9   only those names, and reinterpret; ptxas 13.4, and the option sched4reg
"""

from triton._C.libtriton import ir
from triton.backends.nvidia.compiler import CUDAOptions
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ...launch import INTERPRETED

if hasattr(tma, "async_load"):
    tma_load, tma_store, tma_add = tma.async_load, tma.async_store, tma.async_atomic_add
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

    @gl._core.builtin
    def tma_add(descriptor, coordinates, source, _semantic=None):
        """`tma_store` that adds: cp.reduce.async.bulk.tensor."""
        coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
        _semantic.builder.create_async_tma_reduce(
            ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
        )


_Memory = gl.shared_memory_descriptor
_reinterpret = getattr(_Memory, "reinterpret", None) or _Memory._reinterpret
TREES = gl.constexpr(hasattr(tma, "async_load"))
_SCHEDULES = "sched4reg" in CUDAOptions.__dataclass_fields__


@gl._core.builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory as tiles of another dtype, shape or layout."""
    return _reinterpret(memory, dtype, shape, layout, _semantic=_semantic)


def _unstack(x, semantic):
    *others, size = x.shape
    if size == 2:
        return x.split(_semantic=semantic)
    halves = x.reshape([*others, 2, size // 2], _semantic=semantic).permute([0, 1, 3, 2], _semantic=semantic)
    first, second = halves.split(_semantic=semantic)
    return (*_unstack(first, semantic), *_unstack(second, semantic))


@gl._core.builtin
def unstack(x, _semantic=None):
    """The parts of a 3-d tensor along its last axis, all of which one thread holds."""
    return gl.tuple(_unstack(x, _semantic))


# Programmatic dependent launch. A kernel launched with the option launch_pdl starts once every program of the kernel
# before it has called `let_next_start`, or has ended. What that kernel writes is there after `await_previous`.
AWAIT = gl.constexpr("griddepcontrol.wait; mov.b32 $0, 0;")
LET_START = gl.constexpr("griddepcontrol.launch_dependents; mov.b32 $0, 0;")
OVERLAPPED = {} if INTERPRETED else {"launch_pdl": True}


@gluon.jit
def await_previous():
    gl.inline_asm_elementwise(AWAIT, "=r", [], gl.int32, False, 1)


@gluon.jit
def let_next_start():
    gl.inline_asm_elementwise(LET_START, "=r", [], gl.int32, False, 1)


def compile_options(head_dim: int, dq_delay: int = 0) -> dict[str, object]:
    """The Triton options of a Hopper kernel; dq_delay: the backward's.

    ptxas 13.4 at the level of register allocation that Triton sets (2) spills 20 to 132 B in the plain backward. At
    its own level (4), and a register usage below the default, it spills at most 12, and none in most kernels if LLVM
    schedules for few registers. Only where dQ is delayed at head_dim 64 does that cost 24 to 56 (LOG.md).
    """
    if not _SCHEDULES:
        return {}
    schedule = head_dim > 64 or not dq_delay
    return {"sched4reg": schedule, "ptx_options": "--regAllocOptLevel=4 --register-usage-level=2"}
