"""Which layers other than attention run in our kernels: the head with its loss, the blocks', the embedding."""

from __future__ import annotations

from functools import partial

import torch

from kernels import AttentionFn, packed_form
from kernels.layers import check_fp8, check_fused
from kernels.versions import kernels_lack
from model.config import GPTConfig
from model.fused import FusedLayers
from model.gpt import GPT, cross_entropy
from model.modern import build_gpt

from .config import ConfigError, Layers


def resolve_layers(
    asked: Layers, option: str, device: torch.device, lacking: str | None = None, unmeasured: bool = False
) -> Layers:
    """torch, fused or fused_fp8. lacking: a setting of the model with no fused form. unmeasured: auto takes torch.

    Raises ConfigError or kernels.AttentionError when `option` asks for what cannot run.
    """
    if asked is Layers.auto:
        able = device.type == "cuda" and kernels_lack() is None and lacking is None and not unmeasured
        return Layers.fused if able else Layers.torch
    if asked is Layers.fused and lacking:
        raise ConfigError(f"{option}=fused has no form for model.{lacking}: use {option}=torch or auto.")
    if asked is not Layers.torch:
        check_fused(device, option, asked.value)
    return asked


def resolve_loss(asked: Layers, width: int, device: torch.device, dtype: torch.dtype) -> Layers:
    """`resolve_layers` of model.loss. width: the model's. dtype: of activations."""
    found = resolve_layers(asked, "model.loss", device)
    if found is Layers.fused_fp8:
        check_fp8(device, dtype, width)
    return found


def make_gpt(
    config: GPTConfig, attention: AttentionFn, *, loss: Layers, block: Layers, generator: torch.Generator
) -> GPT:
    """The model with its loss and its blocks in the layers given, which are resolved.

    The fused layers are imported here: they import triton, which may be absent, and takes half a second.
    """
    options = {"packed": packed_form(attention), "loss": cross_entropy, "generator": generator}
    if loss is not Layers.torch:
        from kernels.layers.linear_cross_entropy import linear_cross_entropy

        fp8 = loss is Layers.fused_fp8
        options["loss"] = partial(linear_cross_entropy, fp8=True) if fp8 else linear_cross_entropy
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
