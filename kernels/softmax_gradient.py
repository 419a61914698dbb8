"""The Triton kernel of `linear_cross_entropy`: a row of logits becomes its loss and, in place, its gradient."""

import torch
import triton
import triton.language as tl

from .launch import launch as launch_kernel

# A row of 50,304 16-bit logits is 98 KiB and read twice. With this many warps few enough rows are under way for the
# second reading to come from the L2 cache: 5,120 rows in 321 us on an H200, where 4 warps a row took 385.
WARPS = 16
LANES = 4096  # columns that keep a maximum and a sum of their own: 16 bytes of every thread
DEPTH = 2  # times LANES columns a step: for so many exponentials there is one of a maximum that has grown
LOWEST = tl.constexpr(-3.0e38)  # below every logit, and finite: -inf - -inf would be NaN
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def launch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    vocab_size: int,
    with_gradient: bool,
) -> None:
    """Write the NLL of each row (float32 (rows,)), and with_gradient overwrite logits with their gradients.

    logits: (rows, padded vocabulary), contiguous. targets: int64 (rows,), contiguous; negative for rows that do not
    count, and of one that is vocab_size or more the loss is NaN.
    """
    grid = (logits.shape[0], 1, 1)
    numbers = (logits.stride(0), vocab_size, logits.shape[1], with_gradient, DEPTH, LANES)

    def prepare():
        return softmax_gradient_kernel, grid, numbers, {"num_warps": WARPS}

    launch_kernel((logits, targets, losses), ("softmax_gradient", grid, numbers), prepare)


@triton.jit
def softmax_gradient_kernel(
    Logits,
    Targets,
    Losses,
    stride_row,
    vocab_size,
    width,
    WITH_GRADIENT: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    Logits += row * stride_row
    target = tl.load(Targets + row)
    columns = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = vocab_size // (DEPTH * LANES) * (DEPTH * LANES)

    # Pass 1: maximum and sum of exponentials, online (Milakov and Gimelshein 2018, arXiv 1805.02867), each lane for
    # itself: one reduction over the lanes at the end instead of two a step. Logits in units of log 2, for exp2.
    lane_max = tl.full([LANES], LOWEST, tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    for begin in range(0, whole, DEPTH * LANES):
        x = tl.load(Logits + begin + columns).to(tl.float32) * LOG2_E
        lane_max, lane_sum = add_exponentials(lane_max, lane_sum, x)
    for begin in range(whole, width, DEPTH * LANES):
        x = load_tail(Logits, begin + columns, vocab_size, width)
        lane_max, lane_sum = add_exponentials(lane_max, lane_sum, x)
    row_max = tl.max(lane_max)
    lse = row_max + tl.log2(tl.sum(lane_sum * tl.exp2(lane_max - row_max)))
    counts = target >= 0
    known = counts & (target < vocab_size)
    at_target = tl.load(Logits + target, mask=known, other=float("nan")).to(tl.float32) * LOG2_E
    tl.store(Losses + row, tl.where(counts, (lse - at_target) * LN_2, 0.0))

    # Pass 2: d NLL / d logit = softmax - 1 at the target; 0 in the padding and in rows that do not count.
    if WITH_GRADIENT:
        tl.debug_barrier()  # every thread has read its logit at the target
        shift = tl.where(counts, lse, float("inf"))
        for begin in range(0, whole, DEPTH * LANES):
            x = tl.load(Logits + begin + columns).to(tl.float32) * LOG2_E
            tl.store(Logits + begin + columns, tl.exp2(x - shift).to(Logits.dtype.element_ty))
        for begin in range(whole, width, DEPTH * LANES):
            x = load_tail(Logits, begin + columns, vocab_size, width)
            gradient = tl.exp2(x - shift).to(Logits.dtype.element_ty)
            tl.store(Logits + begin + columns, gradient, mask=begin + columns < width)
        tl.debug_barrier()  # and written its softmax there
        tl.store(Logits + target, (tl.exp2(at_target - lse) - 1.0).to(Logits.dtype.element_ty), mask=known)


@triton.jit
def load_tail(Logits, columns, vocab_size, width):
    """Logits from the last whole step on: -inf from vocab_size on."""
    # Masked by width, a multiple of 64, and not by vocab_size, so that a thread loads 16 bytes at once.
    x = tl.load(Logits + columns, mask=columns < width, other=0.0).to(tl.float32) * LOG2_E
    return tl.where(columns < vocab_size, x, float("-inf"))


@triton.jit
def add_exponentials(lane_max, lane_sum, x):
    """The running maximum and sum of 2^(x - maximum) of each lane, with x (DEPTH, LANES) taken in."""
    new_max = tl.maximum(lane_max, tl.max(x, 0))
    lane_sum = lane_sum * tl.exp2(lane_max - new_max) + tl.sum(tl.exp2(x - new_max[None, :]), 0)
    return new_max, lane_sum
