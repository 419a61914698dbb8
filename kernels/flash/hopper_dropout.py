"""Dropout in the Hopper backward: the mask of dropout.py, drawn where a tile's probabilities are."""

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..philox import drop_threshold
from . import dropout

is_kept = gluon.jit(dropout.is_kept.fn)


@dataclass(frozen=True)
class Drop:
    """What is known of it at compile time."""

    DROP_BELOW: gl.constexpr  # half a Philox word below this drops
    SCALE: gl.constexpr  # of what is kept


def drop_of(dropout_p: float) -> Drop | None:
    """None where nothing is dropped."""
    below = drop_threshold(dropout_p)
    return Drop(gl.constexpr(below), gl.constexpr(2**16 / (2**16 - below))) if below else None


class Draw(NamedTuple):
    """What the mask of a tile is a function of."""

    seed: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    first_row: gl.tensor  # multiples of 16, both
    first_key: gl.tensor


@gluon.jit
def negate(p, draw, DROP: gl.constexpr):
    """p (keys, queries) where dropout keeps it, else -p: there are registers for one P alone."""
    layout: gl.constexpr = p.type.layout
    keys = gl.arange(0, p.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    rows = gl.arange(0, p.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    return gl.where(is_kept(draw.first_row, rows, draw.first_key, keys, draw, DROP), p, -p)


@gluon.jit
def pack_positive(p, dtype: gl.constexpr):
    """As `pack`, but 0 for what is negative.

    Not pure, so that it stays before the product: LLVM would put a part of it before each wgmma (C7519).
    """
    low, high = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, False, 1
        )
    return gl.inline_asm_elementwise(
        "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, False, 1
    )
