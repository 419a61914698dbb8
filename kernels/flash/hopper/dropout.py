"""Dropout in the Hopper kernels: the mask of dropout.py, drawn in the registers that hold a tile's probabilities.

The forward draws the next block's random words while its Q K^T runs, when a consumer would wait, and keeps them until
the softmax has used them. The backward draws when it has the probabilities.
"""

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...philox import drop_threshold
from .. import dropout

is_kept = gluon.jit(dropout.is_kept.fn)
philox = gluon.jit(dropout.philox.fn)


@dataclass(frozen=True)
class Drop:
    """Compile-time parameters of dropout."""

    DROP_BELOW: gl.constexpr  # a 16-bit half of a Philox word below this drops
    SCALE: gl.constexpr  # of kept elements, 1 / (1 - p)


def drop_of(dropout_p: float) -> Drop | None:
    """The parameters for a dropout probability; None if it rounds to 0."""
    below = drop_threshold(dropout_p)
    return Drop(gl.constexpr(below), gl.constexpr(2**16 / (2**16 - below))) if below else None


class Draw(NamedTuple):
    """What a tile's mask is a function of."""

    seed: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    first_row: gl.tensor  # a multiple of 16, as is first_key
    first_key: gl.tensor


@gluon.jit
def draw_words(draw, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """The words of `is_kept` for a tile of scores, (ROWS, KEYS // 2): the halves belong to neighbouring keys."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    even, _ = pairs_of(gl.zeros([ROWS, KEYS], gl.float32, scores_layout))
    layout: gl.constexpr = even.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    pairs = gl.arange(0, KEYS // 2, layout=gl.SliceLayout(0, layout))[None, :]
    row = (draw.first_row >> 1) + ((rows >> 4 << 3) | ((rows >> 1 & 3) << 1) | (rows & 1))
    column = ((draw.first_key >> 2) + (pairs & 3)) + (pairs >> 3 << 2)
    head, batch = draw.head.to(gl.uint32), draw.batch.to(gl.uint32)
    words = philox(draw.seed, row.to(gl.uint32), head, column.to(gl.uint32), batch)
    right = (pairs & 4) != 0
    lower, upper = gl.where(right, words[1], words[0]), gl.where(right, words[3], words[2])
    return gl.where((rows & 8) != 0, upper, lower)


@gluon.jit
def pairs_of(p):
    """The elements of even columns, and those of odd ones."""
    return p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()


@gluon.jit
def drop(p, words, DROP: gl.constexpr):
    """p (ROWS, keys), 0 where dropped. words: of `draw_words`."""
    even, odd = pairs_of(p)
    # Not 0.0: a predicated multiply needs neither a select nor another register.
    even = gl.where((words & 0xFFFF) >= DROP.DROP_BELOW, even, even * 0)
    odd = gl.where((words >> 16) >= DROP.DROP_BELOW, odd, odd * 0)
    return gl.convert_layout(gl.join(even, odd).reshape(p.shape), p.type.layout)


@gluon.jit
def negate(p, draw, DROP: gl.constexpr, BY_ROWS: gl.constexpr = False):
    """p (keys, queries), or if BY_ROWS (queries, keys), negated where dropout drops it: there are registers for one P
    only."""
    layout: gl.constexpr = p.type.layout
    down = gl.arange(0, p.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    right = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    if BY_ROWS:
        rows, keys = down, right
    else:
        rows, keys = right, down
    # The subtraction is an instruction. Since triton 3.8 -p is not, so ptxas defers the choice until it is used, and
    # keeps its predicates: 290 to 408 B are spilled at head_dim 64 (LOG.md).
    return gl.where(is_kept(draw.first_row, rows, draw.first_key, keys, draw, DROP), p, 0.0 - p)


@gluon.jit
def ds_of(p, dp, delta, DROP: gl.constexpr):
    """dS of p; with dropout of what `negate` returned, and delta is divided by DROP.SCALE, as dS then is."""
    ds = p * (dp - delta)
    if DROP is not None:
        ds = gl.maximum(p, 0.0) * dp - gl.abs(p) * delta
    return ds


@gluon.jit
def pack_positive(p, dtype: gl.constexpr):
    """As `pack`, with negative elements set to 0.

    Marked impure so that it stays in front of the product: LLVM would spread it over the wgmmas (C7519).
    """
    low, high = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, False, 1
        )
    return gl.inline_asm_elementwise(
        "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, False, 1
    )
