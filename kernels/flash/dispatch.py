"""Chooses the kernels of a call, for the forward and for the backward, and says why the others were not chosen.

    triton   portable/: every feature, any GPU that Triton compiles for, the interpreter
    hopper   hopper/: sm_90, 16 bits, a head_dim that 8 divides, and the features that have `hopper` in
             kernels/features.py, where `FASTER` says so; with tier="hopper" elsewhere too

`choose` has the rule. Before a run `refuses` and `tier_of` ask it, with what is known then; every pass of a call
asks it through `chosen`; `kernels.why_portable` tells users. Triton is imported only if there is a Hopper GPU.
"""

import functools
import importlib
import itertools
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

TIERS = ("auto", "triton", "hopper")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIM_MIN, HEAD_DIM_MAX = 16, 256
HOPPER_DTYPES = (torch.float16, torch.bfloat16)
# The Hopper kernels combine none of SCORE_MODS with one of NOT_COMBINED_WITH: to try, by kernels/log/hopper_masks.md.
SCORE_MODS = ("alibi_slopes", "softcap")
NOT_COMBINED_WITH = frozenset({"block_mask", "dropout_p", "sinks", *SCORE_MODS})
SOFTCAP_MAX = 64.0  # their tanh is exact enough up to it; see hopper/score_mods.py
# Features that the Hopper kernels have by the table in kernels/features.py, but that nobody wrote above head_dim 128.
WIDE_LACKS = {
    "forward": frozenset({"block_mask"}),
    "backward": frozenset({"block_mask"}),
}
# Features that add no code to a pass, which takes as long without them; `delta_kernel` has the backward's.
NO_FORM = {
    "forward": frozenset({"return_lse"}),
    "backward": frozenset({"precise_delta", "return_lse", "sinks"}),
}
BOUNDS = ("cu_seqlens", "window")  # the bounds of what a query sees; see hopper/bounds.py
# What they do not combine with bounds by query (`masks.by_query`): softcap spills 4 to 8 B in the backward at 64.
NOT_BY_QUERY = frozenset({"alibi_slopes", "block_mask", "dropout_p", "softcap"})
ALIBI_RAGGED = "does not support alibi_slopes with cu_seqlens_k"
TILE = 128  # queries; with fewer, a Hopper tile would be mostly empty


class Faster(NamedTuple):
    """Head_dims at which the Hopper kernels take less time than the portable ones, given at least so many queries and
    so many tiles of them (in all heads of a call)."""

    smallest: int
    largest: int
    queries: int = TILE
    tiles: int = 0

    def takes_more_than(self, other: "Faster") -> bool:
        """Whether, at a head_dim that both have, it takes all that the other takes, and more."""
        mine, its = (self.queries, self.tiles), (other.queries, other.tiles)
        return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


