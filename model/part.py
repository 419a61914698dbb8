"""Context parallelism in the model: on ranks that share each sequence, it computes some chunks of it, its Part.

It is given whole sequences and computes its part of their hidden states; targets are for that part only. All layers
but attention treat tokens one by one. Attention has to get the other ranks' keys itself: it is given q, k and v of
the part, but cu_seqlens of the whole sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .gpt import GPT


class Part(NamedTuple):
    """The chunks that a rank computes, of `total` equal ones."""

    chunks: tuple[int, ...]
    total: int

    def of(self, x: Tensor, dim: int) -> Tensor:
        """This part of whole sequences, whose tokens are along `dim`."""
        chunks = x.chunk(self.total, dim)
        return torch.cat([chunks[each] for each in self.chunks], dim)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Positions in their sequence of the part's `length` tokens: int64 (length,)."""
        return self.of(torch.arange(length * self.total // len(self.chunks), device=device), 0)


def compute_part(model: GPT, part: Part) -> None:
    """Have the model compute this part of each sequence, until `compute_whole`."""
    embed: Any = model.embed

    def with_positions(x: Tensor, start: int) -> Tensor:
        length = x.size(1) * part.total // len(part.chunks)
        return x + part.of(model.wpe.weight[:length], 0)

    # These replace methods that GPT, its fused form and later models all call.
    model.embed = lambda tokens, start, seeds: embed(part.of(tokens, 1), start, seeds)  # type: ignore[method-assign]
    if not model.config.rope:
        model.with_positions = with_positions  # type: ignore[method-assign]
    for attention in attentions(model):
        attention.part = part


def compute_whole(model: GPT) -> None:
    """Undo `compute_part`."""
    vars(model).pop("embed"), vars(model).pop("with_positions", None)
    for attention in attentions(model):
        del attention.part


def attentions(model: GPT) -> list[Any]:
    """The attention of each block."""
    blocks: Any = model.h
    return [block.attn for block in blocks]
