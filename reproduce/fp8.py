"""Attention in emulated FP8: what FlashAttention-3 (section 3.3) does to keep 8 bits accurate, without its kernel.

Operands are rounded to e4m3 and back, and products are summed in float32 as tensor cores sum them, so the errors are
those of the number format and its scaling. There is no FP8 kernel here, so no speed is measured.
"""

import math

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
BLOCK = 128  # rows that share a scale
# Name -> (rows that share a scale, None for the whole tensor; whether q and k are made incoherent).
FORMS = {
    "per tensor": (None, False),
    "block": (BLOCK, False),
    "incoherent": (None, True),
    "block and incoherent": (BLOCK, True),
}


def fp8_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: str) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v with q, k, v and the probabilities in e4m3.

    q, k, v: float32 (batch, heads, length, head_dim), head_dim a power of two. form: a key of FORMS.
    """
    rows, incoherent = FORMS[form]
    head_dim = q.shape[-1]
    if incoherent:
        # An orthogonal matrix does not change q k^T, and spreads an outlier over its whole row.
        signs = torch.where(torch.rand(head_dim, device=q.device) < 0.5, -1.0, 1.0)
        rotation = signs[:, None] * hadamard(head_dim).to(q.device)
        q, k = q @ rotation, k @ rotation
    q, k, v = (_rounded(x, rows) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(head_dim)
    p = torch.exp(scores - scores.amax(-1, keepdim=True))  # at most 1, so it needs no scale
    return p.to(torch.float8_e4m3fn).float() @ v / p.sum(-1, keepdim=True)


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix divided by sqrt(size), hence orthogonal: float32 (size, size)."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / math.sqrt(size)


def _rounded(x: torch.Tensor, rows: int | None) -> torch.Tensor:
    """Round x to e4m3 and back; a scale per `rows` rows of a head, or for all of x, maps the largest to E4M3_MAX."""
    if rows is None:
        scale = x.abs().amax() / E4M3_MAX
    else:
        length = x.shape[-2]
        blocks = F.pad(x, (0, 0, 0, -length % rows)).unflatten(-2, (-1, rows))
        largest = blocks.abs().amax((-2, -1)).repeat_interleave(rows, -1)[..., :length, None]
        scale = largest / E4M3_MAX
    return (x / scale).to(torch.float8_e4m3fn).float() * scale
