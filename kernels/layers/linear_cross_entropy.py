"""The language-model head and its loss in one operator that never materialises the full logits.

The logits of GPT-2 at 64 x 1024 tokens are 13 GB in float32, and so is their gradient. Here rows are processed in
chunks: one matrix product computes a chunk's logits, one kernel overwrites them with their gradient, and two matrix
products add that to the gradients of hidden and weight. The gradients are thus complete when the forward ends, and
the backward only scales them. (The idea is Liger-Kernel's, Hsu et al. 2024, arXiv 2410.10989.) With a gradient for
each row's loss, reduction="none", the backward computes the logits again.
"""

import torch
from torch import Size, Tensor
from torch.utils.flop_counter import register_flop_formula

from ..arguments import check_number, in_autocast_dtype
from ..operators import NAMESPACE, has_tangent
from . import FusedError
from .checks import check_device, check_dtype, make_known_to_inductor
from .softmax_gradient import Terms, softmax_gradient
from .sums import add_product, total_of

# Logits held at a time. Larger chunks make larger matrix products and fewer additions to the weight's gradient, with
# little left to gain: 65,536 x 768 by 50,304 in bf16 takes an H200 29.8 ms with 256 MiB, 28.1 with 512 MiB, 28.0 with
# 2 GiB.
CHUNK_BYTES = 512 << 20
TILE = 128  # rows in a GEMM tile; a chunk is a multiple of it, so no tile is partly empty
REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int | None = None,
    *,
    bias: Tensor | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = 0.0,
) -> Tensor:
    """NLL in nats of `targets` under softmax(hidden @ weight[:vocab_size].T + bias[:vocab_size]).

    Args:
        hidden: (rows, width); float32, bfloat16 or float16. The products are in autocast's dtype if enabled,
            otherwise in hidden's.
        weight: (padded vocabulary, width), in any of these dtypes; rows from vocab_size on have probability 0 and get
            no gradient. bias: (padded vocabulary,), likewise.
        targets: int64 (rows,), below vocab_size; negative for rows to ignore, or ignore_index.
        vocab_size: number of ids that can be predicted; None: all of weight's rows.
        reduction: "mean" over the rows that count, their "sum", or "none": (rows,), 0 where ignored.
        label_smoothing: the share of every target that is spread evenly over all ids, as in torch's cross_entropy.
        z_loss: adds z_loss * logsumexp(logits)^2 to each row's loss (PaLM, Chowdhery et al. 2022, section 5).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2); 0 or None for none.

    Returns:
        float32, 0-d or (rows,); 0 if all rows are ignored, NaN if a target is vocab_size or more (not checked on the
        host). The backward may run repeatedly, but a second derivative (create_graph=True) is refused, and so is
        forward-mode differentiation.

    Raises:
        ValueError: mismatched shapes, dtypes or devices, or an option out of its range. FusedError: our kernels
        cannot run here.
    """
    vocab_size = weight.shape[0] if vocab_size is None else vocab_size
    _check(hidden, weight, bias, targets, vocab_size)
    _check_options(reduction, label_smoothing, z_loss, softcap)
    if has_tangent(hidden, weight, *(() if bias is None else (bias,))):
        raise _lacks("forward-mode")
    if ignore_index is not None:
        targets = targets.masked_fill(targets == ignore_index, -1)
    (hidden,) = in_autocast_dtype(hidden)
    operands = (hidden.contiguous(), weight, bias, targets.contiguous(), vocab_size)
    terms = (label_smoothing, z_loss, softcap or 0.0)
    if reduction == "none":
        return _rows_forward(*operands, *terms)
    with_gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden, weight, bias)
    )
    loss, *_ = _forward(*operands, with_gradient, reduction == "mean", *terms, total_of(weight))
    return loss


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, vocab_size: int) -> None:
    """Check shapes, dtypes and devices: the kernel reads `rows` targets without bounds checks."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        got = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"hidden must be (rows, width) and weight (padded vocabulary, width), got {got}")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        got = f"{targets.dtype} {tuple(targets.shape)}"
        raise ValueError(f"targets must be int64 ({hidden.shape[0]},), one per row of hidden, got {got}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({weight.shape[0]},), one per row of weight, got {tuple(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias), ("targets", targets)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, but hidden on {hidden.device}")
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_dtype(name, tensor)
    if not 0 < vocab_size <= weight.shape[0]:
        raise ValueError(f"vocab_size must be 1 to {weight.shape[0]}, the rows of weight, got {vocab_size}")


def _check_options(reduction: str, label_smoothing: float, z_loss: float, softcap: float | None) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be mean, sum or none, got {reduction!r}")
    check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
    for name, value in (("z_loss", z_loss), ("softcap", softcap or 0.0)):
        check_number(name, value)
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, or 0 for none, got {value}")


def _lacks(derivative: str) -> FusedError:
    return FusedError(f"model.loss=fused has no {derivative} derivative; use model.loss=torch")


@torch.library.custom_op(f"{NAMESPACE}::linear_cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab_size: int,
    with_gradient: bool,
    mean: bool = True,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(mean or summed loss; gradients of the sum in hidden, weight and bias; what the sum is divided by).

    Gradients of the sum, not the mean, because softmax - 1 is in float16's range and a small fraction of it may
    underflow. Those in weight and bias are float32, since a sum over rows may overflow float16. Without
    `with_gradient` they are empty. total: what the backward adds weight's to, instead of giving it to autograd.
    """
    check_device("linear_cross_entropy", hidden.device.type)
    loss, *gradients, divisor = results = _empty_results(hidden, weight, bias, with_gradient)
    divisor.copy_((targets >= 0).sum().clamp(min=1) if mean else torch.ones_like(divisor))
    losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    terms = Terms(label_smoothing, z_loss, softcap)
    _by_chunks(hidden, weight, bias, targets, vocab_size, terms, losses, gradients if with_gradient else None)
    loss.copy_(losses.sum() / divisor)
    return results


