"""Attention algorithms behind one signature, selected by name.

    name, attention = resolve_attention("auto", device=device, dtype=torch.bfloat16, head_dim=64)
    out = attention(q, k, v, causal=True)

Beside them: `kernels.layers`, a model's other layers, and `kernels.ring`, attention over a sequence that several GPUs
share.

`kernels.arguments` documents the arguments; `kernels.naive` implements all of them in the slow and obvious way.
"""

from . import fa4, flash, history, library, naive  # each registers its backends
from .registry import (
    ATTENTION,
    AttentionError,
    AttentionFn,
    AttentionRequest,
    attention_tier,
    bind,
    get_attention,
    packed_form,
    register_attention,
    resolve_attention,
    with_packed,
)


def register() -> None:
    """Register the flash kernels with PyTorch, to run under scaled_dot_product_attention (see `flash.under_sdpa`)."""
    from .flash.under_sdpa import register as announce

    announce()


__all__ = [
    "ATTENTION",
    "AttentionError",
    "AttentionFn",
    "AttentionRequest",
    "attention_tier",
    "bind",
    "fa4",
    "flash",
    "get_attention",
    "history",
    "library",
    "naive",
    "packed_form",
    "register",
    "register_attention",
    "resolve_attention",
    "with_packed",
]
