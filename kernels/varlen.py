"""Attention of packed documents by functions that take them as (tokens, heads, head_dim) with offsets.

Under torch.compile they run between its graphs: how many documents there are is only known on the device.
"""

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn


@torch.compiler.disable
def by_document(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """`attend(q, k, v, offsets, longest, causal, scale)`, which takes q as (tokens, heads, head_dim), for q, k and v
    as (batch, heads, length, head_dim)."""
    batch, heads, length, head_dim = q.shape
    tokens = [x.transpose(1, 2).reshape(batch * length, x.shape[1], head_dim) for x in (q, k, v)]
    # A longest document of a whole row costs blocks of threads that end at once; its real length would cost a wait.
    out = attend(*tokens, offsets(cu_seqlens, batch, length), length, causal, scale)
    return out.view(batch, length, heads, head_dim).transpose(1, 2)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """torch's varlen_attn, by FlashAttention."""
    group = q.shape[1] // k.shape[1]
    if group > 1:  # torch 2.11's has no argument for it
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    window = (-1, 0 if causal else -1)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # torch 2.15 would rather take cuDNN's on Hopper
        out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, window_size=window)
    assert isinstance(out, torch.Tensor)  # a tuple only with return_aux
    return out


def offsets(cu_seqlens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """int32 (documents + 1,): without empty documents, and with the ends of rows.

    For kernels that start blocks of threads for every document; the model passes as many documents as tokens, most of
    them empty. The host waits for the device to learn how many are left.
    """
    rows = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=cu_seqlens.device)
    return torch.cat([cu_seqlens, rows]).unique()
