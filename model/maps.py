"""The attention weights of a GPT, from any attention function."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from .part import attentions

if TYPE_CHECKING:
    from .gpt import GPT, AttentionFn


@torch.no_grad()
def attention_maps(model: GPT, tokens: Tensor) -> Tensor:
    """The attention weights of every layer and head, (n_layer, B, n_head, T, T), without dropout.

    Element [l, b, h, i, j] is what query i gives to key j. A row sums to 1, or with sinks to less: the rest goes to
    the sink. The weights are those of the attention that the model was given, with its rounding; for plain ones build
    the model with naive attention. Any attention gives them, since softmax(scores) times the identity is its weights:
    it is called T / head_dim more times, with columns of the identity as v.
    """
    maps: list[Tensor] = []
    layers = attentions(model)
    kept = [(each.attention, each.packed) for each in layers]
    was_training = model.training
    model.eval()
    try:
        for each in layers:
            each.attention, each.packed = _noting(each.attention, maps), None
        model.hidden(tokens)
    finally:
        for each, (attention, packed) in zip(layers, kept, strict=True):
            each.attention, each.packed = attention, packed
        model.train(was_training)
    return torch.stack(maps)


def _noting(attention: AttentionFn, maps: list[Tensor]) -> AttentionFn:
    """A wrapper of the attention that also appends its weights (B, H, T, T) to `maps` at each call."""

    def noting(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        identity = torch.eye(v.size(2), dtype=v.dtype, device=v.device)
        parts = []
        for columns in identity.split(v.size(3), dim=1):  # (T, up to D)
            values = F.pad(columns, (0, v.size(3) - columns.size(1))).expand_as(v).contiguous()
            parts.append(attention(q, k, values, **options)[..., : columns.size(1)])
        maps.append(torch.cat(parts, dim=-1))
        return attention(q, k, v, **options)

    return noting
