"""Chooses the set of kernels ("tier") for each pass of a call, forward or backward, and says why not the other.

    triton   portable/: every feature, any GPU that Triton compiles for, the interpreter
    hopper   hopper/: sm_90, 16 bits, a head_dim that 8 divides, and the features that have `hopper` in
             kernels/features.py, where faster.py says so; with tier="hopper" elsewhere too

`choose` has the rule. `refuses` and `tier_of` ask it before a run, with what is known then; `kernels_for_call` in
every pass of a call; `why_portable` for users. Triton is imported on a Hopper GPU only.
"""

import functools
import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from ..arguments import BLOCK_MASK_SIZE
from ..features import FEATURES
from ..registry import AttentionError, AttentionRequest
from ..versions import INTERPRET, cuda_not, gluon_lacks, kernels_lack, say_once, unknown_pair
from .call import Options, Tensors
from .faster import SCORE_MODS, needs_to_be_faster

TIERS = ("auto", "triton", "hopper")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIM_MIN, HEAD_DIM_MAX = 16, 256
HOPPER_DTYPES = (torch.float16, torch.bfloat16)
# The Hopper kernels combine none of SCORE_MODS with one of NOT_COMBINED_WITH: to try, by kernels/log/hopper_masks.md.
NOT_COMBINED_WITH = frozenset({"block_mask", "dropout_p", "sinks", *SCORE_MODS})
SOFTCAP_MAX = 64.0  # their tanh is exact enough up to it; see hopper/score_mods.py
# Features that the Hopper kernels have by the table in kernels/features.py, but that nobody wrote above head_dim 128.
WIDE_LACKS = {
    "forward": frozenset({"block_mask"}),
    "backward": frozenset({"block_mask"}),
}
# Features that add no code to a pass's main kernel, and so no time; `delta_kernel` has the backward's.
NO_FORM = {
    "forward": frozenset({"return_lse"}),
    "backward": frozenset({"precise_delta", "return_lse", "sinks"}),
}
BOUNDS = ("cu_seqlens", "window")  # features that bound the keys that a query sees; see hopper/bounds.py
# What they do not combine with bounds by query (`masks.by_query`): softcap spills 4 to 8 B in the backward at 64.
NOT_BY_QUERY = frozenset({"alibi_slopes", "block_mask", "dropout_p", "softcap"})
ALIBI_RAGGED = "does not support alibi_slopes with cu_seqlens_k"


class Choice(NamedTuple):
    """The kernels of a pass, "triton" (portable) or "hopper". why: what the Hopper ones would need, where they do not
    run, unless tier="triton" was asked for."""

    kernels: str
    why: str | None = None


@functools.lru_cache(1024)
def choose(which: str, request: AttentionRequest) -> Choice:
    """The kernels for a pass, which: "forward" or "backward". What the request leaves open is assumed to suit Hopper.

    Forward and backward need not agree: with dropout at head_dim 64 auto takes the portable forward.
    """
    if request.tier == "triton":
        return Choice("triton")
    needed = machine_lacks(request.device) or hopper_needs(which, request)
    return Choice("triton", needed) if needed else Choice("hopper")


