"""The softmax of logits, its loss, and its gradient in place: the kernel of `linear_cross_entropy`.

An option that is off generates no code: the kernel is then the one that was measured.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch

# A row of 50,304 16-bit logits is 98 KiB and is read twice. With this many warps per row, few enough rows are in
# flight for the second read to hit the L2 cache: 5,120 rows took 321 us on an H200, and 385 with 4 warps per row.
WARPS = 16
LANES = 4096  # columns with a running maximum and sum of their own: 16 bytes per thread
DEPTH = 2  # times LANES columns per step: one rescaling exponential for DEPTH others
LOWEST = tl.constexpr(-3.0e38)  # below every logit, but finite: -inf - -inf is NaN
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Terms(NamedTuple):
    """What the loss of a row has besides its NLL; 0 for none."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0


def softmax_gradient(
    logits: Tensor, targets: Tensor, losses: Tensor, vocab_size: int, with_gradient: bool, terms: Terms
) -> None:
    """Write each row's loss to losses (float32 (rows,)), and if with_gradient overwrite logits with their gradients.

    logits: (rows, padded vocabulary), contiguous. targets: int64 (rows,), contiguous; negative for rows to ignore. A
    target of vocab_size or more gives a loss of NaN.
    """
    grid = (logits.shape[0], 1, 1)
    numbers = (logits.stride(0), vocab_size, logits.shape[1], with_gradient, *terms, DEPTH, LANES)

    def prepare():
        return softmax_gradient_kernel, grid, numbers, {"num_warps": WARPS}

    launch((logits, targets, losses), ("softmax_gradient", grid, numbers), prepare)