# `auto` takes the Hopper kernels of a pass where, for "" and for each feature in use, a row takes the call. Comments:
# their time over the portable kernels' (kernels/log/dispatch.md), for what the row takes; "few": for fewer tiles.
AS_WITHOUT = (Faster(64, 64), Faster(128, 128))  # the rows of a feature that has none below
# A feature above head_dim 128: forward 0.42 to 0.86, backward 0.34 to 0.68; at 128 tiles, timed at 256 and not with
# sinks, 0.68 to 1.01 and 0.54 to 0.75. Dropout, with precise_delta too, at 136 to 192: 0.55 to 0.69 and 0.36 to 0.45,
# at 128 tiles 0.67 to 0.83 and 0.45 to 0.51.
WIDE = Faster(136, 256, tiles=128)
WIDE_TOO = (*AS_WITHOUT, WIDE)
# A feature at 80 and 96, the others from 72 to 120 not timed with one. Forward 0.57 to 0.83, with 128 tiles 0.87 to
# 1.34; backward 0.39 to 0.88. Softcap and ALiBi, timed at 2560 tiles: 0.63 to 0.84, 0.36 to 0.55.
MIDDLE, MIDDLE_BACKWARD = Faster(72, 120, 1024, 512), Faster(72, 120, 512, 128)
MIDDLE_MODS = Faster(72, 120, 1024, 2048)
# The backward at 32, plain and with softcap, ALiBi or documents: 0.61 to 0.96; dropout and padding 0.74 to 0.91 from
# 4096 queries on, with 1024 up to 1.02; a window 1.01.
NARROW_BACKWARD = Faster(32, 32, 1024, 4096)
FASTER: dict[tuple[str, str], tuple[Faster, ...]] = {
    ("forward", ""): (
        Faster(64, 64, tiles=256),  # 0.75 to 1.02, at 256 tiles up to 1.24; few 0.89 to 1.22
        Faster(128, 128, tiles=128),  # 0.68 to 0.98, at 128 tiles up to 1.07; few 1.04 to 1.22
        Faster(40, 120, 512, 1024),  # 0.54 to 0.82; few 1.02 to 1.13. 16: 1.20 to 1.43, 32: 0.95 to 1.06
        MIDDLE,  # with sinks 0.61 to 0.76 at 512 tiles; not timed without
        Faster(136, 256),  # 0.60 to 0.93
    ),
    # 0.81 to 0.91, at 512 queries up to 1.07; few 1.04 to 1.61. 64: many 1.00 to 1.07
    ("forward", "dropout_p"): (Faster(128, 128, tiles=512), MIDDLE, WIDE),
    ("forward", "kv_lengths"): (
        Faster(64, 64, 2048, 1024),  # 0.88 to 0.97; 512 and 1024 queries 1.04 to 1.07, few 0.95 to 1.48
        Faster(128, 128, tiles=512),  # 0.73 to 1.01; few 1.07 to 1.57
        MIDDLE,
        WIDE,
    ),
    # As without it: 64 and 128, few and many; 80, 96 and 256, many
    ("forward", "precise_delta"): (Faster(HEAD_DIM_MIN, HEAD_DIM_MAX),),
    ("forward", "window"): (
        Faster(64, 64, tiles=512),  # 0.86 to 1.01; few 1.07 to 1.11
        Faster(128, 128, tiles=512),  # 0.74 to 0.95; few 1.06 to 1.14
        MIDDLE,
        WIDE,
    ),
    ("backward", ""): (
        Faster(64, 64, tiles=256),  # 0.64 to 1.02; few 0.82 to 1.48
        Faster(128, 128),  # 0.49 to 0.90; few 0.57 to 1.08
        Faster(32, 32, 2048, 1024),  # 4096 and 16,384 queries: 0.75 to 0.80; others not timed
        NARROW_BACKWARD,
        Faster(40, 56, 512, 1024),  # 48: 0.60 to 0.81
        Faster(72, 120),  # 0.45 to 0.66; few 0.86 and 0.87. 16: 1.11 to 1.49
        Faster(136, 256, 256),  # 0.41 to 0.63; few 0.54 to 0.93, but at 128 queries 1.04 to 1.12
        Faster(256, 256, tiles=1024),  # at 128 queries 0.74 and 0.76
    ),
    **{("forward", name): (*WIDE_TOO, MIDDLE) for name in ("cu_seqlens", "sinks")},
    **{("forward", name): (*WIDE_TOO, MIDDLE_MODS) for name in SCORE_MODS},
    **{("backward", name): (*WIDE_TOO, MIDDLE_MODS, NARROW_BACKWARD) for name in SCORE_MODS},
    ("backward", "cu_seqlens"): (*WIDE_TOO, MIDDLE_BACKWARD, NARROW_BACKWARD),
    ("backward", "dropout_p"): (*WIDE_TOO, MIDDLE_BACKWARD, Faster(32, 32, 4096, 4096)),
    ("backward", "window"): (*WIDE_TOO, MIDDLE_BACKWARD),
    **{(which, "cu_seqlens_k"): WIDE_TOO for which in ("forward", "backward")},
    ("backward", "kv_lengths"): (
        Faster(64, 64),
        Faster(128, 128, tiles=256),  # 0.58 to 0.93; few 0.96 to 1.12
        MIDDLE_BACKWARD,
        Faster(32, 32, 4096, 4096),
        WIDE,
    ),
}
# Rows that calls with bounds by query need besides those of their features: of a pass, by what gives such bounds.
BY_QUERY: dict[tuple[str, str], tuple[Faster, ...]] = {
    ("forward", "window and causal=False"): (
        Faster(64, 64, tiles=512),  # 0.87 to 0.985; few 1.05
        Faster(128, 128, tiles=512),  # 0.64 to 0.72; few 1.00 to 1.02
        MIDDLE_MODS,  # 0.62 to 0.66
        WIDE,  # 0.42 to 0.56, at 128 tiles 0.81
    ),
    ("forward", "causal=False"): (  # documents, with a window too
        Faster(64, 64, tiles=2048),  # 0.71 to 0.97; few 1.00 to 1.33
        Faster(
            64, 64, 2048, 512
        ),  # one row of 2048: 0.88, rows of 4096: 0.84, 0.85; 1024 queries 1.00 to 1.33
        Faster(128, 128, tiles=512),  # 0.65 to 0.92; few 1.23, 1.24
        Faster(128, 128, 2048, 256),  # one row of 2048: 0.75
        MIDDLE_MODS,  # 0.65 to 0.69
        WIDE,  # 0.40 to 0.64, at 128 tiles 0.84
    ),
    ("forward", "cu_seqlens_k"): (
        Faster(64, 64, 4096),  # 0.865 to 0.99; fewer queries 0.88 to 1.45
        Faster(128, 128, 2048),  # 0.60 to 0.86; fewer 0.94 to 1.11
        WIDE,  # 0.45 to 0.79
    ),
    ("forward", "kv_lengths"): (
        Faster(128, 128, tiles=2048),  # 0.76 to 0.93; few 1.11 to 1.61. 64: 0.92 to 1.59
        Faster(136, 256, tiles=512),  # 0.49 to 0.78; few 1.02 to 1.19
    ),
    ("backward", "causal=False"): (
        Faster(64, 64, tiles=512),  # 0.68 to 0.89; few 1.16 to 1.25
        Faster(128, 128, tiles=512),  # 0.61 to 0.73; few 1.01 to 1.08
        Faster(128, 128, 2048, 256),  # one row of 2048: 0.69
        MIDDLE_MODS,  # 0.44 to 0.51
        WIDE,  # 0.34 to 0.65
    ),
    ("backward", "cu_seqlens_k"): WIDE_TOO,  # 64: 0.68 to 0.97, 128: 0.61 to 0.86, more: 0.41 to 0.66
    ("backward", "kv_lengths"): (
        Faster(64, 64, tiles=2048),  # 0.77 to 0.95, but in two rows of 8,192 1.01 and 1.23; few 0.98 to 1.31
        Faster(128, 128, tiles=512),  # 0.64 to 0.82; few 0.87 to 1.10
        WIDE,  # 0.41 to 0.61, at 128 tiles 0.74 to 0.90
    ),
}
# Rows that two features need together, besides those of each.
WIDE_MANY = Faster(136, 256, tiles=1024)  # timed at 256: forward 0.53 to 0.67, backward 0.46 to 0.49
PAIRS: dict[tuple[str, str, str], tuple[Faster, ...]] = {
    ("forward", "alibi_slopes", "cu_seqlens"): (
        Faster(64, 64, tiles=512),  # 0.82 to 0.96; few 1.01 to 1.03
        Faster(128, 128, tiles=512),  # 0.76 to 0.88; few 1.04 to 1.08
        WIDE_MANY,
    ),
    ("forward", "alibi_slopes", "kv_lengths"): (
        Faster(64, 64, 4096, 4096),  # 0.94, 0.95; 512 and 1024 queries 1.04 to 1.37
        Faster(128, 128, tiles=512),  # 0.74 to 0.92; few 1.38 to 1.47
        Faster(136, 192, tiles=512),  # 0.55 to 0.71; above 192 refused
    ),
    ("forward", "alibi_slopes", "precise_delta"): (
        Faster(64, 64, tiles=2048),  # 0.80 to 0.93; 512 tiles 0.77 to 1.01, few 1.16 to 1.21
        Faster(128, 128, tiles=128),  # 0.69 to 0.91
        Faster(136, 192, tiles=1024),  # timed at 192: 0.58 to 0.63; above refused
    ),
    ("forward", "softcap", "cu_seqlens"): (
        Faster(128, 128, tiles=2048),  # 0.87 to 0.93; few 1.01 to 1.24. 64: 0.99 to 1.12
        WIDE_MANY,
    ),
    ("forward", "softcap", "kv_lengths"): (
        Faster(128, 128, tiles=2048),  # 0.82 to 0.95; few 0.96 to 1.63. 64: 1.01 to 1.40
        WIDE_MANY,
    ),
    ("forward", "softcap", "precise_delta"): (
        Faster(128, 128, tiles=128),  # 0.71 to 0.87, with a window too 0.89. 64: 0.92 to 1.31
        Faster(64, 64, 8192, 2048),  # causal, 16,384 queries: 0.95; full, 4096: 0.99
        WIDE_MANY,
    ),
    ("backward", "alibi_slopes", "kv_lengths"): (
        Faster(64, 64, tiles=512),  # 0.65 to 0.88; few 1.00 to 1.03
        Faster(128, 128),  # 0.55 to 0.69; few 0.89 to 0.98
        Faster(136, 192, tiles=512),  # 0.34 to 0.455
    ),
    ("backward", "softcap", "kv_lengths"): (
        Faster(64, 64, tiles=512),  # 0.66 to 0.94; few 1.04 to 1.14
        Faster(128, 128),  # 0.49 to 0.66; few 0.88 to 0.95
        WIDE_MANY,
    ),
    # 64: 0.69 to 0.88, 128: 0.53 to 0.70
    **{("backward", mod, "cu_seqlens"): (*AS_WITHOUT, WIDE_MANY) for mod in SCORE_MODS},
}
# For each of these, all the features it was timed with; a feature that is not here was timed with every other.
TIMED_WITH = {
    "block_mask": frozenset(),
    **{mod: frozenset({"cu_seqlens", "kv_lengths", "precise_delta", "window"}) for mod in SCORE_MODS},
}