def hopper_needs(which: str, request: AttentionRequest) -> str | None:
    """What the Hopper kernels of a pass need and the request lacks, in words; None if they take it. For the machine
    see `machine_lacks`. With tier="auto" they have to be faster, too (faster.py)."""
    features, length, kv_len = request.features, request.length, request.kv_len
    bounds = [name for name in BOUNDS if name in features]
    by_query = _by_query(request)
    if request.dtype not in HOPPER_DTYPES:
        return f"float16 or bfloat16, not {request.dtype}"
    if request.head_dim % 8:
        return f"a head_dim that 8 divides, not {request.head_dim}"
    if others := sorted(name for name in features if which not in FEATURES[name].hopper):
        return f"attention without {others[0]}"
    if request.head_dim > 128 and (lacking := sorted(WIDE_LACKS[which] & features)):
        return f"head_dim 128 or less with {lacking[0]}, not {request.head_dim}"
    if "cu_seqlens_k" in features and "cu_seqlens" not in features:
        return "cu_seqlens beside cu_seqlens_k"
    if by_query and (others := sorted(NOT_BY_QUERY & features)):
        return f"attention without {others[0]} combined with {by_query[-1]}"
    if "block_mask" in features and bounds:
        return f"attention without {bounds[0]} combined with block_mask"
    for name in ("kv_lengths", "dropout_p"):
        if name in features and not by_query and (bounds or "block_mask" in features):
            return f"attention without {name} combined with {[*bounds, 'block_mask'][0]}"
    for name in SCORE_MODS:
        if name in features and (others := sorted(NOT_COMBINED_WITH & features - {name})):
            return f"attention without {others[0]} combined with {name}"
    if (softcap := dict(request.numbers).get("softcap", 0.0)) > SOFTCAP_MAX:
        return f"a softcap up to {SOFTCAP_MAX:g}, not {softcap:g}"
    for name in ("kv_lengths", "precise_delta"):  # at 200 and 232 the forward spills 4 B, with both 48 to 68
        if request.head_dim > 192 and {"alibi_slopes", name} <= features:
            return f"head_dim 192 or less with alibi_slopes and {name}, not {request.head_dim}"
    apart = 0 if length is None or kv_len is None else kv_len - length
    unaligned = request.causal and apart % 64 and not by_query
    if which == "forward" and "kv_lengths" in features and unaligned:  # spills 36 to 40 B
        return "lengths that differ by a multiple of 64 with a causal kv_lengths"
    # There padding by query spills 8 to 16 B, dropout 4 to 20.
    odd = request.head_dim > 192 and request.head_dim % 16
    if which == "forward" and by_query and odd and not features.isdisjoint(("kv_lengths", "precise_delta")):
        with_these = by_query[-1] + " and precise_delta" * ("kv_lengths" not in features)
        return f"a head_dim that 16 divides with {with_these} above 192, not {request.head_dim}"
    if "dropout_p" in features and odd:
        return f"a head_dim that 16 divides with dropout_p above 192, not {request.head_dim}"
    # With these, d128 with dropout spills 4 to 44 B, and above 192 with precise_delta 4 to 68.
    spills = apart % 64 or not features.isdisjoint(("kv_lengths", "sinks"))
    spills = spills or (request.head_dim > 192 and "precise_delta" in features)
    if which == "forward" and "dropout_p" in features and request.head_dim > 64 and spills:
        return "head_dim 64, or dropout_p alone and lengths that differ by a multiple of 64"
    if "block_mask" in features and request.causal and apart % BLOCK_MASK_SIZE:
        return f"lengths that differ by a multiple of {BLOCK_MASK_SIZE} with a causal block_mask"  # the diagonal's
    features -= NO_FORM[which]
    return needs_to_be_faster(which, request, features, by_query) if request.tier == "auto" else None


def _by_query(request: AttentionRequest) -> list[str]:
    """Why documents or a window have bounds by query (`masks.by_query`), such as "window and kv_lengths": keys of
    faster.py's BY_QUERY, which has some by the last word alone. Empty if they have not."""
    bound = next((name for name in BOUNDS if name in request.features), None)
    beside: list[str] = [name for name in ("cu_seqlens_k", "kv_lengths") if name in request.features]
    if not beside and request.causal is False:
        beside = ["causal=False"]
    return [f"{bound} and {name}" for name in beside] if bound else []


def refuses(request: AttentionRequest) -> str | None:
    """The reason why our kernels cannot serve `request`, or None."""
    if request.tier not in TIERS:  # first: no change of the inputs would help
        return f"attention.tier={request.tier} is none of {', '.join(TIERS)}"
    if reason := refuses_kernels(request):
        return reason
    if {"alibi_slopes", "cu_seqlens_k"} <= request.features:
        return f"it {ALIBI_RAGGED}"
    if request.tier == "hopper" and (
        needed := choose("forward", request).why or choose("backward", request).why
    ):
        return f"attention.tier=hopper needs {needed} (attention.tier=auto takes what serves)"
    return None


