"""Standard attention as the papers timed it (their "PyTorch" column), as fast as eager PyTorch gets for any mask.

This is the baseline for speed claims. The scale is part of the product (baddbmm). A mask is a tensor built
beforehand and added in place, whose backward is free; masked_fill's would copy and fill. Dropout is torch's own fused
operator. Eleven other forms were timed (kernels/log/history.md): for any mask the fastest takes 0.975 to 1 of both
passes' time, and 0.84 to 0.92 of the forward's; what uses that a mask is causal (`cut_causal`),
0.57 to 1.35, the less the longer the rows.

`kernels.naive` is the oracle for correctness instead: it keeps every pass explicit, and its dropout draws a
reproducible mask in integer arithmetic, which production code would not do.
"""

import itertools
import math
from collections.abc import Iterator

import torch

NAME = "standard"
CUT = f"{NAME}+cut"


def standard_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim) + bias) v for q, k, v (batch, heads, length, head_dim), -> like q.

    Args:
        bias: like q, broadcasts to (batch, heads, q_len, kv_len); see `score_bias`.
        dropout_p: dropout on the probabilities, drawn from torch's global generator.
    """
    *_, out = standard_passes(q, k, v, bias, dropout_p)
    return out


def masked_from(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, first: int, dropout_p: float
) -> torch.Tensor:
    """`standard_attention` whose bias, of the keys from `first` on, is added to their scores alone."""
    passes = standard_passes(q, k, v, None, dropout_p)
    scores = next(passes)
    per_head = bias if bias.dim() == 2 else bias.expand(*q.shape[:2], -1, -1).flatten(0, 1)
    # Unseen by autograd, as a constant changes no gradient: in place on a part, it would copy one.
    scores.detach()[..., first:].add_(per_head)
    *_, out = passes
    return out


def cut_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, dropout_p: float = 0.0
) -> torch.Tensor:
    """`standard_attention` that knows its bias (length, length) to be causal: a quarter of the queries at a time,
    with the keys that they see, of which only the quarter's own are masked."""
    ends, parts = [q.shape[2] * n // 4 for n in range(5)], []
    spans = list(itertools.pairwise(ends))
    quarters = zip(spans, q.split([b - a for a, b in spans], 2), strict=True)
    for (a, b), rows in reversed(list(quarters)):
        # Of those of the quarter behind: so no gradient of all keys is filled up for each quarter.
        k, v = k[:, :, :b], v[:, :, :b]
        parts.append(masked_from(rows, k, v, bias[a:b, a:b], a, dropout_p))
    return torch.cat(parts[::-1], 2)


def standard_passes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, dropout_p: float
) -> Iterator[torch.Tensor]:
    """The same, yielding after each of the five passes that FlashAttention's Figure 1 times.

    They are: scores, mask, softmax, dropout, and the product with v, which is the output.
    """
    heads = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    # Three dimensions throughout: in place on a view, the mask's backward would copy its gradient twice.
    x = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.mT, beta=0, alpha=1 / math.sqrt(q.shape[-1]))
    yield x
    if bias is not None:
        x = x.add_(bias if bias.dim() == 2 else bias.expand(*heads, -1, -1).flatten(0, 1))
    yield x
    x = torch.softmax(x, dim=-1)
    yield x
    if dropout_p:
        x = torch.dropout(x, dropout_p, True)
    yield x
    yield torch.bmm(x, v).unflatten(0, heads)


def score_bias(like: torch.Tensor, causal: bool, kv_lengths: torch.Tensor | None) -> torch.Tensor | None:
    """The bias for q (batch, heads, length, head_dim): -inf above the diagonal if causal, and from kv_lengths on."""
    length, hidden = like.shape[2], None
    if causal:
        hidden = torch.ones(length, length, dtype=torch.bool, device=like.device).triu(1)
    if kv_lengths is not None:
        padding = torch.arange(length, device=like.device) >= kv_lengths[:, None, None, None]
        hidden = padding if hidden is None else hidden | padding
    if hidden is None:
        return None
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
