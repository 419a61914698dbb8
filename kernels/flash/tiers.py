"""Which of our kernels run: the portable ones in Triton, or those for Hopper in Gluon where they serve.

    triton   forward.py, backward.py: every feature, any GPU that Triton compiles for, the interpreter
    hopper   hopper_forward.py, hopper_backward.py: plain attention on sm_90, 16 bits, head_dim 64 and 128
"""

import functools
import importlib.metadata

import torch

TIERS = ("auto", "triton", "hopper")
HOPPER = (9, 0)
HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
# Gluon is experimental, and its interface moves: these versions have passed `pytest -m gpu` on an H200.
VERIFIED_TRITON = ("3.7.1",)


def hopper_refuses(
    device: torch.device, dtype: torch.dtype, head_dim: int, features: frozenset[str]
) -> str | None:
    """Why the Hopper kernels cannot serve, or None. features: names of the optional arguments in use."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return "a Hopper GPU (compute capability 9.0)"
    if dtype not in DTYPES:
        return f"float16 or bfloat16, not {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim 64 or 128, not {head_dim}"
    if others := sorted(features - {"return_lse"}):
        return f"plain attention, without {others[0]}"
    return broken()


@functools.cache
def broken() -> str | None:
    """Why the Hopper kernels cannot be trusted with the Triton that is installed, or None."""
    version = importlib.metadata.version("triton")
    if version not in VERIFIED_TRITON:
        return f"triton {' or '.join(VERIFIED_TRITON)}, not {version}"
    return None
