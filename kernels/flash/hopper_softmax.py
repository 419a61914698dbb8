"""The softmax of the Hopper forward: tiles of 64 rows in a warpgroup's registers, and their masks.

Scores are as the product leaves them; `unit` makes exponents of 2 of them. Between tiles of keys a row has its
maximum so far and eight sums, which no thread has to share before the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper import opaque
from .hopper_tiles import BLOCK_N, ROWS

LOWEST = gl.constexpr(-3.0e38)  # see forward.py


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """p rounded to dtype, two neighbours to an int32: a loop that carries 16-bit numbers repacks them every time, in
    64 instructions of 470."""
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
    """What `pack` packed, as the left operand of a product in `layout`."""
    pairs = gl.join(packed.to(gl.int16), (packed >> 16).to(gl.int16))
    p = pairs.reshape([packed.shape[0], 2 * packed.shape[1]]).to(dtype, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def partial_sums(p):
    """(ROWS, 8): sums over the columns that agree modulo 8, which one thread holds, so without shuffles."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def hide(scores, first_row, first_key, sizes, SPEC: gl.constexpr):
    """-inf where a row may not see a key."""
    layout: gl.constexpr = scores.type.layout
    end = sizes.kv_len - first_key
    keys = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    # Three consumers have few registers: with what differs between threads taken off both sides, columns are
    # constants. With more registers that is slower (LOG.md, "What the Hopper kernels spilled").
    own = keys & (6 if SPEC.CONSUMERS == 3 else 0)
    if SPEC.CAUSAL:
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
        # Opaque, or ptxas would add to the rows what is the same in the whole launch, and spill that.
        last = opaque(first_row + end - sizes.q_len)
        return gl.where(keys - own <= rows + last - own, scores, float("-inf"))
    return gl.where(keys - own < end - own, scores, float("-inf"))


@gluon.jit
def hide_before(scores, first_seen, first_key):
    """-inf where a row sees no key yet. first_seen: the first key that each sees."""
    layout: gl.constexpr = scores.type.layout
    # Opaque, or ptxas would keep this of a block not come to, and spill with head_dim 128.
    first = gl.convert_layout(first_seen, gl.SliceLayout(1, layout))[:, None] - opaque(first_key)
    keys = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    # As in `hide`, but with two consumers too: a masked step has 535 instructions, else 574 to 639.
    own = keys & 6
    return gl.where(keys - own >= first - own, scores, float("-inf"))


@gluon.jit
def first_softmax(scores, unit, dtype: gl.constexpr):
    """Packed exponentials of the first tile of some rows, their maximum and their partial sums."""
    row_max = gl.maximum(gl.max(scores, 1) * unit, LOWEST)
    p = gl.exp2(scores * unit - row_max[:, None])
    return pack(p, dtype), row_max, partial_sums(p)


@gluon.jit
def widen(p, row_max, row_sum, dtype: gl.constexpr):
    """What first_softmax gives for the left half of a tile as what it gives for a tile whose right half is hidden."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    whole = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    p_layout: gl.constexpr = pack(whole, dtype).type.layout
    sum_layout: gl.constexpr = partial_sums(whole).type.layout
    p = gl.join(p, gl.zeros_like(p)).permute([0, 2, 1]).reshape([ROWS, BLOCK_N // 2])
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, layout))
    return gl.convert_layout(p, p_layout), row_max, gl.convert_layout(row_sum, sum_layout)


@gluon.jit
def softmax(scores, row_max, row_sum, unit):
    """The same for a later tile, exponentials not packed, and what the earlier results are to be multiplied by."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * unit)
    p = gl.exp2(scores * unit - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    return p, new_max, row_sum + partial_sums(p), rescale
