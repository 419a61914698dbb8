"""Standard attention with every pass explicit: the papers' baseline, and the test oracle of every other backend.

Each step reads and writes a (batch, heads, q_len, kv_len) matrix in memory, as Algorithm 0 of FlashAttention (Dao et
al. 2022) does; nothing is fused unless torch.compile fuses it.
"""

from typing import Literal, Unpack, overload

import torch

from .arguments import (
    BLOCK_MASK_SIZE,
    Arguments,
    check_but_value_dim,
    check_dropout,
    check_features,
    check_scale,
    in_autocast_dtype,
)
from .philox import drop_share, dropout_mask
from .registry import AttentionRequest, register_attention


def _refuses(request: AttentionRequest) -> str | None:
    return None


@overload
def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Arguments],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Arguments],
) -> torch.Tensor: ...
@register_attention("naive", refuses=_refuses)
def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    block_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    precise_delta: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scale) v, with every argument that `kernels.arguments` lists.

    Returns:
        out like q, with v's head_dim; with return_lse also the natural log-sum-exp of the scaled logits (sink
        included), float32 or wider, (batch, heads, q_len). A fully masked query gives 0 and -inf.

    Raises:
        AttentionError: an argument has the wrong shape, dtype or device.
    """
    q, k, v = in_autocast_dtype(q, k, v)
    check_but_value_dim(q, k, v, causal)
    check_dropout(dropout_p, dropout_seed)
    check_features(
        q, k, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, kv_lengths=kv_lengths, block_mask=block_mask,
    )  # fmt: skip
    batch, heads, q_len, head_dim = q.shape
    kv_len = k.shape[2]
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))

    # Scaled before the product, which could overflow float16.
    scores = q * check_scale(scale, head_dim) @ k.transpose(-2, -1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(scores)[:, None, None]
        scores = scores - slopes * _distance(batch, q_len, kv_len, q.device, cu_seqlens, cu_seqlens_k).abs()
    visible = _visible(
        batch, q_len, kv_len, q.device, causal, window, cu_seqlens, kv_lengths, block_mask, cu_seqlens_k
    )
    blind = None  # fully masked queries; their passes are skipped where none can exist
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
        if not (causal and q_len <= kv_len and window is cu_seqlens_k is kv_lengths is block_mask is None):
            blind = ~visible.any(-1, keepdim=True)
            if sinks is not None:
                blind = blind & (sinks == float("-inf"))[:, None, None]
            scores = scores.masked_fill(blind, 0.0)
    if sinks is not None:
        column = sinks.to(scores)[None, :, None, None].expand(batch, heads, q_len, 1)
        scores = torch.cat([scores, column], dim=-1)

    probabilities = torch.softmax(scores, dim=-1)[..., :kv_len]
    if blind is not None:
        probabilities = probabilities.masked_fill(blind, 0.0)
    if dropout_p:
        keep = dropout_mask(dropout_seed, dropout_p, batch, heads, q_len, kv_len, q.device)
        probabilities = probabilities * keep / (1.0 - drop_share(dropout_p))
    out = probabilities.to(v.dtype) @ v
    if not return_lse:
        return out
    lse = torch.logsumexp(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=-1)
    return out, lse if blind is None else lse.masked_fill(blind.squeeze(-1), float("-inf"))


def _distance(
    batch: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
) -> torch.Tensor:
    """Key position minus query position, aligned bottom-right: int64 (q_len, kv_len). With cu_seqlens_k (batch, 1,
    q_len, kv_len): of a query and a key of one document, whose positions are counted from its end."""
    if cu_seqlens is None or cu_seqlens_k is None:
        rows = torch.arange(q_len, device=device)[:, None] + (kv_len - q_len)
        return torch.arange(kv_len, device=device) - rows
    documents = _documents(cu_seqlens, batch, q_len), _documents(cu_seqlens_k, batch, kv_len)
    later_queries, later_keys = ((x.unsqueeze(-1) == x.unsqueeze(-2)).triu(1).sum(-1) for x in documents)
    return later_queries.unsqueeze(-1) - later_keys.unsqueeze(-2)


def _documents(cu_seqlens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """The number of each token's document: int64 (batch, 1, length)."""
    tokens = torch.arange(batch * length, device=cu_seqlens.device, dtype=torch.int32)
    return torch.searchsorted(cu_seqlens, tokens, right=True).view(batch, 1, length)


def _visible(
    batch: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
    block_mask: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The mask: True where a query may see a key, broadcastable to (batch, heads, q_len, kv_len); None if all may."""
    distance = _distance(batch, q_len, kv_len, device, cu_seqlens, cu_seqlens_k)
    masks = []
    if causal:
        masks.append(distance <= 0)
    if window is not None:
        left, right = window
        if left >= 0:
            masks.append(distance >= -left)
        if right >= 0:
            masks.append(distance <= right)
    if cu_seqlens is not None:
        document = of_key = _documents(cu_seqlens, batch, q_len)
        if cu_seqlens_k is not None:
            of_key = _documents(cu_seqlens_k, batch, kv_len)
        masks.append(document.unsqueeze(-1) == of_key.unsqueeze(-2))
    if kv_lengths is not None:
        masks.append(torch.arange(kv_len, device=device) < kv_lengths.view(batch, 1, 1, 1))
    if block_mask is not None:
        tiles = block_mask.repeat_interleave(BLOCK_MASK_SIZE, -2).repeat_interleave(BLOCK_MASK_SIZE, -1)
        masks.append(tiles[..., :q_len, :kv_len])
    visible = masks[0] if masks else None
    for mask in masks[1:]:
        visible = visible & mask  # type: ignore[operator]
    return visible
