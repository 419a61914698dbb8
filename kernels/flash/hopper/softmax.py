"""Online softmax of the Hopper forward, on (64, keys) score tiles in a warpgroup's registers.

Scores are the raw products; `exp2_scale` = scale * log2(e) turns them into exponents of 2. Between blocks of keys, a
row carries its running maximum and eight partial sums, each owned by one thread, so that sums are reduced across
threads only once, at the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .dropout import drop
from .forward_schedule import ROWS
from .pipeline import LOG2_E
from .primitives import TREES, unstack

LOWEST = gl.constexpr(-3.0e38)  # see portable/forward.py


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """p rounded to dtype, two neighbours packed into an int32. A loop that carries 16-bit values repacks them in
    every iteration: 64 of 470 instructions."""
    low, high = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
        )
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
    )  # fmt: skip


@gluon.jit
def unpack(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """The inverse of `pack`, as a register A operand for an accumulator in `layout`."""
    pairs = gl.join(packed.to(gl.int16), (packed >> 16).to(gl.int16))
    p = pairs.reshape([packed.shape[0], 2 * packed.shape[1]]).to(dtype, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def highest(scores):
    """The rows' maxima: each thread goes through its scores of a row one after another.

    Triton does that too, but since 3.8 as a tree. In a chain each step waits for the one before, and ptxas fills the
    gaps in the second row's with the first row's exponentials; a tree has none (LOG.md).
    """
    if TREES:
        COLUMNS: gl.constexpr = scores.shape[1]
        of_four_threads = scores.reshape([ROWS, COLUMNS // 8, 4, 2]).permute([0, 2, 1, 3])
        own = unstack(of_four_threads.reshape([ROWS, 4, COLUMNS // 4]))
        maximum = own[0]
        for each in gl.static_range(1, COLUMNS // 4):
            maximum = gl.maximum(maximum, own[each])
        maximum = gl.convert_layout(gl.max(maximum, 1), gl.SliceLayout(1, scores.type.layout))
    else:
        maximum = gl.max(scores, 1)
    return maximum


@gluon.jit
def partial_sums(p):
    """(ROWS, 8): sums over columns congruent modulo 8. One thread holds all terms of a sum, so no shuffles; in a
    chain, as in `highest`."""
    BLOCKS: gl.constexpr = p.shape[1] // 8
    terms = p.reshape([p.shape[0], BLOCKS, 8])
    if TREES:
        of_block = unstack(terms.permute([0, 2, 1]))
        total = of_block[0]
        for each in gl.static_range(1, BLOCKS):
            total += of_block[each]
    else:
        total = gl.sum(terms, 1)
    return total


@gluon.jit
def first_softmax(scores, exp2_scale, words, dtype: gl.constexpr, SPEC: gl.constexpr):
    """Softmax of the rows' first block of keys: packed exponentials, row maximum (base 2) and partial sums. words:
    dropout's, if SPEC.DROP."""
    row_max = gl.maximum(highest(scores) * exp2_scale, LOWEST)
    p = gl.exp2(scores * exp2_scale - row_max[:, None])
    kept = p
    if SPEC.DROP is not None:
        kept = drop(p, words, SPEC.DROP)
    return pack(kept, dtype), row_max, partial_sums(p)


@gluon.jit
def widen(p, row_max, row_sum, dtype: gl.constexpr):
    """first_softmax's results for the left half of a block, as those of a whole block whose right half is masked."""
    BLOCK_N: gl.constexpr = 4 * p.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    whole = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    p_layout: gl.constexpr = pack(whole, dtype).type.layout
    sum_layout: gl.constexpr = partial_sums(whole).type.layout
    p = gl.join(p, gl.zeros_like(p)).permute([0, 2, 1]).reshape([ROWS, BLOCK_N // 2])
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, layout))
    return gl.convert_layout(p, p_layout), row_max, gl.convert_layout(row_sum, sum_layout)


@gluon.jit
def add_sink(row_max, row_sum, Sink):
    """The softmax state of whole rows, with a sink's logit among their scores, and the factor for the accumulator."""
    sink = (gl.zeros_like(row_sum) + gl.load(Sink)).to(gl.float32) * LOG2_E  # -inf: none
    new_max = gl.maximum(row_max, sink)
    rescale = gl.exp2(row_max - new_max)
    return new_max, row_sum * rescale + gl.exp2(sink - new_max), rescale


@gluon.jit
def softmax(scores, row_max, row_sum, exp2_scale):
    """Softmax of a later block: exponentials (float32, not packed), the new row maximum and partial sums, and
    `rescale`, the factor exp2(old maximum - new maximum) for the accumulator."""
    new_max = gl.maximum(row_max, highest(scores) * exp2_scale)
    p = gl.exp2(scores * exp2_scale - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return p, new_max, row_sum + partial_sums(p), rescale