def refuses_kernels(request: AttentionRequest) -> str | None:
    """The reason why none of our Triton kernels, in whichever tier, can serve `request`, or None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if refused := refuses_inputs(request.device, request.dtype, request.head_dim, interpreted):
        return refused
    lacking = kernels_lack()
    return f"it needs {lacking}" if lacking else None


def refuses_inputs(device: torch.device, dtype: torch.dtype, head_dim: int, interpreted: bool) -> str | None:
    """The reason why our kernels cannot take such tensors, or None. interpreted: Triton runs in its interpreter."""
    if device.type != "cuda" and not interpreted:
        return f"it needs {cuda_not(device.type, INTERPRET)}"
    if dtype not in DTYPES:
        return f"it takes float16, bfloat16 and float32, not {dtype}"
    if interpreted and dtype is torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly (use float32 or float16)"
    if not HEAD_DIM_MIN <= head_dim <= HEAD_DIM_MAX:
        return f"it takes head_dim {HEAD_DIM_MIN} to {HEAD_DIM_MAX}, not {head_dim}"
    return None


def tier_of(request: AttentionRequest) -> str:
    """The tier that serves a request that is not refused; if forward and backward differ, both."""
    passes = (choose(which, request).kernels for which in ("forward", "backward"))
    return " and ".join(dict.fromkeys(passes))


def why_portable(request: AttentionRequest) -> str | None:
    """On a Hopper GPU, what the Hopper kernels would need to serve the passes that portable ones serve; or None."""
    if not is_hopper(request.device):
        return None
    needs = {which: choose(which, request).why for which in ("forward", "backward")}
    forward, backward = needs.values()
    if forward == backward:
        return forward and f"those for Hopper need {forward}"
    return "; ".join(f"the {which} for Hopper needs {needed}" for which, needed in needs.items() if needed)


def kernels_for_call(
    which: str,
    q: torch.Tensor,
    k: torch.Tensor,
    tensors: Tensors,
    options: Options,
    forced: bool,
    fits: Callable[[], bool],
) -> tuple[str, Options]:
    """The kernels that run a pass of a call, "forward" or "backward", and the options `Options.within` its lengths.

    Args:
        forced: whether `portable.tiles.forced` prescribes a tile, which only the portable kernels have.
        fits: whether the Hopper kernel accepts the tensors' memory layout; called last, since it imports Gluon.

    Raises:
        AttentionError: an unknown tier, or tier="hopper" for a call that those kernels cannot run.
    """
    choice, options = _choose_for_call(
        which, q.device, q.dtype, q.shape, k.shape, options, forced,
        tensors.seed is not None, tensors.alibi_slopes is not None, tensors.sinks is not None,
        tensors.document_starts is not None, tensors.kv_lengths is not None, tensors.key_blocks is not None,
    )  # fmt: skip
    if choice.kernels == "hopper" and not fits():
        choice = Choice("triton", "tensors in 16-byte steps that TMA can address")
    if options.tier == "hopper" != choice.kernels:
        raise AttentionError(
            f"attention.tier=hopper cannot run this call: it needs {choice.why}; use attention.tier=auto"
        )
    return choice.kernels, options


@functools.lru_cache(4096)
def _choose_for_call(
    which: str,
    device: torch.device,
    dtype: torch.dtype,
    q_shape: torch.Size,
    k_shape: torch.Size,
    options: Options,
    forced: bool,
    dropout: bool,
    alibi: bool,
    sinks: bool,
    documents: bool,
    padded: bool,
    blocks: bool,
) -> tuple[Choice, Options]:
    """`choose` with what a call's arguments say, and the options `Options.within` its lengths."""
    (batch, heads, length, head_dim), kv_len = q_shape, k_shape[2]
    options = options.within(length, kv_len)
    if options.tier not in TIERS:
        raise AttentionError(f"tier={options.tier} is none of {', '.join(TIERS)}")
    numbers = {name: getattr(options, name) for name in FEATURES.keys() & options._fields}
    used = numbers | {
        "dropout_p": dropout,
        "window": options.left >= 0 or (options.right >= 0 and not options.causal),
        "alibi_slopes": alibi,
        "sinks": sinks,
        "cu_seqlens": documents,
        "cu_seqlens_k": options.ragged,
        "kv_lengths": padded,
        "block_mask": blocks,
    }
    names = frozenset(name for name, value in used.items() if value)
    if forced:
        return Choice("triton", "no prescribed tile"), options
    call = length, kv_len, options.causal, frozenset(numbers.items()), batch * heads
    request = AttentionRequest(device, dtype, head_dim, names, options.tier, *call)
    return choose(which, request), options


def is_hopper(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.is_available()  # of a machine without one it may be asked what would run
        and torch.version.hip is None  # AMD's gfx90a reports 9.0 too
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


@functools.cache
def machine_lacks(device: torch.device) -> str | None:
    """What the device or Triton lacks to run the Hopper kernels at all, or None."""
    if not is_hopper(device):
        return "a Hopper GPU (compute capability 9.0)"
    lacking = gluon_lacks()
    if lacking and unknown_pair():
        kernels_lack()  # which says so, once for all kernels
    elif lacking:
        say_once(f"tilegpt: the portable kernels run, since those for Hopper need {lacking}")
    return lacking


@functools.cache
def hopper() -> ModuleType:
    """The module that launches the Hopper kernels; imports Gluon."""
    return importlib.import_module(".hopper.launch", __package__)