@triton.jit
def softmax_gradient_kernel(
    Logits,
    Targets,
    Losses,
    stride_row,
    vocab_size,
    width,
    WITH_GRADIENT: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program per row. Grid (rows,).

    With logits z, capped to SOFTCAP * tanh(z / SOFTCAP), and lse = log sum e^z, the loss of a row is
    lse - z[target] + SMOOTHING * (z[target] - mean(z)) + Z_LOSS * lse^2 (Szegedy et al. 2015, arXiv 1512.00567;
    Chowdhery et al. 2022, PaLM, section 5).
    """
    row = tl.program_id(0).to(tl.int64)
    Logits += row * stride_row
    target = tl.load(Targets + row)
    columns = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = vocab_size // (DEPTH * LANES) * (DEPTH * LANES)

    # Pass 1: maximum and sum of exponentials, online (Milakov and Gimelshein 2018, arXiv 1805.02867), separately for
    # each lane: one reduction over lanes at the end instead of two per step. The maximum is subtracted before the
    # factor log2(e), and is not merged with the sum: near 1e5 either would be rounded by a hundredth.
    lane_max = tl.full([LANES], LOWEST, tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    if SMOOTHING > 0:  # the sum of z[target] - z, which does not lose what the logits have in common
        lane_below = tl.zeros([LANES], tl.float32)
        origin = tl.load(Logits + target, mask=(target >= 0) & (target < vocab_size), other=0.0)
        origin = capped(origin.to(tl.float32), SOFTCAP)
    for begin in range(0, whole, DEPTH * LANES):
        x = capped(tl.load(Logits + begin + columns).to(tl.float32), SOFTCAP)
        lane_max, lane_sum = add_exponentials(lane_max, lane_sum, x)
        if SMOOTHING > 0:
            lane_below += tl.sum(origin - x, 0)
    for begin in range(whole, width, DEPTH * LANES):
        x = load_tail(Logits, begin + columns, vocab_size, width, SOFTCAP)
        lane_max, lane_sum = add_exponentials(lane_max, lane_sum, x)
        if SMOOTHING > 0:
            lane_below += tl.sum(tl.where(begin + columns < vocab_size, origin - x, 0.0), 0)
    row_max = tl.max(lane_max)
    log_sum = tl.log2(tl.sum(lane_sum * tl.exp2((lane_max - row_max) * LOG2_E)))
    counts = target >= 0
    known = counts & (target < vocab_size)
    at_target = capped(tl.load(Logits + target, mask=known, other=float("nan")).to(tl.float32), SOFTCAP)
    Losses += row
    loss = (row_max - at_target) + log_sum * LN_2
    growth = 1.0  # the z-loss's factor of the softmax in the gradient
    if Z_LOSS > 0:
        lse = row_max + log_sum * LN_2
        loss += Z_LOSS * lse * lse
        growth = 1 + 2 * Z_LOSS * lse
    if SMOOTHING > 0:
        loss += SMOOTHING / vocab_size * tl.sum(lane_below)
    tl.store(Losses, tl.where(counts, loss, 0.0))

    # Pass 2: d NLL / d logit = softmax, minus 1 at the target; 0 in the padding and in ignored rows. Label smoothing
    # subtracts the same from every logit, SMOOTHING in all, and SMOOTHING less at the target.
    if WITH_GRADIENT:
        tl.debug_barrier()  # every thread has read its logit at the target
        shift = tl.where(counts, log_sum, float("inf"))
        everywhere = tl.where(counts, SMOOTHING / vocab_size, 0.0) if SMOOTHING > 0 else 0.0
        for begin in range(0, whole, DEPTH * LANES):
            x = capped(tl.load(Logits + begin + columns).to(tl.float32), SOFTCAP)
            gradient = tl.exp2((x - row_max) * LOG2_E - shift)
            gradient = with_terms(gradient, x, growth, everywhere, SMOOTHING, Z_LOSS, SOFTCAP)
            tl.store(Logits + begin + columns, gradient.to(Logits.dtype.element_ty))
        for begin in range(whole, width, DEPTH * LANES):
            x = load_tail(Logits, begin + columns, vocab_size, width, SOFTCAP)
            gradient = tl.exp2((x - row_max) * LOG2_E - shift)
            if SMOOTHING > 0 or SOFTCAP > 0:
                gradient = with_terms(gradient, x, growth, everywhere, SMOOTHING, Z_LOSS, SOFTCAP)
                gradient = tl.where(begin + columns < vocab_size, gradient, 0.0)
            elif Z_LOSS > 0:
                gradient *= growth
            tl.store(
                Logits + begin + columns, gradient.to(Logits.dtype.element_ty), mask=begin + columns < width
            )
        tl.debug_barrier()  # every thread has written its softmax
        gradient = tl.exp2((at_target - row_max) * LOG2_E - shift)
        if SMOOTHING > 0 or Z_LOSS > 0:
            gradient = gradient * growth - everywhere - (1.0 - SMOOTHING)
        else:
            gradient = gradient - 1.0
        if SOFTCAP > 0:
            gradient *= 1 - (at_target / SOFTCAP) * (at_target / SOFTCAP)
        tl.store(Logits + target, gradient.to(Logits.dtype.element_ty), mask=known)


@triton.jit
def load_tail(Logits, columns, vocab_size, width, SOFTCAP: tl.constexpr):
    """Load logits of the last, partial steps, capped: -inf from vocab_size on."""
    # The load is masked by width, a multiple of 64, not by vocab_size, so that it stays a 16-byte vector load.
    x = capped(tl.load(Logits + columns, mask=columns < width, other=0.0).to(tl.float32), SOFTCAP)
    return tl.where(columns < vocab_size, x, float("-inf"))


@triton.jit
def add_exponentials(lane_max, lane_sum, x):
    """Update each lane's running maximum and sum of e^(x - maximum) with x (DEPTH, LANES)."""
    new_max = tl.maximum(lane_max, tl.max(x, 0))
    exponentials = tl.exp2((x - new_max[None, :]) * LOG2_E)
    lane_sum = lane_sum * tl.exp2((lane_max - new_max) * LOG2_E) + tl.sum(exponentials, 0)
    return new_max, lane_sum


@triton.jit
def capped(x, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(x / SOFTCAP), x without a cap."""
    if SOFTCAP > 0:
        ratio = x / SOFTCAP
        tanh = 1 - 2 / (tl.exp2(ratio * (2 * LOG2_E)) + 1)
        # The line above has an absolute error, however small tanh is; below 0.2 the series is accurate to float32.
        square = ratio * ratio
        series = ratio - ratio * square * (1 / 3 - square * (2 / 15 - square * (17 / 315)))
        x = SOFTCAP * tl.where(square < 0.04, series, tanh)
    return x


@triton.jit
def with_terms(
    gradient, x, growth, everywhere, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr
):
    """The softmax as a gradient in logits whose capped values are x."""
    if Z_LOSS > 0:
        gradient = gradient * growth
    if SMOOTHING > 0:
        gradient = gradient - everywhere
    if SOFTCAP > 0:
        gradient = gradient * (1 - (x / SOFTCAP) * (x / SOFTCAP))
    return gradient