def _by_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab_size: int,
    terms: Terms,
    losses: Tensor,
    gradients: list[Tensor] | None = None,
    shares: Tensor | None = None,
) -> None:
    """Write each row's loss to losses, and the gradients of their sum in hidden, weight and bias to `gradients`.

    shares: (rows, 1), each row's factor in the gradients of weight and bias.
    """
    chunk = _chunk(hidden.shape[0], weight.shape[0] * hidden.element_size())
    if gradients is not None:
        d_hidden, d_weight, d_bias = gradients
        d_weight.zero_()
        d_bias.zero_()
    with torch.autocast(hidden.device.type, enabled=False):
        head = weight.to(hidden.dtype)
        for begin in range(0, hidden.shape[0], chunk):
            rows = slice(begin, begin + chunk)
            logits = hidden[rows] @ head.T  # (chunk, padded vocabulary)
            if bias is not None:
                logits += bias
            softmax_gradient(logits, targets[rows], losses[rows], vocab_size, gradients is not None, terms)
            if gradients is not None:
                torch.mm(logits, head, out=d_hidden[rows])
                of_rows = hidden[rows]
                if shares is not None:
                    of_rows = of_rows * shares[rows]
                add_product(d_weight, logits.T, of_rows)
                if bias is not None:
                    if shares is not None:
                        logits *= shares[rows]
                    d_bias += logits.sum(0, dtype=torch.float32)
            del logits  # before the next chunk's are allocated, so that only one chunk is live


