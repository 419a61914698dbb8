"""Which layers other than attention run in our kernels: the head with its loss, the blocks', the embedding."""

from __future__ import annotations

import torch

from kernels import AttentionFn, packed_form
from kernels.layers import check_fused
from kernels.versions import kernels_lack
from model.config import GPTConfig
from model.fused import FusedLayers
from model.gpt import GPT, cross_entropy
from model.modern import build_gpt

from .config import ConfigError, Layers


def resolve_layers(
    asked: Layers, option: str, device: torch.device, lacking: str | None = None, unmeasured: bool = False
) -> Layers:
    """torch or fused. lacking: a setting without a fused form. unmeasured: fused was not timed, auto takes torch.

    Raises ConfigError or kernels.AttentionError when `option` asks for what cannot run.
    """
    if asked is Layers.auto:
        able = device.type == "cuda" and kernels_lack() is None and lacking is None and not unmeasured
        return Layers.fused if able else Layers.torch
    if asked is Layers.fused and lacking:
        raise ConfigError(f"{option}=fused has no form for model.{lacking}: use {option}=torch or auto.")
    if asked is Layers.fused:
        check_fused(device, option)
    return asked


def make_gpt(
    config: GPTConfig, attention: AttentionFn, *, loss: Layers, block: Layers, generator: torch.Generator
) -> GPT:
    """The model with its loss and its blocks in the given layers, none of which is `auto`.

    The fused layers are imported here: they import triton, which may be absent, and takes half a second.
    """
    options = {"packed": packed_form(attention), "loss": cross_entropy, "generator": generator}
    if loss is Layers.fused:
        from kernels.layers.linear_cross_entropy import linear_cross_entropy

        options["loss"] = linear_cross_entropy
    if block is Layers.torch:
        return build_gpt(config, attention, **options)
    from kernels.layers.dropout import dropout
    from kernels.layers.embedding import embedding
    from kernels.layers.linear import linear
    from kernels.layers.linear_add_norm import dropout_add_norm
    from kernels.layers.linear_gelu import linear_gelu
    from kernels.layers.mlp import mlp

    layers = FusedLayers(linear_gelu, dropout_add_norm, embedding, dropout, linear, mlp)
    return build_gpt(config, attention, layers=layers, **options)
