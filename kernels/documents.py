"""Packed documents (`cu_seqlens`) under torch's attention and FlashAttention-4, in the forms that these take.

A document ends with its row: `cu_seqlens` need not say so, and may repeat offsets, which are empty documents.
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

VARLEN = ("sdpa", "sdpa_flash")  # the backends that varlen_attn's kernels, of FlashAttention, stand for


def checked(
    name: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cu_seqlens: torch.Tensor,
    scale: float | None,
    features: dict[str, object],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """q, k, v and scale as the attention `name` gets them; AttentionError for what does not go with documents."""
    features.pop("dropout_seed", None)  # it means nothing without dropout_p, and that is refused
    refuse_features(name, features, beside="cu_seqlens")
    q, k, v = in_autocast_dtype(*tensors)
    check_inputs(q, k, v)
    check_features(q, k, cu_seqlens=cu_seqlens)
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
    **features: object,
) -> torch.Tensor:
    """torch.nn.attention.varlen_attn where it has a kernel: on a GPU of sm_80 or later, in half precision. Elsewhere,
    and where `only`, torch's context manager, forces another kernel, SDPA with a mask of every pair of tokens."""
    q, k, v, scale = checked(name, (q, k, v), cu_seqlens, scale, features)
    if refused := refusal_of_call(name, q, cu_seqlens=cu_seqlens):
        raise refused
    half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
    if name in VARLEN and half and q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0):
        from .varlen import by_document, varlen  # imports the compiler

        return by_document(varlen, q, k, v, cu_seqlens, causal, scale)
    mask = visible(cu_seqlens, q.shape[0], q.shape[2], causal)
    if q.shape[1] != k.shape[1]:  # sdpa_efficient has no grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    with only:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    attend: Callable[..., Any] | None,
    causal: bool = True,
    scale: float | None = None,
    **features: object,
) -> torch.Tensor:
    """FlexAttention with a mask of its blocks; `attend`: its function, compiled. None: to be compiled with this."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v, scale = checked("flex", (q, k, v), cu_seqlens, scale, features)
    mask = flex_mask(cu_seqlens, q.shape[0], q.shape[2], causal)
    return (attend or flex_attention)(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def numbers(cu_seqlens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """(batch, length): the number of each token's document, ascending along a row."""
    tokens = torch.arange(batch * length, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, tokens, right=True).view(batch, length)


def visible(cu_seqlens: torch.Tensor, batch: int, length: int, causal: bool) -> torch.Tensor:
    """Bool (batch, 1, length, length): which key each query sees."""
    document = numbers(cu_seqlens, batch, length)
    seen = document[:, None, :, None] == document[:, None, None, :]
    return seen.tril() if causal else seen


def listed_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of bool (batch, rows, columns): how many of each row are True (batch, 1, rows), and these first, int32.

    An operator for its strides' sake: Inductor would give the dimension of heads one of 0, and by that flex's kernel
    goes from row to row of the batch (torch 2.13), so that every row would see the blocks of the first.
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


listed_blocks = operator(listed_blocks, listed_blocks)


def flex_mask(cu_seqlens: torch.Tensor, batch: int, length: int, causal: bool) -> Any:
    """FlexAttention's BlockMask, from the documents at the edges of its blocks.

    torch's create_block_mask evaluates every pair of tokens: 512 MiB for 8 rows of length 8192, in every layer.
    """
    from torch.nn.attention.flex_attention import BlockMask

    document = numbers(cu_seqlens, batch, length)
    device, size = document.device, BLOCK_MASK_SIZE
    first = torch.arange(0, length, size, device=device)
    last = (first + size - 1).clamp(max=length - 1)
    begins, ends = document[:, first], document[:, last]  # (batch, blocks)
    seen = (begins[:, :, None] <= ends[:, None, :]) & (begins[:, None, :] <= ends[:, :, None])
    whole = (begins == ends) & (first + size <= length)
    full = seen & whole[:, :, None] & whole[:, None, :]
    if causal:
        seen, full = seen.tril(), full.tril(-1)

    def mask(batch, head, row, column):
        same = document[batch, row] == document[batch, column]
        return same & (row >= column) if causal else same

    return BlockMask.from_kv_blocks(
        *listed_blocks(seen & ~full),
        *listed_blocks(full),
        BLOCK_SIZE=size,
        mask_mod=mask,
        seq_lengths=(length, length),
    )
