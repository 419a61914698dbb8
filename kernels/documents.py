"""Packed documents (`cu_seqlens`) under torch's attention and FlashAttention-4, in the forms that these take.

A document ends with its row: `cu_seqlens` need not say so, and may repeat offsets, which are empty documents. Keys
with offsets of their own, `cu_seqlens_k`, are masked: by pairs of tokens, or in flex.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .arguments import (
    BLOCK_MASK_SIZE,
    check_features,
    check_inputs,
    check_scale,
    in_autocast_dtype,
    refuse_features,
)
from .operators import operator
from .registry import refusal_of_call

VARLEN = ("sdpa", "sdpa_flash")  # the backends that may use varlen_attn, which is FlashAttention's


def checked(
    name: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cu_seqlens: torch.Tensor,
    causal: bool,
    scale: float | None,
    features: dict[str, object],
    cu_seqlens_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """q, k, v and scale as the attention `name` gets them; AttentionError for what does not go with documents."""
    features.pop("dropout_seed", None)  # it means nothing without dropout_p, and that is refused
    refuse_features(name, features, combined_with="cu_seqlens")
    q, k, v = in_autocast_dtype(*tensors)
    check_inputs(q, k, v, causal)
    check_features(q, k, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    return q, k, v, check_scale(scale, q.shape[-1])


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    name: str,
    only: Any,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    **features: object,
) -> torch.Tensor:
    """torch.nn.attention.varlen_attn where it has a kernel: on a GPU of sm_80 or later, in half precision. Elsewhere,
    and where `only` (torch's context manager) forces another kernel: SDPA with a mask of every pair of tokens."""
    q, k, v, scale = checked(name, (q, k, v), cu_seqlens, causal, scale, features, cu_seqlens_k)
    if refused := refusal_of_call(name, q, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k):
        raise refused
    half = cu_seqlens_k is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
    if name in VARLEN and half and q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0):
        from .varlen import by_document, varlen  # imports the compiler

        return by_document(varlen, q, k, v, cu_seqlens, causal, scale)
    mask, blind = visible(cu_seqlens, cu_seqlens_k, q.shape[0], q.shape[2], k.shape[2], causal), None
    if cu_seqlens_k is not None:
        blind = ~mask.any(-1, keepdim=True)
        mask = mask | blind  # in cuDNN 9 rows that see nothing are wrong: see library.with_blind_rows
    if q.shape[1] != k.shape[1]:  # sdpa_efficient has no grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    with only:
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return out if blind is None else out.masked_fill(blind, 0.0)


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    attend: Callable[[torch.Tensor], Callable[..., Any]],
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    **features: object,
) -> torch.Tensor:
    """FlexAttention with a mask of its blocks. attend: gives its function for q, compiled or not."""
    q, k, v, scale = checked("flex", (q, k, v), cu_seqlens, causal, scale, features, cu_seqlens_k)
    mask = flex_mask(cu_seqlens, cu_seqlens_k, q.shape[0], q.shape[2], k.shape[2], causal)
    return attend(q)(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def numbers(cu_seqlens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """(batch, length): the number of each token's document, ascending along a row."""
    tokens = torch.arange(batch * length, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, tokens, right=True).view(batch, length)


def numbers_of_both(
    cu_seqlens: torch.Tensor, cu_seqlens_k: torch.Tensor | None, batch: int, q_len: int, kv_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`numbers` of the queries and of the keys, which are the same tensor where they share their offsets."""
    document = numbers(cu_seqlens, batch, q_len)
    return document, document if cu_seqlens_k is None else numbers(cu_seqlens_k, batch, kv_len)


def positions(
    cu_seqlens: torch.Tensor, cu_seqlens_k: torch.Tensor | None, batch: int, q_len: int, kv_len: int
) -> torch.Tensor:
    """(batch or 1, q_len): the position of each query among the keys of its row, where the last query of a document,
    or of its part of the row, is at its last key."""
    queries = torch.arange(q_len, device=cu_seqlens.device)[None]
    if cu_seqlens_k is None:
        return queries
    document, rows = numbers(cu_seqlens, batch, q_len), torch.arange(batch, device=cu_seqlens.device)[:, None]
    ends, of_keys = (
        F.pad(offsets, (0, 1), value=batch * length)[document] - rows * length
        for offsets, length in ((cu_seqlens, q_len), (cu_seqlens_k, kv_len))
    )
    return queries + of_keys.clamp(0, kv_len) - ends.clamp(max=q_len)


def visible(
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    batch: int,
    q_len: int,
    kv_len: int,
    causal: bool,
) -> torch.Tensor:
    """Bool (batch, 1, q_len, kv_len): which key each query sees."""
    document, of_keys = numbers_of_both(cu_seqlens, cu_seqlens_k, batch, q_len, kv_len)
    seen = document[:, None, :, None] == of_keys[:, None, None, :]
    if causal:
        own = positions(cu_seqlens, cu_seqlens_k, batch, q_len, kv_len)
        seen = seen & (torch.arange(kv_len, device=own.device) <= own[:, None, :, None])
    return seen


def listed_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of bool (batch, rows, columns): how many of a row are True (batch, 1, rows); its columns, these first. int32.

    An operator, to fix the strides: Inductor would give the heads' axis a stride of 0, by which flex's kernel steps
    from row to row of the batch (torch 2.13), so every row would see the first one's blocks.
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


listed_blocks = operator(listed_blocks, listed_blocks)


def flex_mask(
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    batch: int,
    q_len: int,
    kv_len: int,
    causal: bool,
) -> Any:
    """FlexAttention's BlockMask, from the documents at the edges of its blocks. With cu_seqlens_k it may also list
    blocks in which nothing is seen.

    torch's create_block_mask evaluates every pair of tokens: 512 MiB for 8 rows of length 8192, in every layer.
    """
    from torch.nn.attention.flex_attention import BlockMask

    document, of_keys = numbers_of_both(cu_seqlens, cu_seqlens_k, batch, q_len, kv_len)
    device, size = document.device, BLOCK_MASK_SIZE
    row, key = (torch.arange(0, length, size, device=device) for length in (q_len, kv_len))
    last_row, last_key = (row + size - 1).clamp(max=q_len - 1), (key + size - 1).clamp(max=kv_len - 1)
    begins, ends = document[:, row, None], document[:, last_row, None]  # (batch, blocks of queries, 1)
    key_begins, key_ends = of_keys[:, None, key], of_keys[:, None, last_key]
    seen = (begins <= key_ends) & (key_begins <= ends)
    full = seen & (begins == ends) & (key_begins == key_ends)
    full = full & (row + size <= q_len)[:, None] & (key + size <= kv_len)
    if causal:
        own = positions(cu_seqlens, cu_seqlens_k, batch, q_len, kv_len)
        reached = own if cu_seqlens_k is None else own.cummax(-1).values  # by a query or one before it
        seen = seen & (key <= reached[:, last_row, None])
        full = full & (last_key <= own[:, row, None])

    def mask(batch, head, row, column):
        same = document[batch, row] == of_keys[batch, column]
        if not causal:
            return same
        return same & ((row if cu_seqlens_k is None else own[batch, row]) >= column)

    return BlockMask.from_kv_blocks(
        *listed_blocks(seen & ~full),
        *listed_blocks(full),
        BLOCK_SIZE=size,
        mask_mod=mask,
        seq_lengths=(q_len, kv_len),
    )
