"""A linear layer and its GELU in one function: torch's matrix product, then one kernel for bias and GELU.

Backward, one kernel computes the gradients of the product and of the bias, whose reduction would otherwise read the
whole gradient once more. A program owns a range of columns and loops over rows, so that it reads their biases once
and accumulates the bias gradients in registers.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch, sm_count
from ..operators import below_autograd, in_backward, operator
from .checks import check_device, check_operands, no_second_derivative
from .linear import linear


class Tile(NamedTuple):
    """How elements are distributed over programs."""

    rows: int  # that a program holds at a time
    columns: int  # that a program owns
    warps: int  # per program; with columns / 256 or more, sums over rows stay within threads
    programs: int  # per SM
    stages: int  # num_stages of the row loop; 1: no prefetch


# 65,536 x 3,072 in bfloat16 on an H200: 202 and 301 us, 4.0 TB/s.
FORWARD = Tile(rows=4, columns=1024, warps=4, programs=8, stages=1)
BACKWARD = Tile(rows=1, columns=1024, warps=4, programs=6, stages=3)
# tanh(u) = 2 sigmoid(2 u) - 1, so GELU(x) = x sigmoid(2 u) with 2 u = LINEAR x + CUBIC x^3.
LINEAR = tl.constexpr(2 * math.sqrt(2 / math.pi))
CUBIC = tl.constexpr(2 * math.sqrt(2 / math.pi) * 0.044715)
LOG2_E = tl.constexpr(math.log2(math.e))
# The sigmoid saturates long before x^2 reaches LARGE. The clamp keeps out an infinite x^2: 0 * inf is NaN.
LARGE = tl.constexpr(1e4)
FINITE = tl.constexpr(3e38)  # just below the largest float32


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """GELU(x @ weight.T + bias), tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2).

    Bias and GELU are computed in float32. Gradients are bitwise repeatable. The backward may run repeatedly, but
    there is no second derivative.

    Args:
        x: (..., inner). All inputs are float32, bfloat16 or float16.
        weight: (width, inner). bias: (width,), or None.

    Returns:
        (..., width), contiguous, in the product's dtype (under autocast the autocast dtype).

    Raises:
        ValueError: mismatched shape, dtype or device of bias. FusedError: our kernels cannot run here.
    """
    pre = linear(x, weight)
    check_operands(pre, **({} if bias is None else {"bias": bias}))
    # In eager mode, what the operator would call, without the dispatcher; torch.compile sees the operator.
    return bias_gelu(pre, bias) if torch.compiler.is_compiling() else _BiasGelu.apply(pre, bias)


def bias_gelu(pre: Tensor, bias: Tensor | None) -> Tensor:
    """The operator: GELU(pre + bias), like pre."""
    check_device("linear_gelu", pre.device.type)
    out = pre.new_empty(pre.shape)
    _launch_forward(pre.contiguous(), bias if bias is None else bias.contiguous(), out)
    return out


def bias_gelu_backward(d_out: Tensor, pre: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """d_pre, like pre, and d_bias, float32 (width,), empty without bias."""
    d_pre = pre.new_empty(pre.shape)
    if bias is not None:
        bias = bias.contiguous()
    return d_pre, _launch_backward(d_out.contiguous(), pre.contiguous(), bias, d_pre)


class _BiasGelu(torch.autograd.Function):
    """`bias_gelu` with its gradient."""

    @staticmethod
    def forward(ctx, pre, bias):
        ctx.save_for_backward(pre, bias)
        return below_autograd(bias_gelu, pre, bias)

    @staticmethod
    def backward(ctx, d_out):
        pre, bias = ctx.saved_tensors
        d_pre, d_bias = in_backward(bias_gelu_backward, d_out, pre, bias)
        return d_pre, None if bias is None else d_bias.to(bias.dtype)


bias_gelu = operator(bias_gelu, lambda pre, bias: pre.new_empty(pre.shape), _BiasGelu.apply)
bias_gelu_backward = operator(
    bias_gelu_backward,
    lambda d_out, pre, bias: (pre.new_empty(pre.shape), _empty_d_bias(pre, bias)),
    no_gradient=no_second_derivative,
)


def _empty_d_bias(pre: Tensor, bias: Tensor | None) -> Tensor:
    return pre.new_empty(0 if bias is None else bias.shape, dtype=torch.float32)


def _launch_forward(pre: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write out = GELU(pre + bias). pre, out: (..., width), contiguous; bias: (width,), or None."""
    width = pre.shape[-1]
    rows = pre.shape[:-1].numel()

    def prepare():
        grid = (*_grid(FORWARD, rows, width, pre.device), 1)
        numbers = (rows, width, FORWARD.rows, FORWARD.columns, FORWARD.stages)
        return bias_gelu_kernel, grid, numbers, {"num_warps": FORWARD.warps}

    if pre.numel():
        launch((pre, bias, out), ("bias_gelu", rows, width), prepare)


