"""Packed documents of whole sequences, as the parts of a sequence need them."""

import torch
from torch import Tensor

from .blocks import chunks_of


def own_offsets(cu_seqlens: Tensor, batch: int, length: int, rank: int, ranks: int) -> Tensor:
    """`cu_seqlens` of a rank's part alone, where a chunk's end ends a document: int32 (batch * length / ranks + 1,).

    cu_seqlens: int32 (documents + 1,), offsets in the batch * length tokens of whole sequences. As those of
    `model.gpt.document_offsets`, the offsets are padded with empty documents: nothing waits for the device.
    """
    chunk = length // (2 * ranks)
    inside = torch.arange(chunk, device=cu_seqlens.device, dtype=torch.int32)
    chunks = torch.tensor(chunks_of(rank, ranks), device=cu_seqlens.device, dtype=torch.int32)
    rows = torch.arange(batch, device=cu_seqlens.device, dtype=torch.int32) * length
    tokens = (rows[:, None, None] + chunks[:, None] * chunk + inside).flatten()
    begins = _first_of(cu_seqlens, tokens)[0] == tokens
    begins.view(-1, chunk)[:, 0] = True
    index = torch.arange(tokens.numel() + 1, device=cu_seqlens.device, dtype=torch.int32)
    padded = torch.nn.functional.pad(begins, (0, 1))
    return torch.where(padded, index, tokens.numel()).sort().values


def spans_of(cu_seqlens: Tensor, batch: int, length: int, ranks: int) -> Tensor:
    """Where the document of each chunk's first token begins and ends in its row: int64 (batch, 2, 2 * ranks) on the
    CPU. This waits for the device."""
    chunk = length // (2 * ranks)
    rows = torch.arange(batch, device=cu_seqlens.device, dtype=torch.int32)[:, None] * length
    tokens = rows + torch.arange(2 * ranks, device=cu_seqlens.device, dtype=torch.int32) * chunk
    start, end = _first_of(cu_seqlens, tokens)
    return torch.stack([start.maximum(rows) - rows, end.minimum(rows + length) - rows], 1).long().cpu()


def _first_of(cu_seqlens: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The first token of each token's document, and the first one after it."""
    index = torch.searchsorted(cu_seqlens, tokens, right=True)
    return cu_seqlens[index - 1], cu_seqlens[index]
