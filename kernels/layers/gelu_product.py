"""A matrix product for Hopper with GELU in its epilogue, forward and backward.

    forward    pre = x @ weight.T, out = GELU(pre + bias)                    x (M, K), weight (N, K)
    backward   d_pre = (d_out @ weight) * GELU'(pre + bias), and d_bias      d_out (M, K), weight (K, N)

As kernels of their own, GELU and its derivative move 2 and 3 elements per element of the hidden layer, while the
tensor cores rest. For 65,536 tokens of GPT-2 small in bfloat16 on an H100, the forward takes 531 us here and 774 as
torch's product (485) and our kernel; the backward takes 603 and 904 (474). kernels/log/step.md has more.

Persistent and warp-specialised. Two consumer warpgroups take every other tile of 128 x 128 each: one multiplies while
the other is in its epilogue, and they hand the tensor cores to each other (`turns`). A producer warp loads slabs of K
into a ring by TMA. An epilogue goes by parts of PART columns, which leave through shared memory and TMA. In the
backward each consumer has one more warp, which loads parts of pre; d_pre then takes their place.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..flash.hopper.descriptors import Descriptor
from ..flash.hopper.pipeline import Ring, arrive, fetch, make_barriers, make_ring
from ..flash.hopper.primitives import compile_options, tma_load, tma_store
from ..launch import Launch, launch, sm_count

TILE = gl.constexpr(128)  # its rows, and its columns
SLAB = gl.constexpr(64)  # of K


@dataclass(frozen=True)
class Spec:
    """Compile-time parameters, passed as one argument."""

    BACKWARD: gl.constexpr
    STAGES: gl.constexpr  # slabs in the ring
    PART: gl.constexpr  # columns of a part of the epilogue
    PLACES: gl.constexpr  # parts that a consumer has room for; forward: half of them pre's, half out's
    # Blocks of rows that are walked together, so that they find the weight in the L2 cache.
    GROUP: gl.constexpr


def specify(backward: bool, stages: int, part: int, places: int, group: int) -> Spec:
    return Spec(*map(gl.constexpr, (backward, stages, part, places, group)))


# With 4 stages the forward takes 1.02 to 1.08 of the time, with parts of 32 columns the backward 1.01 to 1.04.
FORWARD = specify(False, stages=5, part=64, places=2, group=8)
BACKWARD = specify(True, stages=5, part=64, places=2, group=1)
# GELU(x) = x / 2 (1 + tanh(u)), u = U x + U3 x^3. tanh.approx is one instruction, with an error of 2^-11.
U = gl.constexpr(0.7978845608028654)
U3 = gl.constexpr(0.7978845608028654 * 0.044715)
LARGE = gl.constexpr(1e4)  # tanh saturates long before x^2 reaches it; 0 times an infinite x^2 is NaN


def gelu_product(x: Tensor, weight: Tensor, bias: Tensor, pre: Tensor, out: Tensor) -> None:
    """Write pre = x @ weight.T and out = GELU(pre + bias).

    Args:
        x: (M, K), weight: (N, K), pre, out: (M, N), of one 16-bit dtype; 128 divides M and N, 64 K. bias: (N,).
    """
    _launch(FORWARD, x, weight, pre, out, bias, None)


def gelu_product_backward(d_out: Tensor, weight: Tensor, pre: Tensor, bias: Tensor, d_pre: Tensor) -> Tensor:
    """Write d_pre = (d_out @ weight) * GELU'(pre + bias). Returns its sum over rows before it is rounded, in a fixed
    order: float32 (N,).

    Args:
        d_out: (M, K), weight: (K, N), pre, d_pre: (M, N), bias: (N,), as above.
    """
    rows, columns = pre.shape
    partials = pre.new_empty(rows // TILE.value, columns, dtype=torch.float32)
    _launch(BACKWARD, d_out, weight, pre, d_pre, bias, partials)
    return partials.sum(0)


def _launch(
    spec: Spec, a: Tensor, weight: Tensor, pre: Tensor, out: Tensor, bias: Tensor, partials: Tensor | None
) -> None:
    (rows, inner), columns = a.shape, out.shape[1]
    sizes = rows // TILE.value, columns // TILE.value, inner // SLAB.value

    def prepare() -> Launch:
        programs = min(sm_count(a.device), sizes[0] * sizes[1])
        options = {"num_warps": 4, **compile_options(TILE.value)}
        return gelu_product_kernel, (programs, 1, 1), (*sizes, spec), options

    def describe(*moved: Tensor) -> tuple[Descriptor, ...]:
        return tuple(map(Descriptor, moved, blocks_of(spec)))

    key = ("gelu product", a.dtype, *sizes, spec.BACKWARD.value)
    launch((bias, partials), key, prepare, (a, weight, pre, out), describe)


def blocks_of(spec: Spec) -> tuple[tuple[int, int], ...]:
    """What TMA moves at once of x or d_out, of weight, of pre, and of out or d_pre."""
    slab, part = (TILE.value, SLAB.value), (TILE.value, spec.PART.value)
    return slab, slab[::-1] if spec.BACKWARD.value else slab, part, part


class Shared(NamedTuple):
    """What the warps of a program share."""

    a: gl.shared_memory_descriptor  # the ring: (STAGES, TILE, SLAB)
    b: gl.shared_memory_descriptor  # (STAGES, TILE, SLAB), backward (STAGES, SLAB, TILE)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    turns: gl.shared_memory_descriptor  # one for each consumer: it may begin its next tile
    # (2 * PLACES, TILE, PART), one consumer's after the other's; backward: a Ring of them
    parts: gl.shared_memory_descriptor | Ring


class Sizes(NamedTuple):
    row_blocks: gl.tensor
    column_blocks: gl.tensor
    slabs: gl.tensor  # of K


@gluon.jit
def tile_of(ordinal, sizes, SPEC: gl.constexpr):
    """First row and first column of this program's ordinal-th tile."""
    index = gl.program_id(0) + ordinal * gl.num_programs(0)
    of_group = SPEC.GROUP * sizes.column_blocks
    first = index // of_group * SPEC.GROUP
    rows = gl.minimum(sizes.row_blocks - first, SPEC.GROUP)
    index = index % of_group
    return (first + index % rows) * TILE, index // rows * TILE