def _launch_backward(d_out: Tensor, pre: Tensor, bias: Tensor | None, d_pre: Tensor) -> Tensor:
    """Write d_pre. Returns its sum over rows, the gradient of bias, before d_pre is rounded: float32 (width,)."""
    width = pre.shape[-1]
    rows = pre.shape[:-1].numel()
    across, down = _grid(BACKWARD, rows, width, pre.device)
    partials = None if bias is None else bias.new_empty((down, width), dtype=torch.float32)

    def prepare():
        numbers = (rows, width, BACKWARD.rows, BACKWARD.columns, BACKWARD.stages)
        return bias_gelu_backward_kernel, (across, down, 1), numbers, {"num_warps": BACKWARD.warps}

    if pre.numel():
        launch((d_out, pre, bias, d_pre, partials), ("bias_gelu_backward", rows, width), prepare)
    return _empty_d_bias(pre, bias) if partials is None else partials.sum(0)


@functools.lru_cache(1024)  # Triton's cdiv and next_power_of_2 cost 5 us a call
def _grid(tile: Tile, rows: int, width: int, device: torch.device) -> tuple[int, int]:
    """The grid: (programs across the columns, programs down the rows)."""
    across = max(triton.cdiv(width, tile.columns), 1)
    down = max(sm_count(device) * tile.programs // across, 1)
    return across, min(down, triton.cdiv(rows, tile.rows))


@triton.jit
def bias_gelu_kernel(
    Pre,
    Bias,
    Out,
    rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A grid-stride loop over blocks of ROWS rows. Grid: see `_grid`."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < WIDTH) | (WIDTH % COLUMNS == 0)
    if Bias is not None:
        bias = tl.load(Bias + columns, mask=inside, other=0.0).to(tl.float32)
    of_block = tl.arange(0, ROWS)
    offsets = of_block[:, None] * WIDTH + columns[None, :]
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        here = (block * ROWS + of_block < rows)[:, None] & inside[None, :]
        begin = tl.cast(block, tl.int64) * (ROWS * WIDTH)
        x = tl.load(Pre + begin + offsets, mask=here, other=0.0).to(tl.float32)
        if Bias is not None:
            x += bias[None, :]
        square = tl.minimum(x * x, LARGE)
        s, _ = sigmoid(x, square)
        out = x * s
        tl.store(Out + begin + offsets, out.to(Out.dtype.element_ty), mask=here)


@triton.jit
def bias_gelu_backward_kernel(
    DOut,
    Pre,
    Bias,
    DPre,
    Partials,
    rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Loop and grid as in the forward. With s = sigmoid(2 u), GELU' = s + x s (1 - s) 2 u'."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < WIDTH) | (WIDTH % COLUMNS == 0)
    if Bias is not None:
        bias = tl.load(Bias + columns, mask=inside, other=0.0).to(tl.float32)
    d_bias = tl.zeros([COLUMNS], tl.float32)
    of_block = tl.arange(0, ROWS)
    offsets = of_block[:, None] * WIDTH + columns[None, :]
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        here = (block * ROWS + of_block < rows)[:, None] & inside[None, :]
        begin = tl.cast(block, tl.int64) * (ROWS * WIDTH)
        x = tl.load(Pre + begin + offsets, mask=here, other=0.0).to(tl.float32)
        if Bias is not None:
            x += bias[None, :]
        d = tl.load(DOut + begin + offsets, mask=here, other=0.0).to(tl.float32)
        square = tl.minimum(x * x, LARGE)
        s, e = sigmoid(x, square)
        # 1 - s is computed as e s, since the difference would cancel. For huge |x|, s or e is 0, so their product is
        # 0 and stays 0 when multiplied by x.
        d *= s + s * (tl.minimum(e, FINITE) * s) * x * (LINEAR + 3 * CUBIC * square)
        tl.store(DPre + begin + offsets, d.to(DPre.dtype.element_ty), mask=here)
        if Bias is not None:
            d_bias += tl.sum(d, 0)
    if Bias is not None:
        tl.store(Partials + tl.program_id(1) * WIDTH + columns, d_bias, mask=inside)


@triton.jit
def sigmoid(x, square):
    """(sigmoid(2 u) = 1 / (1 + e), e). square: x^2, clamped to LARGE."""
    e = tl.exp2(x * (-LOG2_E * LINEAR - LOG2_E * CUBIC * square))
    return 1.0 / (1.0 + e), e