class Choice(NamedTuple):
    """The kernels of a pass: "triton" or "hopper"; and for "triton" what those for Hopper would need, unless the
    request names the tier."""

    kernels: str
    why: str | None = None


@functools.lru_cache(1024)
def choose(which: str, request: AttentionRequest) -> Choice:
    """The kernels that serve a pass, "forward" or "backward"; what the request leaves open is assumed to suit Hopper.

    Forward and backward need not agree: with dropout at head_dim 64 auto takes the portable forward.
    """
    if request.tier == "triton":
        return Choice("triton")
    needed = machine_lacks(request.device) or hopper_needs(which, request)
    return Choice("triton", needed) if needed else Choice("hopper")


def hopper_needs(which: str, request: AttentionRequest) -> str | None:
    """What the Hopper kernels of a pass would need to serve the request on a machine that has them, or None."""
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
    odd = (
        request.head_dim > 192 and request.head_dim % 16
    )  # with padding by query 8 to 16 B, with dropout 4 to 20
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
    return _needs_to_be_faster(which, request) if request.tier == "auto" else None


def _by_query(request: AttentionRequest) -> list[str]:
    """Why documents or a window have bounds by query (`masks.by_query`): keys of BY_QUERY, or their last words."""
    bound = next((name for name in BOUNDS if name in request.features), None)
    beside: list[str] = [name for name in ("cu_seqlens_k", "kv_lengths") if name in request.features]
    if not beside and request.causal is False:
        beside = ["causal=False"]
    return [f"{bound} and {name}" for name in beside] if bound else []


