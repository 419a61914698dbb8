"""Score modifiers, applied between q k^T and the mask: softcap and ALiBi. One that is off generates no code."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def modify_scores(products, rows, keys, rules, SPEC: tl.constexpr):
    """Map q k^T to scores, in units of `score_exp2_scale`; also d score / d (scale * q k^T), 1 without softcap."""
    derivative = 1.0
    if SPEC.SOFTCAP > 0:
        tanh = 1 - 2 / (tl.exp2(products * (2 * LOG2_E / SPEC.SOFTCAP * rules.scale)) + 1)
        if SPEC.SOFTCAP > 64:
            # The line above has an absolute error of up to 2.4 * 2^-24, however small tanh is, and the cap multiplies
            # it: out was off by 0.06 at a cap of 1e6. Below 0.2 the series is accurate to float32. Caps up to 64 lose
            # less than 16-bit rounding does.
            x = products * (rules.scale / SPEC.SOFTCAP)
            square = x * x
            series = x - x * square * (1 / 3 - square * (2 / 15 - square * (17 / 315)))
            tanh = tl.where(square < 0.04, series, tanh)
        products = tanh * (SPEC.SOFTCAP * LOG2_E)
        derivative = 1 - tanh * tanh
    elif SPEC.ALIBI:
        products = products * (rules.scale * LOG2_E)
    if SPEC.ALIBI:
        products -= rules.slope * LOG2_E * tl.abs(keys - rows - (rules.kv_len - rules.q_len))
    return products, derivative


@triton.jit
def score_exp2_scale(rules, SPEC: tl.constexpr):
    """The factor from scores to exponents of 2. Plain scores stay unscaled, since exp2's multiply-add applies it."""
    exp2_scale = rules.scale * LOG2_E
    if SPEC.SOFTCAP > 0 or SPEC.ALIBI:
        exp2_scale = 1.0
    return exp2_scale
