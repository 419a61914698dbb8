"""The language-model head and its loss in one operator that never materialises the full logits.

The logits of GPT-2 at 64 x 1024 tokens are 13 GB in float32, and so is their gradient. Here rows are processed in
chunks: one matrix product computes a chunk's logits, one kernel overwrites them with their gradient, and two matrix
products add that to the gradients of hidden and weight. The gradients are thus complete when the forward ends, and
the backward only scales them. (The idea is Liger-Kernel's, Hsu et al. 2024, arXiv 2410.10989.)
"""

from __future__ import annotations

import torch

from .arguments import in_autocast_dtype
from .fused import FusedError, check_dtype, kernels_of, make_known_to_inductor
from .operators import NAMESPACE, has_tangent

# Logits held at a time. Larger chunks make larger matrix products and fewer additions to the weight's gradient, with
# little left to gain: 65,536 x 768 by 50,304 in bf16 takes an H200 29.8 ms with 256 MiB, 28.1 with 512 MiB, 28.0 with
# 2 GiB.
CHUNK_BYTES = 512 << 20
TILE = 128  # rows in a GEMM tile; a chunk is a multiple of it, so no tile is partly empty


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> torch.Tensor:
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


def _check(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> None:
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
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean NLL, gradients of the summed NLL in hidden and in weight, number of rows that count).

    Gradients of the sum, not the mean, because softmax - 1 is in float16's range and a small fraction of it may
    underflow. That in weight is float32, since a sum over rows may overflow float16. Without `with_gradient` they are
    empty.
    """
    loss, d_hidden, d_weight, counted = _empty_results(hidden, weight, with_gradient)
    counted.copy_((targets >= 0).sum().clamp(min=1))
    losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    d_weight.zero_()
    chunk = _chunk(hidden.shape[0], weight.shape[0] * hidden.element_size())
    kernels = kernels_of("softmax_gradient", hidden.device.type)
    with torch.autocast(hidden.device.type, enabled=False):
        head = weight.to(hidden.dtype)
        for begin in range(0, hidden.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            logits = hidden[rows] @ head.T  # (chunk, padded vocabulary)
            kernels.launch(logits, targets[rows], losses[rows], vocab_size, with_gradient)
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


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, with total in float32."""
    if a.device.type == "cuda" and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _empty_results(
    hidden: torch.Tensor, weight: torch.Tensor, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
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
