"""Our Triton attention, registered as `flash`. Triton is imported when it is loaded, not before."""

import os

import torch

from ..registry import FEATURES, AttentionFn, AttentionRequest, register_attention
from ..versions import kernels_lack, no_cuda
from .dispatch import TIERS, refuses_tier, tier_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIM_MIN, HEAD_DIM_MAX = 16, 256
SUPPORTED = set(FEATURES)


def refuses_inputs(device: torch.device, dtype: torch.dtype, head_dim: int, interpreted: bool) -> str | None:
    """The reason why our kernels cannot take such tensors, or None. interpreted: Triton runs in its interpreter."""
    if device.type != "cuda" and not interpreted:
        because = f": {lacking}" if device.type == "cpu" and (lacking := no_cuda()) else ""
        return (
            f"it needs a CUDA device, not {device.type} (TRITON_INTERPRET=1 interprets it, slowly){because}"
        )
    if dtype not in DTYPES:
        return f"it takes float16, bfloat16 and float32, not {dtype}"
    if interpreted and dtype is torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly (use float32 or float16)"
    if not HEAD_DIM_MIN <= head_dim <= HEAD_DIM_MAX:
        return f"it takes head_dim {HEAD_DIM_MIN} to {HEAD_DIM_MAX}, not {head_dim}"
    return None


def refuses(request: AttentionRequest) -> str | None:
    """The reason why our kernels cannot serve `request`, or None."""
    if request.tier not in TIERS:  # first: no change of the inputs would help
        return f"attention.tier={request.tier} is none of {', '.join(TIERS)}"
    return refuses_kernels(request) or refuses_tier(request) or request.unsupported(SUPPORTED)


def refuses_kernels(request: AttentionRequest) -> str | None:
    """The reason why none of our Triton kernels can serve `request`, or None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if refused := refuses_inputs(request.device, request.dtype, request.head_dim, interpreted):
        return refused
    lacking = kernels_lack()
    return f"it needs {lacking}" if lacking else None


@register_attention("flash", refuses=refuses, lazy=True, tier=tier_of)
def load() -> AttentionFn:
    """The attention function; imports triton."""
    from .api import flash_attention

    return flash_attention
