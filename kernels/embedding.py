"""The rows of a table that tokens name, with a gradient that is bit for bit repeatable.

Forward it is torch's. Back, torch.compile adds each row of the gradient to its token's with atomics, in an order that
is another one each time. Ours sorts the tokens and sums in their order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused import check_dtype, kernels_of, no_second_derivative
from .operators import operator


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens].

    The gradient is summed in float32. It is bit for bit repeatable, and can be taken once or many times, but not
    twice over.

    Args:
        tokens: int64 or int32 (...), in [0, rows); torch refuses others.
        weight: (rows, width); float32, bfloat16 or float16.

    Returns:
        (..., width), contiguous, of weight's dtype.

    Raises:
        ValueError: another dtype. FusedError: our kernels cannot run here.
    """
    check_dtype("weight", weight)
    # An autograd.Function in its graph would keep torch.compile from using its cache of graphs.
    return token_rows(tokens, weight) if torch.compiler.is_compiling() else _TokenRows.apply(tokens, weight)


def token_rows(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens]."""
    return F.embedding(tokens, weight)


def embedding_gradient(d_out: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """The gradient of a table (rows, width) in d_out's dtype."""
    table = d_out.new_zeros((rows, d_out.shape[-1]))
    kernels_of("embedding_gradient", d_out.device.type).add_up(d_out.contiguous(), tokens.contiguous(), table)
    return table


class _TokenRows(torch.autograd.Function):
    """The gradient of `token_rows`."""

    @staticmethod
    def forward(ctx, tokens, weight):
        kernels_of("embedding_gradient", weight.device.type)  # or refused, before the first step's work
        ctx.save_for_backward(tokens)
        ctx.rows = weight.shape[0]
        # And not our operator: torch.compile sees torch's, and makes one kernel of it and what follows.
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
