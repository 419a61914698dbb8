"""Softcap in the Hopper kernels, on the products in a warpgroup's registers. Off, it generates no code.

As in portable/score_mods.py, tanh(x) = 1 - 2 r with r = 1 / (exp(2 x) + 1). Its absolute error, 2.4 * 2^-24, is less
than 16-bit rounding for caps up to 64 (`dispatch.SOFTCAP_MAX`); only the portable kernels have the series for others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .pipeline import LOG2_E

# P = exp2(cap * log2(e) * (tanh - 1) - lse) and P * tanh' from a product, -lse, and the factors of exp's and P's
# exponents, element by element: operation by operation, tanh and P of a tile are both live, and 1288 B are spilled
# (LOG.md). A product of -inf is masked: times 2^-100 it makes P 0, and one that is finite is lost in rounding.
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
    """P of products, and P * d score / d (scale * product). lse: to broadcast; base 2, with softcap less the cap."""
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


@gluon.jit
def modify_scores(products, exp2_scale, SPEC: gl.constexpr):
    """Map q k^T to scores, in units of `score_exp2_scale`."""
    if SPEC.SOFTCAP > 0:
        products = cap(products, exp2_scale, SPEC.SOFTCAP)
    return products


@gluon.jit
def score_exp2_scale(exp2_scale, SPEC: gl.constexpr):
    """The factor from scores to exponents of 2. exp2_scale: that of products."""
    if SPEC.SOFTCAP > 0:
        exp2_scale = SPEC.SOFTCAP * LOG2_E
    return exp2_scale
