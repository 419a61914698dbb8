"""Attention of one block of queries and keys, where the softmax goes over the keys of all blocks.

A block's forward is attention over its own keys, with the log-sum-exp that says how much it weighs. Its backward
takes the output and log-sum-exp over all keys: then P = exp(S - lse) and delta = rowsum(dO * O) are the block's part
of the whole gradient, and the gradients of the blocks add up.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..flash.call import Options, Tensors
from ..naive import _visible, naive_attention
from ..registry import AttentionError
from .blocks import Block

Gradients = tuple[Tensor, Tensor, Tensor]


class Whole(NamedTuple):
    """What a backward needs from the whole attention, for a block's queries (batch, heads, queries, ...)."""

    d_out: Tensor
    d_lse: Tensor | None
    out: Tensor
    lse: Tensor

    def of(self, block: Block) -> Whole:
        """The same for the block's queries alone."""
        d_lse = None if self.d_lse is None else block.of_queries(self.d_lse)
        return Whole(
            block.of_queries(self.d_out), d_lse, block.of_queries(self.out), block.of_queries(self.lse)
        )


class Mask(NamedTuple):
    """What is seen of a block: under the causal mask, and with packed documents a token's own (`cu_seqlens`)."""

    causal: bool
    cu_seqlens: Tensor | None = None


class Compute(Protocol):
    """Attention of a block. q: (batch, heads, queries, head_dim); k, v: (batch, kv_heads, keys, head_dim)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        """out like q, and lse (batch, heads, queries), both over these keys alone."""

    def backward(self, whole: Whole, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Gradients:
        """This block's part of dq, dk and dv."""


class Flash:
    """By the flash kernels, whose backward takes the log-sum-exp and the output it is given."""

    def __init__(self, tier: str) -> None:
        from ..flash import masks, operators  # imports triton

        self.tier, self.masks, self.operators = tier, masks, operators

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, _ = self.operators.flash_forward(q, k, v, *self._asked(q, mask, scale))
        return out, lse

    def backward(self, whole: Whole, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Gradients:
        d_out, d_lse, out, lse = whole
        asked = self._asked(q, mask, scale)
        dq, dk, dv, _ = self.operators.flash_backward(
            d_out, d_lse, out, lse.contiguous(), None, q, k, v, *asked
        )
        return dq, dk, dv

    def _asked(self, q: Tensor, mask: Mask, scale: float) -> tuple[object, ...]:
        tensors = Tensors()
        if mask.cu_seqlens is not None:
            starts, ends = self.masks.document_bounds(mask.cu_seqlens, q.shape[0], q.shape[2])
            tensors = Tensors(document_starts=starts, document_ends=ends)
        return *tensors, *Options(mask.causal, scale, tier=self.tier)


class Naive:
    """By matrix products of whole blocks, in any precision: what the tests take for exact."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = naive_attention(q, k, v, scale=scale, return_lse=True, **mask._asdict())
        return out, lse

    def backward(self, whole: Whole, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Gradients:
        """FlashAttention (Dao et al. 2022), Algorithm 4, on one block."""
        d_out, d_lse, out, lse = whole
        (batch, heads, q_len, _), (_, kv_heads, kv_len, head_dim) = q.shape, k.shape
        q = q * scale
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = (q @ k.mT).to(lse.dtype)
        visible = _visible(batch, q_len, kv_len, q.device, mask.causal, None, mask.cu_seqlens, None, None)
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        p = torch.exp(scores - lse[..., None])
        delta = (d_out * out).sum(-1, dtype=lse.dtype) - (0 if d_lse is None else d_lse)
        ds = (p * (d_out @ v.mT - delta[..., None])).to(q.dtype)
        of_heads = (batch, kv_heads, heads // kv_heads, kv_len, head_dim)
        dk, dv = (x.view(of_heads).sum(2) for x in (ds.mT @ q, p.to(q.dtype).mT @ d_out))
        return ds @ k * scale, dk, dv


def compute_of(attention: str, tier: str) -> Compute:
    """What computes the blocks of `attention`."""
    if attention == "flash":
        return Flash(tier)
    if attention == "naive":
        return Naive()
    raise AttentionError(
        f"a ring needs the log-sum-exp's gradient, which attention={attention} does not have; "
        "use attention=flash, or naive"
    )
