"""The Triton kernel of `linear_cross_entropy`: the loss of a row of logits and, in place, its gradient."""

import torch
import triton
import triton.language as tl

from .launch import launch as launch_kernel

# A row of 50,304 16-bit logits is 98 KiB and is read twice. With this many warps per row, few enough rows are in
# flight for the second read to hit the L2 cache: 5,120 rows took 321 us on an H200, and 385 with 4 warps per row.
WARPS = 16
LANES = 4096  # columns with a running maximum and sum of their own: 16 bytes per thread
DEPTH = 2  # times LANES columns per step: one rescaling exponential for DEPTH others
LOWEST = tl.constexpr(-3.0e38)  # below every logit, but finite: -inf - -inf is NaN
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def launch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    vocab_size: int,
    with_gradient: bool,
) -> None:
    """Write each row's NLL to losses (float32 (rows,)), and if with_gradient overwrite logits with their gradients.

    logits: (rows, padded vocabulary), contiguous. targets: int64 (rows,), contiguous; negative for rows to ignore. A
    target of vocab_size or more gives a loss of NaN.
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
    """One program per row. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    Logits += row * stride_row
    target = tl.load(Targets + row)
    columns = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = vocab_size // (DEPTH * LANES) * (DEPTH * LANES)

    # Pass 1: maximum and sum of exponentials, online (Milakov and Gimelshein 2018, arXiv 1805.02867), separately for
    # each lane: one reduction over lanes at the end instead of two per step. The maximum is subtracted before log2(e)
    # is multiplied, and is not merged with the sum: of logits near 1e5 either would round a hundredth off.
    lane_max = tl.full([LANES], LOWEST, tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    for begin in range(0, whole, DEPTH * LANES):
        x = tl.load(Logits + begin + columns).to(tl.float32)
        lane_max, lane_sum = add_exponentials(lane_max, lane_sum, x)
    for begin in range(whole, width, DEPTH * LANES):
        x = load_tail(Logits, begin + columns, vocab_size, width)
        lane_max, lane_sum = add_exponentials(lane_max, lane_sum, x)
    row_max = tl.max(lane_max)
    row_sum = tl.sum(lane_sum * tl.exp2((lane_max - row_max) * LOG2_E))
    counts = target >= 0
    known = counts & (target < vocab_size)
    at_target = tl.load(Logits + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(Losses + row, tl.where(counts, (row_max - at_target) + tl.log2(row_sum) * LN_2, 0.0))

    # Pass 2: d NLL / d logit = softmax, minus 1 at the target; 0 in the padding and in ignored rows.
    if WITH_GRADIENT:
        tl.debug_barrier()  # every thread has read its logit at the target
        factor = tl.where(counts, 1.0 / row_sum, 0.0)
        for begin in range(0, whole, DEPTH * LANES):
            x = tl.load(Logits + begin + columns).to(tl.float32)
            gradient = tl.exp2((x - row_max) * LOG2_E) * factor
            tl.store(Logits + begin + columns, gradient.to(Logits.dtype.element_ty))
        for begin in range(whole, width, DEPTH * LANES):
            x = load_tail(Logits, begin + columns, vocab_size, width)
            gradient = tl.exp2((x - row_max) * LOG2_E) * factor
            tl.store(
                Logits + begin + columns, gradient.to(Logits.dtype.element_ty), mask=begin + columns < width
            )
        tl.debug_barrier()  # every thread has written its softmax
        gradient = tl.exp2((at_target - row_max) * LOG2_E) * factor - 1.0
        tl.store(Logits + target, gradient.to(Logits.dtype.element_ty), mask=known)


@triton.jit
def load_tail(Logits, columns, vocab_size, width):
    """Load logits of the last, partial steps: -inf from vocab_size on."""
    # The load is masked by width, a multiple of 64, not by vocab_size, so that it stays a 16-byte vector load.
    x = tl.load(Logits + columns, mask=columns < width, other=0.0).to(tl.float32)
    return tl.where(columns < vocab_size, x, float("-inf"))


@triton.jit
def add_exponentials(lane_max, lane_sum, x):
    """Update each lane's running maximum and sum of e^(x - maximum) with x (DEPTH, LANES)."""
    new_max = tl.maximum(lane_max, tl.max(x, 0))
    exponentials = tl.exp2((x - new_max[None, :]) * LOG2_E)
    lane_sum = lane_sum * tl.exp2((lane_max - new_max) * LOG2_E) + tl.sum(exponentials, 0)
    return new_max, lane_sum
