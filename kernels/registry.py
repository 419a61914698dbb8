"""The registry of attention backends: what each supports, and how a run gets the one it asks for.

A backend is a function with the signature of `kernels.naive.naive_attention`, and `refuses`, a function that takes an
`AttentionRequest` and returns why the backend cannot serve it, or None. A run asks nothing else. Other packages name
a backend only for what not all backends can do: be split into a ring, keep its result, run on any machine.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from .features import FEATURES, is_used
from .versions import kernels_lack, say_once

AttentionFn = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])  # a decorated function keeps its type

# Arguments that every backend supports.
_COMMON = ("causal", "scale", "dropout_seed")

# `auto` takes the first of these that can serve the request (but see `_able`), and refusals recommend it.
PREFERENCE = ("flash", "sdpa", "flex", "naive")
# Above this head_dim `auto` prefers torch's SDPA: at 256 on an H200 the portable kernels take 1.3 to 2.0 of its time.
FLASH_HEAD_DIM = 128
# But flash goes first where both passes have the Hopper kernels: from HOPPER_HEAD_DIM on (0.79 to 0.94 of SDPA's
# time) and, causal, up to HOPPER_CAUSAL_HEAD_DIM (0.77 to 0.89 at 160 and 192). Others were not timed since.
HOPPER_HEAD_DIM, HOPPER_CAUSAL_HEAD_DIM = 224, 192


class AttentionError(ValueError):
    """A requested attention cannot run; the message is one line with the remedy."""


@dataclass(frozen=True)
class AttentionRequest:
    """What a run, or a single call, needs of its attention.

    Attributes:
        device, dtype: of q, k and v.
        head_dim: their last dimension.
        features: names of the optional arguments that will be used (keys of `FEATURES`).
        tier: which of a backend's sets of kernels may run; "auto": the fastest that can.
        length: q_len. Like the following, None if it is not known yet, as before a run.
        kv_len, causal: of the call.
        numbers: (name, value) of the arguments that are numbers, as far as they are known.
        heads: query heads times batch.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    features: frozenset[str] = frozenset()
    tier: str = "auto"
    length: int | None = None
    kv_len: int | None = None
    causal: bool | None = None
    numbers: frozenset[tuple[str, float]] = frozenset()
    heads: int | None = None

    def beyond(self, supported: set[str]) -> str | None:
        """A reason to refuse, naming the first used feature that is not in `supported`, or None."""
        missing = sorted(self.features - supported)
        return f"it does not support {_in_words(missing[0])}" if missing else None


def _in_words(feature: str) -> str:
    """The feature's name for a message, with its explanation: "cu_seqlens (packed documents)"."""
    words = FEATURES[feature].words
    return f"{feature} ({words})" if words else feature


@dataclass(frozen=True)
class Backend:
    """A registered attention: `load()` returns the function, `refuses(request)` the reason why it cannot serve a
    request or None; for a backend with several sets of kernels, `tier(request)` names the set that serves, and
    `why(request)` says what a faster one would need; `breaks(request)` whether the function causes a graph break
    under torch.compile."""

    load: Callable[[], AttentionFn]
    refuses: Callable[[AttentionRequest], str | None]
    tier: Callable[[AttentionRequest], str] | None
    why: Callable[[AttentionRequest], str | None] | None
    breaks: Callable[[AttentionRequest], bool]


ATTENTION: dict[str, Backend] = {}


def register_attention(
    name: str,
    *,
    refuses: Callable[[AttentionRequest], str | None],
    lazy: bool = False,
    tier: Callable[[AttentionRequest], str] | None = None,
    why: Callable[[AttentionRequest], str | None] | None = None,
    breaks: Callable[[AttentionRequest], bool] = lambda request: False,
) -> Callable[[Function], Function]:
    """Decorator: register the attention function as `name`.

    Args:
        name: what a user writes after `attention=`.
        refuses: takes an `AttentionRequest`; returns the reason why it cannot be served ("it needs ..."), or None.
        lazy: the decorated function takes no arguments and returns the attention function, for backends whose
            imports are heavy.
        tier: for a backend with several sets of kernels: takes a request that is not refused, returns the name of the
            set that serves it. The attention function then has an argument `tier`.
        why: likewise, returns what `why_portable` says.
        breaks: takes a request; returns whether the function causes a graph break, so that torch.compile splits a
            model with it into several graphs (see `breaks_graph`).

    Raises:
        AttentionError: the name is taken, or "auto"; or `refuses` or `breaks` is not a function.
    """
    if name == "auto":
        raise AttentionError("attention=auto chooses among the others: register under another name")
    if name in ATTENTION:
        raise AttentionError(
            f"attention={name} is registered already: choose another name, or first del kernels.ATTENTION[{name!r}]"
        )
    for given, value in (("refuses", refuses), ("breaks", breaks)):
        if not callable(value):
            raise AttentionError(
                f"{given} must be a function of a request: {given}=lambda request: {value!r}"
            )

    def register(function: Function) -> Function:
        load = function if lazy else lambda: function
        ATTENTION[name] = Backend(load, refuses, tier, why, breaks)
        return function

    return register


