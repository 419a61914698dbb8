"""The Triton kernel of `linear_cross_entropy`: a row of logits becomes its loss and, in place, its gradient."""

import torch
import triton
import triton.language as tl

# A row of 50,304 16-bit logits is 98 KiB: read twice, the second time from the L2 cache. Not measured on a GPU yet.
BLOCK = 4096
WARPS = 8
LOWEST = tl.constexpr(-3.0e38)  # below every logit, and finite: -inf - -inf would be NaN


def launch(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    vocab_size: int,
    with_gradient: bool,
) -> None:
    """Write the NLL of each row (float32 (rows,)), and with_gradient overwrite logits with their gradients.

    logits: (rows, padded vocabulary), contiguous. targets: int64 (rows,), -1 for rows that do not count.
    """
    softmax_gradient_kernel[(logits.shape[0],)](
        logits, targets, losses, logits.stride(0), vocab_size, logits.shape[1],
        with_gradient, BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def softmax_gradient_kernel(
    Logits,
    Targets,
    Losses,
    stride_row,
    vocab_size,
    width,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    Logits += row * stride_row
    target = tl.load(Targets + row)
    columns = tl.arange(0, BLOCK)

    # Pass 1: maximum and sum of exponentials, online (Milakov and Gimelshein 2018, arXiv 1805.02867), each column of
    # the block for itself: one reduction over the block at the end instead of two a block.
    lane_max = tl.full([BLOCK], LOWEST, tl.float32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        at = begin + columns
        # Masked by width, a multiple of 64, and not by vocab_size, so that a thread loads 16 bytes at once.
        x = tl.load(Logits + at, mask=at < width, other=0.0).to(tl.float32)
        x = tl.where(at < vocab_size, x, float("-inf"))
        new_max = tl.maximum(lane_max, x)
        lane_sum = lane_sum * tl.exp(lane_max - new_max) + tl.exp(x - new_max)
        lane_max = new_max
    row_max = tl.max(lane_max)
    lse = row_max + tl.log(tl.sum(lane_sum * tl.exp(lane_max - row_max)))
    at_target = tl.load(Logits + target, mask=target >= 0, other=0.0).to(tl.float32)
    counts = target >= 0
    tl.store(Losses + row, tl.where(counts, lse - at_target, 0.0))

    # Pass 2: d NLL / d logit = softmax - 1 at the target; 0 in the padding and in rows that do not count.
    if WITH_GRADIENT:
        tl.debug_barrier()  # every thread has read its logit at the target
        for begin in range(0, width, BLOCK):
            at = begin + columns
            x = tl.load(Logits + at, mask=at < width, other=0.0).to(tl.float32)
            x = tl.where(at < vocab_size, x, float("-inf"))
            gradient = tl.where(counts, tl.exp(x - lse) - tl.where(at == target, 1.0, 0.0), 0.0)
            tl.store(Logits + at, gradient.to(Logits.dtype.element_ty), mask=at < width)
