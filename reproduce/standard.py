"""Standard attention as the papers timed it: their "PyTorch" column, in as few passes as eager PyTorch allows.

`kernels.naive` is the oracle and shows every pass; its dropout draws a reproducible mask in integer arithmetic, which
no one would ship. This is the baseline that speed is claimed against: scale folded into q, masks built beforehand
and filled in place, torch's own fused dropout.
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
        hidden: bool, broadcasts to (batch, heads, q_len, kv_len): True where a score must not count.
        dropout_p: of the probabilities, from torch's global generator.
    """
    out = q
    for out in standard_passes(q, k, v, hidden=hidden, dropout_p=dropout_p):  # noqa: B007
        pass
    return out


def standard_passes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, hidden: torch.Tensor | None, dropout_p: float
) -> Iterator[torch.Tensor]:
    """The same pass by pass: scores, masked, softmax, dropped, out; FlashAttention's Figure 1 times these five."""
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
    """The mask of a workload: True above the diagonal if causal, and at keys from kv_lengths on."""
    hidden = None
    if causal:
        hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    if kv_lengths is not None:
        padding = torch.arange(length, device=device) >= kv_lengths[:, None, None, None]
        hidden = padding if hidden is None else hidden | padding
    return hidden