def _backend(name: str) -> Backend:
    if name == "auto":
        raise AttentionError(
            "attention=auto depends on device, dtype and head_dim: use resolve_attention(name, device=...)"
        )
    if name not in ATTENTION:
        raise AttentionError(
            f"attention={name} is unknown; choose one of auto, {', '.join(sorted(ATTENTION))}"
        )
    return ATTENTION[name]


def get_attention(name: str) -> AttentionFn:
    """The attention function registered as `name`; AttentionError lists the known names.

    "auto" is refused: it depends on the request, see `resolve_attention`. Only that asks the backend's `refuses`;
    what is returned is the function itself, which checks its own arguments.
    """
    return _backend(name).load()


def used_features(features: Mapping[str, object]) -> frozenset[str]:
    """Names of the features whose value differs from "not used". AttentionError for an unknown argument."""
    unknown = sorted(set(features) - set(FEATURES) - set(_COMMON))
    if unknown:
        known = ", ".join((*_COMMON, *FEATURES))
        raise AttentionError(f"unknown attention argument {unknown[0]}; choose one of {known}")
    return frozenset(name for name, value in features.items() if name in FEATURES and is_used(name, value))


def resolve_attention(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    tier: str = "auto",
    **features: object,
) -> tuple[str, AttentionFn]:
    """The attention function for `name`, checked against what the run needs before its first step.

    Args:
        name: a key of `ATTENTION`, or "auto": flash on CUDA if it can serve the request, else torch's SDPA, else the
            first backend that can; above head_dim 128 SDPA goes first, except where our Hopper kernels are faster.
            Packed documents on CUDA: flash, else naive.
        device, dtype, head_dim: of the q, k and v that will be passed.
        tier: which of flash's kernels may run: "triton", "hopper", or "auto" for the fastest that can.
        features: the optional arguments that will be passed, e.g. dropout_p=0.1; "not used" values have no effect.

    Returns:
        (name of the backend that runs, its function). Only "auto" changes the name.

    Raises:
        AttentionError: one line with what cannot be done, why, and the nearest backend that can.
    """
    request = _request(device, dtype, head_dim, tier, features)
    if name == "auto":
        if not (able := _able(request)):
            if tier != "auto":  # only one backend has tiers
                reason = _reason(PREFERENCE[0], request)
                if _reason(PREFERENCE[0], replace(request, tier="auto")) is None:
                    raise AttentionError(f"attention=auto: {reason}")
                raise AttentionError(
                    f"attention.tier={tier} applies to {PREFERENCE[0]} only, which cannot be used here: "
                    f"{reason}; leave attention.tier out to get another backend"
                )
            asked = ", ".join(map(_in_words, sorted(request.features)))
            raise AttentionError(f"attention=auto: no backend supports {asked}")
        name = able[0]
        if request.device.type == "cuda" and (lacking := kernels_lack()):
            say_once(f"tilegpt: our kernels need {lacking}; attention=auto takes {name}")
    elif refused := _refusal(name, request):
        raise refused
    function = get_attention(name)
    return name, function if tier == "auto" else bind(function, tier=tier)


def _able(request: AttentionRequest) -> list[str]:
    """The backends that can serve the request, in the order in which `auto` prefers them."""
    # On a CPU flash means Triton's interpreter: correct, but thousands of times too slow to be recommended. Only
    # flash has tiers, so a tier other than "auto" asks for it.
    on_gpu = request.device.type == "cuda"
    passed_over = set() if on_gpu or request.tier != "auto" else {"flash"}
    if on_gpu and "cu_seqlens" in request.features:  # torch's packed documents are not measured there
        passed_over = {"sdpa", "flex"}
    able = [each for each in PREFERENCE if each not in passed_over and _reason(each, request) is None]
    wide = request.head_dim > FLASH_HEAD_DIM and "sdpa" in able
    timed = request.head_dim >= HOPPER_HEAD_DIM or (
        request.head_dim <= HOPPER_CAUSAL_HEAD_DIM and request.causal is not False
    )
    if wide and not (timed and _tier(able[0], request) == "hopper"):
        able.insert(0, "sdpa")
    return able


