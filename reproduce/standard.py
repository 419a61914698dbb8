"""Standard attention as the papers timed it (their "PyTorch" column), in as few passes as eager PyTorch allows.

This is the baseline for speed claims: the scale is folded into q, masks are built beforehand and applied in place,
and dropout is torch's own fused operator. `kernels.naive` is the oracle for correctness instead: it keeps every pass
explicit, and its dropout draws a reproducible mask in integer arithmetic, which production code would not do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

NAME = "standard"


def standard_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    hidden: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v for q, k, v (batch, heads, length, head_dim), -> like q.

    Args:
        hidden: bool, broadcasts to (batch, heads, q_len, kv_len): True where a score is masked out.
        dropout_p: dropout on the probabilities, drawn from torch's global generator.
    """
    out = q
    for out in standard_passes(q, k, v, hidden=hidden, dropout_p=dropout_p):  # noqa: B007
        pass
    return out


def standard_passes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, hidden: torch.Tensor | None, dropout_p: float
) -> Iterator[torch.Tensor]:
    """The same, yielding after each of the five passes that FlashAttention's Figure 1 times.

    They are: scores, mask, softmax, dropout, and the product with v, which is the output.
    """
    x = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    yield x
    if hidden is not None:
        x = x.masked_fill_(hidden, float("-inf"))
    yield x
    x = torch.softmax(x, dim=-1)
    yield x
    if dropout_p:
        x = torch.dropout(x, dropout_p, True)
    yield x
    yield x @ v


def hidden_scores(
    length: int, causal: bool, kv_lengths: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """The mask for `standard_attention`: True above the diagonal if causal, and at keys from kv_lengths on."""
    hidden = None
    if causal:
        hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    if kv_lengths is not None:
        padding = torch.arange(length, device=device) >= kv_lengths[:, None, None, None]
        hidden = padding if hidden is None else hidden | padding
    return hidden
