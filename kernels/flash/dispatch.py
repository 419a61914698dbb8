"""The choice between our two sets of kernels: portable ones in Triton, and Gluon ones for Hopper.

    triton   portable/: every feature, any GPU that Triton compiles for, the interpreter
    hopper   hopper/: sm_90, 16 bits, head_dim 64 and 128; windows and documents under
             the causal mask, or a block mask

With dropout the forward is portable and the backward Hopper's: a Hopper forward that draws the mask is no faster
(LOG.md).

Triton is imported only if there is a Hopper GPU.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Set
from types import ModuleType

import torch

from ..registry import AttentionError, AttentionRequest
from ..versions import gluon_lacks

TIERS = ("auto", "triton", "hopper")
HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
BOUNDS = {"window", "cu_seqlens"}  # only if causal, which a request does not say
UNEVEN = BOUNDS | {"block_mask"}  # BOUNDS or block_mask, not both
FEATURES = {"return_lse"} | UNEVEN
# With fewer queries, a Hopper tile (128 queries) would be mostly empty.
LEAST_QUERIES = 128


def refuses_tier(request: AttentionRequest) -> str | None:
    """The reason why the request's tier cannot serve it, or None."""
    if request.tier == "hopper" and (needed := hopper_needs(request)):
        return f"attention.tier=hopper needs {needed} (attention.tier=auto takes what serves)"
    return None


def tier_of(request: AttentionRequest) -> str:
    """The tier that serves a request accepted by `refuses_tier`; if forward and backward differ, both."""
    short = request.length is not None and request.length < LEAST_QUERIES and request.tier == "auto"
    if request.tier == "triton" or short:
        return "triton"
    if not hopper_needs(request):
        return "hopper"
    backward = FEATURES | {"sinks"} if request.features & UNEVEN else FEATURES | {"sinks", "dropout_p"}
    return "triton" if hopper_needs(request, backward) else "triton and hopper"


def hopper_needs(request: AttentionRequest, features: Set[str] = FEATURES) -> str | None:
    """What the Hopper kernels, supporting `features`, would need to serve the request, or None."""
    if missing := machine_lacks(request.device):
        return missing
    if request.dtype not in DTYPES:
        return f"float16 or bfloat16, not {request.dtype}"
    if request.head_dim not in HEAD_DIMS:
        return f"head_dim 64 or 128, not {request.head_dim}"
    if others := sorted(request.features - features):
        return f"attention without {others[0]}"
    if "block_mask" in request.features and (others := sorted(request.features & BOUNDS)):
        return f"attention without {others[0]} beside block_mask"
    return None


@functools.cache
def machine_lacks(device: torch.device) -> str | None:
    """What the device or Triton lacks to run the Hopper kernels at all, or None."""
    is_hopper = (
        device.type == "cuda"
        and torch.version.hip is None  # AMD's gfx90a reports 9.0 too
        and torch.cuda.get_device_capability(device) == (9, 0)
    )
    if not is_hopper:
        return "a Hopper GPU (compute capability 9.0)"
    if lacking := gluon_lacks():  # printed once: this function remembers
        print(f"tilegpt: the portable kernels run, since those for Hopper need {lacking}", file=sys.stderr)
    return lacking


@functools.cache
def hopper() -> ModuleType:
    """The module that launches the Hopper kernels; imports Gluon."""
    return importlib.import_module(".hopper.launch", __package__)


def takes_hopper(tier: str, q: torch.Tensor, has: bool, fits: Callable[[], bool]) -> bool:
    """Whether the Hopper kernels run a call.

    Args:
        has: whether they support the features in use.
        fits: whether the kernel accepts the tensors' memory layout; called last, since it imports Gluon.

    Raises:
        AttentionError: an unknown tier, or tier="hopper" for a call that those kernels cannot run.
    """
    if tier not in TIERS:
        raise AttentionError(f"tier={tier} is none of {', '.join(TIERS)}")
    if tier == "triton":
        return False
    takes = (
        has
        and machine_lacks(q.device) is None
        and (tier == "hopper" or q.shape[2] >= LEAST_QUERIES)
        and fits()
    )
    if tier == "hopper" and not takes:
        raise AttentionError(
            "attention.tier=hopper cannot run this call: it takes sm_90, float16 or bfloat16, head_dim 64 or 128, "
            "strides of 16 bytes, and of the features window and cu_seqlens with causal=True and as many keys as "
            "queries, or block_mask, if causal with lengths that differ by a multiple of 128; use attention.tier=auto"
        )
    return takes
