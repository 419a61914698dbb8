"""Embedding lookup with a bitwise repeatable gradient.

The forward is torch's. In the backward, torch.compile accumulates the gradient rows of a token with atomics, in an
order that varies from run to run; ours sorts the tokens and sums in sorted order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused import check_dtype, kernels_of, no_second_derivative
from .operators import operator


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens].

    The gradient is summed in float32 and bitwise repeatable. The backward may run repeatedly, but there is no second
    derivative.

    Args:
        tokens: int64 or int32 (...), in [0, rows); torch refuses others.
        weight: (rows, width); float32, bfloat16 or float16.

    Returns:
        (..., width), contiguous, of weight's dtype.

    Raises:
        ValueError: another dtype of weight. FusedError: our kernels cannot run here.
    """
    check_dtype("weight", weight)
    # An autograd.Function in the graph would keep torch.compile from using its graph cache.
    return token_rows(tokens, weight) if torch.compiler.is_compiling() else _TokenRows.apply(tokens, weight)


def token_rows(tokens: Tensor, weight: Tensor) -> Tensor:
    """The operator: weight[tokens]."""
    return F.embedding(tokens, weight)


def embedding_gradient(d_out: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """The gradient of a table: (rows, width) in d_out's dtype. d_out: (..., width), tokens: (...)."""
    table = d_out.new_zeros((rows, d_out.shape[-1]))
    kernels_of("embedding_gradient", d_out.device.type).add_up(d_out.contiguous(), tokens.contiguous(), table)
    return table


class _TokenRows(torch.autograd.Function):
    """`token_rows` with its gradient."""

    @staticmethod
    def forward(ctx, tokens, weight):
        kernels_of("embedding_gradient", weight.device.type)  # raises now rather than in the backward
        ctx.save_for_backward(tokens)
        ctx.rows = weight.shape[0]
        # Not our operator: torch.compile sees torch's, and fuses it with what follows.
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, d_out):
        return None, embedding_gradient(d_out, *ctx.saved_tensors, ctx.rows)


token_rows = operator(
    token_rows, lambda tokens, weight: weight.new_empty((*tokens.shape, weight.shape[1])), _TokenRows.apply
)
embedding_gradient = operator(
    embedding_gradient,
    lambda d_out, tokens, rows: d_out.new_empty((rows, d_out.shape[-1])),
    no_gradient=no_second_derivative,
)
