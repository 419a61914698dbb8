"""The language-model head and its loss in one operator that never materialises the full logits.

The logits of GPT-2 at 64 x 1024 tokens are 13 GB in float32, and so is their gradient. Here rows are processed in
chunks: one matrix product computes a chunk's logits, one kernel overwrites them with their gradient, and two matrix
products add that to the gradients of hidden and weight. The gradients are thus complete when the forward ends, and
the backward only scales them. (The idea is Liger-Kernel's, Hsu et al. 2024, arXiv 2410.10989.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import in_autocast_dtype
from ..launch import launch
from ..operators import NAMESPACE, has_tangent
from . import FusedError
from .checks import check_device, check_dtype, make_known_to_inductor

# Logits held at a time. Larger chunks make larger matrix products and fewer additions to the weight's gradient, with
# little left to gain: 65,536 x 768 by 50,304 in bf16 takes an H200 29.8 ms with 256 MiB, 28.1 with 512 MiB, 28.0 with
# 2 GiB.
CHUNK_BYTES = 512 << 20
TILE = 128  # rows in a GEMM tile; a chunk is a multiple of it, so no tile is partly empty

# A row of 50,304 16-bit logits is 98 KiB and is read twice. With this many warps per row, few enough rows are in
# flight for the second read to hit the L2 cache: 5,120 rows took 321 us on an H200, and 385 with 4 warps per row.
WARPS = 16
LANES = 4096  # columns with a running maximum and sum of their own: 16 bytes per thread
DEPTH = 2  # times LANES columns per step: one rescaling exponential for DEPTH others
LOWEST = tl.constexpr(-3.0e38)  # below every logit, but finite: -inf - -inf is NaN
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Mean NLL in nats of `targets` under softmax(hidden @ weight[:vocab_size].T), over targets >= 0.

    Args:
        hidden: (rows, width); float32, bfloat16 or float16. The products are in autocast's dtype if enabled,
            otherwise in hidden's.
        weight: (padded vocabulary, width), in any of these dtypes; rows from vocab_size on have probability 0 and get
            no gradient.
        targets: int64 (rows,), below vocab_size; negative for rows to ignore.
        vocab_size: number of ids that can be predicted.

    Returns:
        0-d float32; 0 if all rows are ignored, NaN if a target is vocab_size or more (not checked on the host). The
        backward may run repeatedly, but a second derivative (create_graph=True) is refused, and so is forward-mode
        differentiation.

    Raises:
        ValueError: mismatched shapes, dtypes or devices. FusedError: our kernels cannot run here.
    """
    _check(hidden, weight, targets, vocab_size)
    if has_tangent(hidden, weight):
        raise _lacks("forward-mode")
    (hidden,) = in_autocast_dtype(hidden)
    with_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss, *_ = _forward(hidden.contiguous(), weight, targets.contiguous(), vocab_size, with_gradient)
    return loss


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> None:
    """Check shapes, dtypes and devices: the kernel reads `rows` targets without bounds checks."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        got = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"hidden must be (rows, width) and weight (padded vocabulary, width), got {got}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        got = f"{targets.dtype} {tuple(targets.shape)}"
        raise ValueError(f"targets must be int64 ({hidden.shape[0]},), one per row of hidden, got {got}")
    for name, tensor in (("weight", weight), ("targets", targets)):
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, but hidden on {hidden.device}")
    check_dtype("hidden", hidden)
    check_dtype("weight", weight)
    if not 0 < vocab_size <= weight.shape[0]:
        raise ValueError(f"vocab_size must be 1 to {weight.shape[0]}, the rows of weight, got {vocab_size}")


def _lacks(derivative: str) -> FusedError:
    return FusedError(f"model.loss=fused has no {derivative} derivative; use model.loss=torch")


@torch.library.custom_op(f"{NAMESPACE}::linear_cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mean NLL, gradients of the summed NLL in hidden and in weight, number of rows that count).

    Gradients of the sum, not the mean, because softmax - 1 is in float16's range and a small fraction of it may
    underflow. That in weight is float32, since a sum over rows may overflow float16. Without `with_gradient` they are
    empty.
    """
    check_device("linear_cross_entropy", hidden.device.type)
    loss, d_hidden, d_weight, counted = _empty_results(hidden, weight, with_gradient)
    counted.copy_((targets >= 0).sum().clamp(min=1))
    losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    d_weight.zero_()
    chunk = _chunk(hidden.shape[0], weight.shape[0] * hidden.element_size())
    with torch.autocast(hidden.device.type, enabled=False):
        head = weight.to(hidden.dtype)
        for begin in range(0, hidden.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            logits = hidden[rows] @ head.T  # (chunk, padded vocabulary)
            softmax_gradient(logits, targets[rows], losses[rows], vocab_size, with_gradient)
            if with_gradient:
                torch.mm(logits, head, out=d_hidden[rows])
                _add_product(d_weight, logits.T, hidden[rows])
            del logits  # before the next chunk's are allocated, so that only one chunk is live
    loss.copy_(losses.sum() / counted)
    return loss, d_hidden, d_weight, counted


def _chunk(rows: int, row_bytes: int) -> int:
    """Rows per chunk: as few chunks as CHUNK_BYTES allows, all equal except the last."""
    chunks = max(1, -(-rows * row_bytes // CHUNK_BYTES))
    chunk = max(1, -(-rows // chunks))
    return chunk if chunk < TILE else -(-chunk // TILE) * TILE


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, with total in float32."""
    if a.device.type == "cuda" and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _empty_results(
    hidden: Tensor, weight: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, counted = (hidden.new_empty((), dtype=torch.float32) for _ in range(2))
    if not with_gradient:
        return loss, hidden.new_empty(0), weight.new_empty(0, dtype=torch.float32), counted
    return loss, torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32), counted


@_forward.register_fake
def _(hidden, weight, targets, vocab_size, with_gradient):
    make_known_to_inductor(_forward._opoverload)
    return _empty_results(hidden, weight, with_gradient)


def _save(ctx, inputs, output):
    _, d_hidden, d_weight, counted = output
    ctx.mark_non_differentiable(d_hidden, d_weight, counted)
    ctx.save_for_backward(d_hidden, d_weight, counted)
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype


def _backward(ctx, d_loss, *_):
    if torch.is_grad_enabled():  # create_graph: the saved gradients have no graph
        raise _lacks("second")
    d_hidden, d_weight, counted = ctx.saved_tensors
    share = d_loss / counted  # float32, as the products are: rounding it would rescale every gradient
    summed = zip((d_hidden, d_weight), ctx.dtypes, strict=True)
    d_hidden, d_weight = ((x.float() * share).to(dtype) for x, dtype in summed)
    return d_hidden, d_weight, None, None, None


_forward.register_autograd(_backward, setup_context=_save)


def softmax_gradient(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
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
    # is multiplied, and is not merged with the sum: near 1e5 either would be rounded by a hundredth.
    lane_max = tl.full([LANES], LOWEST, tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    for begin in range(0, whole, DEPTH * LANES):
        x = tl.load(Logits + begin + columns).to(tl.float32)
        lane_max, lane_sum = add_exponentials(lane_max, lane_sum, x)
    for begin in range(whole, width, DEPTH * LANES):
        x = load_tail(Logits, begin + columns, vocab_size, width)
        lane_max, lane_sum = add_exponentials(lane_max, lane_sum, x)
    row_max = tl.max(lane_max)
    log_sum = tl.log2(tl.sum(lane_sum * tl.exp2((lane_max - row_max) * LOG2_E)))
    counts = target >= 0
    known = counts & (target < vocab_size)
    at_target = tl.load(Logits + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(Losses + row, tl.where(counts, (row_max - at_target) + log_sum * LN_2, 0.0))

    # Pass 2: d NLL / d logit = softmax, minus 1 at the target; 0 in the padding and in ignored rows.
    if WITH_GRADIENT:
        tl.debug_barrier()  # every thread has read its logit at the target
        shift = tl.where(counts, log_sum, float("inf"))
        for begin in range(0, whole, DEPTH * LANES):
            x = tl.load(Logits + begin + columns).to(tl.float32)
            gradient = tl.exp2((x - row_max) * LOG2_E - shift)
            tl.store(Logits + begin + columns, gradient.to(Logits.dtype.element_ty))
        for begin in range(whole, width, DEPTH * LANES):
            x = load_tail(Logits, begin + columns, vocab_size, width)
            gradient = tl.exp2((x - row_max) * LOG2_E - shift)
            tl.store(
                Logits + begin + columns, gradient.to(Logits.dtype.element_ty), mask=begin + columns < width
            )
        tl.debug_barrier()  # every thread has written its softmax
        gradient = tl.exp2((at_target - row_max) * LOG2_E - shift) - 1.0
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