def _chunk(rows: int, row_bytes: int) -> int:
    """Rows per chunk: as few chunks as CHUNK_BYTES allows, all equal except the last."""
    chunks = max(1, -(-rows * row_bytes // CHUNK_BYTES))
    chunk = max(1, -(-rows // chunks))
    return chunk if chunk < TILE else -(-chunk // TILE) * TILE


def _empty_results(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss, divisor = (hidden.new_empty((), dtype=torch.float32) for _ in range(2))
    if with_gradient:
        return loss, *_empty_gradients(hidden, weight, bias), divisor
    nothing = hidden.new_empty(0), weight.new_empty(0, dtype=torch.float32), loss.new_empty(0)
    return loss, *nothing, divisor


def _empty_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    # Contiguous whatever the operands are: torch 2.13's addmm fails on a GPU if it writes a row with strides (1, 1).
    d_weight = weight.new_empty(weight.shape, dtype=torch.float32)
    d_bias = weight.new_empty(0 if bias is None else bias.shape[0], dtype=torch.float32)
    return hidden.new_empty(hidden.shape), d_weight, d_bias


@_forward.register_fake
def _(hidden, weight, bias, targets, vocab_size, with_gradient, *options):
    make_known_to_inductor(_forward._opoverload)
    return _empty_results(hidden, weight, bias, with_gradient)


def _save(ctx, inputs, output):
    _, *gradients, divisor = output
    ctx.mark_non_differentiable(*gradients, divisor)
    ctx.save_for_backward(*gradients, divisor)
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.total = inputs[-1]  # not saved: several backwards change it
    if ctx.total is not None:
        ctx.dtypes[1] = None


def _backward(ctx, d_loss, *_):
    if torch.is_grad_enabled():  # create_graph: the saved gradients have no graph
        raise _lacks("second")
    *summed, divisor = ctx.saved_tensors
    share = d_loss / divisor  # float32, as the products are: rounding it would rescale every gradient
    if ctx.total is not None:
        _add_scaled(ctx.total, summed[1], share)
    of_operands = [
        None if dtype is None else (x.float() * share).to(dtype)
        for x, dtype in zip(summed, ctx.dtypes, strict=True)
    ]
    return *of_operands, *(None,) * 8


@torch.library.custom_op(f"{NAMESPACE}::add_scaled", mutates_args=("total",))
def _add_scaled(total: Tensor, gradient: Tensor, share: Tensor) -> None:
    total.addcmul_(gradient, share)


@_add_scaled.register_fake
def _(total, gradient, share):
    return None


_forward.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op(f"{NAMESPACE}::linear_cross_entropy_rows", mutates_args=())
def _rows_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab_size: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    """Each row's loss, float32 (rows,)."""
    check_device("linear_cross_entropy", hidden.device.type)
    losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    terms = Terms(label_smoothing, z_loss, softcap)
    _by_chunks(hidden, weight, bias, targets, vocab_size, terms, losses)
    return losses


@torch.library.custom_op(f"{NAMESPACE}::linear_cross_entropy_rows_backward", mutates_args=())
def _rows_gradients(
    d_losses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab_size: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in hidden, in weight and in bias, the last two float32."""
    gradients = _empty_gradients(hidden, weight, bias)
    # Factors of at most 1: those of a mean, about 1 / rows, would underflow float16.
    largest = d_losses.abs().amax() if d_losses.numel() else d_losses.new_ones(())
    shares = torch.where(largest > 0, d_losses / largest, 0.0)[:, None]
    losses = torch.empty_like(d_losses)
    terms = Terms(label_smoothing, z_loss, softcap)
    operands = (hidden, weight, bias, targets, vocab_size, terms, losses)
    _by_chunks(*operands, list(gradients), shares.to(hidden.dtype))
    d_hidden, d_weight, d_bias = gradients
    return (d_hidden.float() * d_losses[:, None]).to(hidden.dtype), d_weight * largest, d_bias * largest


@_rows_forward.register_fake
def _(hidden, *rest):
    return hidden.new_empty(hidden.shape[0], dtype=torch.float32)


@_rows_gradients.register_fake
def _(d_losses, hidden, weight, bias, *rest):
    return _empty_gradients(hidden, weight, bias)


def _save_rows(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _rows_backward(ctx, d_losses):
    if torch.is_grad_enabled():
        raise _lacks("second")
    hidden, weight, bias, targets = ctx.saved_tensors
    d_hidden, d_weight, d_bias = _rows_gradients(
        d_losses.float(), hidden, weight, bias, targets, *ctx.options
    )
    d_bias = None if bias is None else d_bias.to(bias.dtype)
    return d_hidden, d_weight.to(weight.dtype), d_bias, *(None,) * 5


_rows_forward.register_autograd(_rows_backward, setup_context=_save_rows)


def _product_flops(hidden: Size, weight: Size) -> int:
    """FLOPs of all logits, and of either gradient: counted as for torch's layers, but all in the forward."""
    return 2 * hidden[0] * hidden[1] * weight[0]


@register_flop_formula(_forward._opoverload.overloadpacket)
def _(hidden, weight, bias, targets, vocab_size, with_gradient, *options, out_shape=None):
    return (3 if with_gradient else 1) * _product_flops(hidden, weight)


@register_flop_formula(_rows_forward._opoverload.overloadpacket)
def _(hidden, weight, *rest, out_shape=None):
    return _product_flops(hidden, weight)


@register_flop_formula(_rows_gradients._opoverload.overloadpacket)
def _(d_losses, hidden, weight, *rest, out_shape=None):
    return 3 * _product_flops(hidden, weight)