@gluon.jit
def count_tiles(sizes):
    """How many tiles this program computes: every num_programs-th."""
    tiles = sizes.row_blocks * sizes.column_blocks
    return (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def produce(a_desc, b_desc, shared, sizes, SPEC: gl.constexpr):
    """The producer warp: the slabs of one tile after another."""
    slab = 0
    for ordinal in range(count_tiles(sizes)):
        row, column = tile_of(ordinal, sizes, SPEC)
        for k in range(sizes.slabs):
            stage = slab % SPEC.STAGES
            mbarrier.wait(shared.empty.index(stage), (slab // SPEC.STAGES & 1) ^ 1)
            full = shared.full.index(stage)
            mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma_load(a_desc, [row, k * SLAB], full, shared.a.index(stage))
            if SPEC.BACKWARD:
                tma_load(b_desc, [k * SLAB, column], full, shared.b.index(stage))
            else:
                tma_load(b_desc, [column, k * SLAB], full, shared.b.index(stage))
            slab += 1


@gluon.jit
def load_parts(pre_desc, shared, sizes, WHICH: gl.constexpr, SPEC: gl.constexpr):
    """Backward: the warp that loads pre for consumer WHICH."""
    number = 0
    for ordinal in range(WHICH, count_tiles(sizes), 2):
        row, column = tile_of(ordinal, sizes, SPEC)
        for part in range(TILE // SPEC.PART):
            place = WHICH * SPEC.PLACES + number % SPEC.PLACES
            at = [row, column + part * SPEC.PART]
            fetch(pre_desc, at, shared.parts, place, number // SPEC.PLACES & 1)
            number += 1


@gluon.jit
def consume(pre_desc, out_desc, Bias, Partials, shared, sizes, WHICH: gl.constexpr, SPEC: gl.constexpr):
    """A consumer warpgroup: every other tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    for ordinal in range(WHICH, count_tiles(sizes), 2):
        mine = ordinal // 2  # tiles of this consumer so far
        acc = gl.zeros([TILE, TILE], gl.float32, layout)
        # When the other has issued its last product; not before, since a barrier two phases on has the same parity.
        # The first one's first turn has come: the phase before phase 0 counts as complete.
        mbarrier.wait(shared.turns.index(WHICH), (mine + 1 - WHICH) & 1)
        slab = ordinal * sizes.slabs
        stage, phase = slab % SPEC.STAGES, slab // SPEC.STAGES & 1
        read = 0  # the stage before; not `stage`: Triton would take `read = stage` in the loop for no change
        for k in range(sizes.slabs):
            b = shared.b.index(stage)
            if not SPEC.BACKWARD:
                b = b.permute((1, 0))
            mbarrier.wait(shared.full.index(stage), phase)
            acc = warpgroup_mma(shared.a.index(stage), b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
            arrive(shared.empty.index(read), k > 0)
            read = stage
            last = stage == SPEC.STAGES - 1
            stage, phase = gl.where(last, 0, stage + 1), phase ^ last.to(gl.int32)
        arrive(shared.turns.index(1 - WHICH))
        acc = warpgroup_mma_wait(0, [acc])
        arrive(shared.empty.index(read))
        row, column = tile_of(ordinal, sizes, SPEC)
        number = mine * (TILE // SPEC.PART)
        finish(acc, row, column, number, pre_desc, out_desc, Bias, Partials, shared, sizes, WHICH, SPEC)
    tma.store_wait(0)


@gluon.jit
def finish(
    x, row, column, number, pre_desc, out_desc, Bias, Partials, shared, sizes,
    WHICH: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """The epilogue of the columns of a tile from `column` on. number: parts that this consumer did before."""
    HALF: gl.constexpr = x.shape[1] // 2
    if x.shape[1] > SPEC.PART:
        left, right = x.reshape([TILE, 2, HALF]).permute((0, 2, 1)).split()
        finish(left, row, column, number, pre_desc, out_desc, Bias, Partials, shared, sizes, WHICH, SPEC)
        column += HALF
        number += HALF // SPEC.PART
        finish(right, row, column, number, pre_desc, out_desc, Bias, Partials, shared, sizes, WHICH, SPEC)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SPEC.PART, 16])
        x = gl.convert_layout(x, layout, assert_trivial=True)
        columns = column + gl.arange(0, SPEC.PART, gl.SliceLayout(0, layout))
        bias = gl.load(Bias + columns).to(gl.float32)[None, :]
        if SPEC.BACKWARD:
            place = WHICH * SPEC.PLACES + number % SPEC.PLACES
            tile = shared.parts.tiles.index(place)
            mbarrier.wait(shared.parts.full.index(place), number // SPEC.PLACES & 1)
            d = x * gelu_slope(tile.load(layout).to(gl.float32) + bias)
            send(d.to(out_desc.dtype), tile, out_desc, [row, column])
            Sums = Partials + row // TILE * (sizes.column_blocks * TILE)
            gl.store(Sums + columns, gl.sum(d, 0))
            tma.store_wait(0)  # TMA has read d_pre; the next pre may come into its place
            gl.barrier()
            arrive(shared.parts.empty.index(place))
        else:
            place = WHICH * SPEC.PLACES + 2 * number % SPEC.PLACES
            wait_for_place(SPEC)
            send(x.to(out_desc.dtype), shared.parts.index(place), pre_desc, [row, column])
            out = gelu(x + bias).to(out_desc.dtype)
            wait_for_place(SPEC)
            send(out, shared.parts.index(place + 1), out_desc, [row, column])


@gluon.jit
def wait_for_place(SPEC: gl.constexpr):
    """Forward: wait until TMA has read what was in the next place."""
    tma.store_wait(SPEC.PLACES - 1)
    gl.barrier()


@gluon.jit
def send(x, tile, desc, at):
    """Store x by way of `tile`, which is free."""
    tile.store(x)
    fence_async_shared()
    gl.barrier()
    tma_store(desc, at, tile)


@gluon.jit
def tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def gelu(x):
    half = x * 0.5
    return half * tanh(x * (U + U3 * (x * x))) + half


@gluon.jit
def gelu_slope(x):
    """GELU'(x) = (1 + t) / 2 + x / 2 (1 - t^2) u', with t = tanh(u)."""
    square = gl.minimum(x * x, LARGE)
    t = tanh(x * (U + U3 * square))
    return (1.0 - t * t) * x * (0.5 * U + 1.5 * U3 * square) + (0.5 * t + 0.5)


@gluon.jit(do_not_specialize=["row_blocks", "column_blocks", "slabs"])
def gelu_product_kernel(
    a_desc, b_desc, pre_desc, out_desc, Bias, Partials, row_blocks, column_blocks, slabs, SPEC: gl.constexpr
):  # fmt: skip
    """Grid: (programs,), one for each SM but no more than tiles.

    The descriptors move `blocks_of` SPEC. Partials: backward, float32 (row_blocks, N).
    """
    dtype: gl.constexpr = a_desc.dtype
    a = gl.allocate_shared_memory(dtype, [SPEC.STAGES] + a_desc.block_type.shape, a_desc.layout)  # noqa: RUF005
    b = gl.allocate_shared_memory(dtype, [SPEC.STAGES] + b_desc.block_type.shape, b_desc.layout)  # noqa: RUF005
    full, empty = make_barriers(SPEC.STAGES, 1), make_barriers(SPEC.STAGES, 1)
    turns = make_barriers(2, 1)
    sizes = Sizes(row_blocks, column_blocks, slabs)
    if SPEC.BACKWARD:
        shared = Shared(a, b, full, empty, turns, make_ring(pre_desc, 2 * SPEC.PLACES, 1))
        fence_async_shared()  # make the initialised barriers visible to TMA
        gl.warp_specialize(
            [
                (consume, (pre_desc, out_desc, Bias, Partials, shared, sizes, gl.constexpr(0), SPEC)),
                (consume, (pre_desc, out_desc, Bias, Partials, shared, sizes, gl.constexpr(1), SPEC)),
                (produce, (a_desc, b_desc, shared, sizes, SPEC)),
                (load_parts, (pre_desc, shared, sizes, gl.constexpr(0), SPEC)),
                (load_parts, (pre_desc, shared, sizes, gl.constexpr(1), SPEC)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )
    else:
        places: gl.constexpr = [2 * SPEC.PLACES] + out_desc.block_type.shape  # noqa: RUF005
        parts = gl.allocate_shared_memory(dtype, places, out_desc.layout)
        shared = Shared(a, b, full, empty, turns, parts)
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (pre_desc, out_desc, Bias, Partials, shared, sizes, gl.constexpr(0), SPEC)),
                (consume, (pre_desc, out_desc, Bias, Partials, shared, sizes, gl.constexpr(1), SPEC)),
                (produce, (a_desc, b_desc, shared, sizes, SPEC)),
            ],
            [4, 1],
            [240, 24],
        )
