"""Attention in one pass over the keys, a query a program: before tiles let queries share loads (docs/ladder.md)."""

import torch
import triton
import triton.language as tl

KEYS = 64  # at a time


def one_pass(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v for contiguous q, k, v (batch, heads, length, head_dim): like q, no gradient.

    KEYS divides length, head_dim is a power of 2. On a CUDA device, or wherever TRITON_INTERPRET=1 is set.
    """
    out, (batch, heads, length, head_dim) = torch.empty_like(q), q.shape
    one_pass_kernel[(length, batch * heads)](q, k, v, out, length, head_dim**-0.5, KEYS, head_dim)
    return out


@triton.jit
def one_pass_kernel(Q, K, V, Out, length, scale, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Grid (length, batch * heads)."""
    head, dims = tl.program_id(1) * length, tl.arange(0, HEAD_DIM)
    row = (head + tl.program_id(0)) * HEAD_DIM + dims
    q = tl.load(Q + row).to(tl.float32) * scale
    m, l, out = float("-inf"), 0.0, tl.zeros([HEAD_DIM], tl.float32)  # noqa: E741
    for first in range(0, length, KEYS):
        places = (head + first + tl.arange(0, KEYS))[:, None] * HEAD_DIM + dims[None, :]
        x = tl.sum(tl.load(K + places).to(tl.float32) * q[None, :], 1)
        new_m = tl.maximum(m, tl.max(x, 0))
        p = tl.exp(x - new_m)
        before = l * tl.exp(m - new_m)
        new_l = before + tl.sum(p, 0)
        v = tl.load(V + places).to(tl.float32)
        out = out * (before / new_l) + tl.sum(p[:, None] * v, 0) / new_l
        m, l = new_m, new_l  # noqa: E741
    tl.store(Out + row, out.to(Out.dtype.element_ty))