def _refusal(name: str, request: AttentionRequest) -> AttentionError | None:
    """The error for a request that `name` cannot serve, with the reason and the nearest backend that can; or None."""
    if (reason := _reason(name, request)) is None:
        return None
    able, without = _able(request), ""
    plain = replace(request, tier="auto")
    # If the tier is not the only obstacle, what is named instead leaves it out.
    if not able and request.tier != "auto" and _reason(name, plain):
        able, without = _able(plain), " without attention.tier"
    nearest = f"; use attention={able[0]}{without}" if able else ""
    return AttentionError(f"attention={name} cannot be used here: {reason}{nearest}")


def refusal_of_call(name: str, q: torch.Tensor, **features: object) -> AttentionError | None:
    """`_refusal` for a call of a function that came from `get_attention`, which checked nothing before."""
    return _refusal(name, _request(q.device, q.dtype, q.shape[-1], "auto", features, q.shape[2]))


def bind(attention: AttentionFn, **options: object) -> AttentionFn:
    """The attention with `options` bound, and so its packed form (see `packed_form`)."""
    return functools.partial(attention, **options)


_PACKED: dict[AttentionFn, AttentionFn] = {}


def with_packed(attention: AttentionFn, packed: AttentionFn) -> None:
    """Register the packed form of an attention.

    It takes one tensor (batch, length, 3, heads, head_dim), for a model that has q, k and v in it, and returns the
    gradient in that layout.
    """
    _PACKED[attention] = packed


def packed_form(attention: AttentionFn) -> AttentionFn | None:
    """The packed form of an attention, or None. That of a functools.partial has the same arguments bound; any other
    wrapper has none, since calling it would bypass the wrapper."""
    if isinstance(attention, functools.partial):
        packed = packed_form(attention.func)
        return packed and functools.partial(packed, *attention.args, **attention.keywords)
    return _PACKED.get(attention)


def attention_tier(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    tier: str = "auto",
    length: int | None = None,
    heads: int | None = None,
    **features: object,
) -> str | None:
    """The name of the backend's set of kernels that serves queries of this length, with that many heads in all
    sequences together; None if it has only one set. `why_portable` says why a faster one does not.

    The other arguments are as `resolve_attention` accepted them.
    """
    return _tier(name, _request(device, dtype, head_dim, tier, features, length, heads))


def why_portable(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    tier: str = "auto",
    length: int | None = None,
    heads: int | None = None,
    **features: object,
) -> str | None:
    """Why portable kernels serve such calls on a GPU for which the backend has faster ones: what those would need.

        >>> why_portable("flash", device=q.device, dtype=q.dtype, head_dim=80, length=4096, softcap=30.0)
        "those for Hopper need head_dim 64 or 128 or 136 to 256 with softcap, not 80"

    The arguments are `attention_tier`'s. None if the faster ones serve, if there are none for the device, or if
    `tier` leaves no choice.
    """
    why = _backend(name).why
    return why and why(_request(device, dtype, head_dim, tier, features, length, heads))


def breaks_graph(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    tier: str = "auto",
    **features: object,
) -> bool:
    """Whether torch.compile splits a model with this attention into several graphs, and calls it between them.

    The arguments are as `resolve_attention` accepted them.
    """
    return _backend(name).breaks(_request(device, dtype, head_dim, tier, features))


def _tier(name: str, request: AttentionRequest) -> str | None:
    choose = _backend(name).tier
    return choose and choose(request)


def _request(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    tier: str,
    features: Mapping[str, object],
    length: int | None = None,
    heads: int | None = None,
) -> AttentionRequest:
    if not isinstance(dtype, torch.dtype):
        raise AttentionError(f"dtype must be a torch.dtype such as torch.float32, got {dtype!r}")
    causal = features.get("causal")
    numbers = {(name, value) for name, value in features.items() if isinstance(value, int | float)}
    asked = torch.device(device), dtype, head_dim, used_features(features), tier, length
    known = causal if isinstance(causal, bool) else None
    return AttentionRequest(*asked, causal=known, numbers=frozenset(numbers), heads=heads)


def _reason(name: str, request: AttentionRequest) -> str | None:
    """The reason why the backend cannot serve the request, or None."""
    backend = _backend(name)
    if request.tier != "auto" and backend.tier is None:
        return f"it has no kernel tiers (leave out attention.tier={request.tier})"
    return backend.refuses(request)
