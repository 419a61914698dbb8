"""Softcap and ALiBi in the Hopper kernels, on the products in a warpgroup's registers. Off, they generate no code.

ALiBi subtracts slope * |query position - key position| from a score. Under the causal mask no distance is negative.

Softcap: as in portable/score_mods.py, tanh(x) = 1 - 2 r with r = 1 / (exp(2 x) + 1). Its absolute error is less than
that of 16-bit rounding for caps up to 64 (`dispatch.SOFTCAP_MAX`); the portable kernels have a series for others.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .forward_schedule import ROWS
from .pipeline import LOG2_E, opaque

# P = exp2(cap * log2(e) * (tanh - 1) - lse) and P * tanh' from a product, -lse, and the factors of exp's and P's
# exponents, element by element: as tile operations, a tile's tanh and P are both live, and 1280 B are spilled
# (LOG.md). A product of -inf is masked: added times 2^-100, it makes P 0, and a finite one is lost in rounding.
CAPPED = gl.constexpr("""{
    .reg .f32 r, x;
    mul.f32 r, $2, $4;
    ex2.approx.ftz.f32 r, r;
    add.f32 r, r, 0f3F800000;
    rcp.approx.ftz.f32 r, r;
    fma.rn.f32 x, $2, 0f0D800000, $3;
    fma.rn.f32 x, r, $5, x;
    ex2.approx.ftz.f32 $0, x;
    neg.f32 x, r;
    fma.rn.f32 r, r, x, r;
    mul.f32 r, r, 0f40800000;
    mul.f32 $1, r, $0;
}""")


@gluon.jit
def cap(products, exp2_scale, SOFTCAP: gl.constexpr):
    """tanh(products * scale / SOFTCAP), with exp2_scale = scale * log2(e): scores in units of the cap."""
    exponentials = gl.exp2(products * (exp2_scale * (2 / SOFTCAP)))
    return 1 - 2 * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [exponentials + 1], gl.float32, True, 1
    )


@gluon.jit
def probabilities(products, lse, exp2_scale, SOFTCAP: gl.constexpr):
    """P of products, and P * d score / d (scale * product). lse: broadcast; base 2, with softcap minus the cap."""
    if SOFTCAP > 0:
        zeros = gl.zeros_like(products)
        to_exponent, of_r = zeros + exp2_scale * (2 / SOFTCAP), zeros - 2 * SOFTCAP * LOG2_E
        values = [products, zeros - lse, to_exponent, of_r]
        p, of_ds = gl.inline_asm_elementwise(
            CAPPED, "=&f,=&f,f,f,f,f", values, (gl.float32, gl.float32), True, 1
        )
    else:
        p = gl.exp2(products * exp2_scale - lse)
        of_ds = p
    return p, of_ds


class Alibi(NamedTuple):
    """ALiBi of a tile of queries."""

    slope: gl.tensor  # for exponents of 2
    position: gl.tensor  # of the first query, among the keys


@gluon.jit
def slope_of(head, sizes):
    """The slope of a head, for exponents of 2; None without ALiBi."""
    slope: gl.constexpr = None
    if sizes.Slopes is not None:
        slope = gl.load(sizes.Slopes + head).to(gl.float32) * LOG2_E
    return slope


@gluon.jit
def alibi_of(head, first_row, sizes):
    """The Alibi of a head's queries from first_row on; None without ALiBi."""
    alibi: gl.constexpr = None
    if sizes.Slopes is not None:
        # Opaque; otherwise ptxas adds the launch-invariant part to the rows before all tiles, and spills the sums.
        alibi = Alibi(slope_of(head, sizes), opaque(first_row + sizes.kv_len - sizes.q_len))
    return alibi


@gluon.jit
def with_distances(lse, slope, rows_of_keys, CAUSAL: gl.constexpr, layout: gl.constexpr):
    """The backward's lse (1, queries); with ALiBi, minus ALiBi's part of the exponents of a tile (keys, queries).

    rows_of_keys: the query at each key's position, from the first one of the tile.
    """
    total = lse[None, :]
    if slope is not None:
        rows = gl.arange(0, lse.shape[0], gl.SliceLayout(0, layout))
        own = rows & 6  # as in `modify_scores`
        behind = (own[None, :] - rows_of_keys[:, None]).to(gl.float32)
        further = (rows - own).to(gl.float32)
        if CAUSAL:
            total = gl.fma(further, slope, lse)[None, :] + slope * behind
        else:
            total = total + slope * gl.abs(behind + further[None, :])
    return total


@gluon.jit
def modify_scores(products, exp2_scale, alibi, first_key, SPEC: gl.constexpr):
    """Map q k^T (queries, keys) to scores, in units of `score_exp2_scale`."""
    if SPEC.SOFTCAP > 0:
        products = cap(products, exp2_scale, SPEC.SOFTCAP)
    if alibi is not None:
        layout: gl.constexpr = products.type.layout
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
        keys = gl.arange(0, products.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        # A thread's columns without their common part, as in masks.py, are constants; the rest is a number for a row.
        own = keys & 6
        behind = (rows + (alibi.position - first_key) - own).to(gl.float32)
        ahead = (keys - own).to(gl.float32)
        if SPEC.CAUSAL:
            products = gl.fma(products, exp2_scale, gl.fma(ahead, alibi.slope, -alibi.slope * behind))
        else:
            products = gl.fma(products, exp2_scale, -alibi.slope * gl.abs(behind - ahead))
    return products


@gluon.jit
def score_exp2_scale(exp2_scale, alibi, SPEC: gl.constexpr):
    """The factor from scores to exponents of 2. exp2_scale: that of products."""
    if SPEC.SOFTCAP > 0:
        exp2_scale = SPEC.SOFTCAP * LOG2_E
    if alibi is not None:
        exp2_scale = 1.0
    return exp2_scale