def _needs_to_be_faster(which: str, request: AttentionRequest) -> str | None:
    """What `FASTER`, `BY_QUERY`, `PAIRS` and `TIMED_WITH` ask for in addition, or None."""
    head_dim, length, kv_len, heads = request.head_dim, request.length, request.kv_len, request.heads
    features = request.features - NO_FORM[which]
    if "cu_seqlens_k" in features:
        features -= {"window"}  # the bounds of a call contain it
    asked = {name: FASTER.get((which, name), AS_WITHOUT) for name in ("", *sorted(features))}
    from_sides = length is None or kv_len is None or length <= kv_len  # else from tables: `masks.by_query`
    for why in _by_query(request):
        its_own = BY_QUERY.get((which, why)) if from_sides else None
        asked[why] = its_own or BY_QUERY[which, why.rpartition(" ")[2]]
    for pair in itertools.permutations(sorted(features), 2):
        if rows := PAIRS.get((which, *pair)):
            asked[" and ".join(pair)] = rows
    for name, rows in asked.items():
        with_name = f" with {name}" if name else ""
        its = [row for row in rows if row.smallest <= head_dim <= row.largest]
        its = [row for row in its if not any(each.takes_more_than(row) for each in its)]
        if not its:
            spans = sorted({row[:2] for row in rows})
            outer = [
                (a, b) for a, b in spans if not any(c <= a <= b <= d for c, d in spans if (c, d) != (a, b))
            ]
            dims = (str(a) if a == b else f"{a} to {b}" for a, b in outer)
            return f"head_dim {' or '.join(dims)}{with_name}, not {head_dim}"
        if others := sorted(features - {name} - TIMED_WITH.get(name, features)):
            return f"attention without {others[0]} combined with {name}"
        if length is not None and (needed := _nearest(its, length, heads, with_name)):
            return ", or ".join(needed)
    return None


def _nearest(rows: list[Faster], length: int, heads: int | None, with_name: str) -> list[str]:
    """The fewest queries, and the fewest tiles, that one of the rows asks for and the call lacks; none where one
    takes the call."""
    longer = [row.queries for row in rows if length < row.queries]
    more = [row.tiles for row in rows if length >= row.queries]
    if more and (heads is None or heads * -(-length // TILE) >= min(more)):
        return []
    needed = [f"{min(longer)} queries or more{with_name}, not {length}"] if longer else []
    return needed + ([f"{min(more)} tiles of {TILE} queries or more{with_name}"] if more else [])


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
    """The reason why none of our Triton kernels can serve `request`, or None."""
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
    """What the Hopper kernels would need to serve the passes that portable ones serve on a Hopper GPU, or None."""
    if not is_hopper(request.device):
        return None
    needs = {which: choose(which, request).why for which in ("forward", "backward")}
    forward, backward = needs.values()
    if forward == backward:
        return forward and f"those for Hopper need {forward}"
    return "; ".join(f"the {which} for Hopper needs {needed}" for which, needed in needs.items() if needed)


def chosen(
    which: str,
    q: torch.Tensor,
    k: torch.Tensor,
    tensors: Tensors,
    options: Options,
    forced: bool,
    fits: Callable[[], bool],
) -> tuple[str, Options]:
    """The kernels that run a pass of a call, "forward" or "backward", and their options, with the window trimmed.

    Args:
        forced: whether a tile is prescribed, which only the portable kernels have.
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
