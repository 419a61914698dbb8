"""Where tier="auto" takes the Hopper kernels: tables of where they were timed faster than the portable ones
(kernels/log/dispatch.md), and what a call lacks of that. What they can serve at all is in dispatch.py."""

import itertools
from typing import NamedTuple

from ..registry import AttentionRequest

SCORE_MODS = ("alibi_slopes", "softcap")
TILE = 128  # queries; with fewer, a Hopper tile would be mostly empty


class Faster(NamedTuple):
    """A row: at head_dims from smallest to largest the Hopper kernels are faster, given at least so many queries and
    so many tiles of TILE queries in all heads of a call."""

    smallest: int
    largest: int
    queries: int = TILE
    tiles: int = 0

    def takes_more_than(self, other: "Faster") -> bool:
        """Whether, at a head_dim that both have, it takes all that the other takes, and more."""
        mine, its = (self.queries, self.tiles), (other.queries, other.tiles)
        return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


# (pass, feature) -> rows. `auto` takes the Hopper kernels of a pass if a row of "" and one of each feature in use
# take the call. Comments: their time over the portable kernels' for what the row takes; "few": for fewer tiles.
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
    ("forward", "precise_delta"): (Faster(16, 256),),
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
# (pass, why bounds are by query: `dispatch._by_query`) -> rows that calls need besides those of their features.
BY_QUERY: dict[tuple[str, str], tuple[Faster, ...]] = {
    ("forward", "window and causal=False"): (
        Faster(64, 64, tiles=512),  # 0.87 to 0.985; few 1.05
        Faster(128, 128, tiles=512),  # 0.64 to 0.72; few 1.00 to 1.02
        MIDDLE_MODS,  # 0.62 to 0.66
        WIDE,  # 0.42 to 0.56, at 128 tiles 0.81
    ),
    ("forward", "causal=False"): (  # documents, with a window too
        Faster(64, 64, tiles=2048),  # 0.71 to 0.97; few 1.00 to 1.33
        # One row of 2048: 0.88, rows of 4096: 0.84, 0.85; 1024 queries 1.00 to 1.33
        Faster(64, 64, 2048, 512),
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
    ("forward", "window and kv_lengths"): (
        # 0.75 to 0.84, one row of 16,384 0.90, 1.01; few 1.02 to 1.42. 64: 1.00 to 1.45
        Faster(128, 128, tiles=2048),
        MIDDLE_MODS,  # 0.71 to 0.735
        Faster(136, 256, tiles=512),  # 0.51 to 0.80; few 1.03 to 1.13
    ),
    ("forward", "kv_lengths"): (
        Faster(128, 128, tiles=2048),  # 0.76 to 0.89; few 1.09 to 1.68. 64: 0.92 to 1.61
        MIDDLE_MODS,  # 0.77
        Faster(136, 256, tiles=512),  # 0.47 to 0.69; few 1.22
    ),
    ("backward", "causal=False"): (
        Faster(64, 64, tiles=512),  # 0.68 to 0.89; few 1.16 to 1.25
        Faster(128, 128, tiles=512),  # 0.61 to 0.73; few 1.01 to 1.08
        Faster(128, 128, 2048, 256),  # one row of 2048: 0.69
        MIDDLE_MODS,  # 0.44 to 0.51
        WIDE,  # 0.34 to 0.65
    ),
    ("backward", "cu_seqlens_k"): WIDE_TOO,  # 64: 0.68 to 0.97, 128: 0.61 to 0.86, more: 0.41 to 0.66
    ("backward", "window and kv_lengths"): (
        Faster(64, 64, tiles=512),  # 0.69 to 0.87; few 1.04 to 1.16
        Faster(128, 128, tiles=512),  # 0.62 to 0.75; few 0.92 to 1.01
        MIDDLE_MODS,  # 0.55 to 0.57
        WIDE,  # 0.41 to 0.78, at 128 tiles 0.76 to 0.81
    ),
    ("backward", "kv_lengths"): (
        Faster(64, 64, tiles=2048),  # 0.755 to 0.90; few 0.98 to 1.30
        Faster(128, 128, tiles=512),  # 0.63 to 0.71, grouped heads 0.745 before; few 1.11
        MIDDLE_MODS,  # 0.56
        WIDE,  # 0.40 to 0.61, at 128 tiles 0.91
    ),
}
# (pass, feature, feature) -> rows that the two need together, besides those of each.
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
    # 0.87 to 0.93; few 1.01 to 1.24. 64: 0.99 to 1.12
    ("forward", "softcap", "cu_seqlens"): (Faster(128, 128, tiles=2048), WIDE_MANY),
    # 0.82 to 0.95; few 0.96 to 1.63. 64: 1.01 to 1.40
    ("forward", "softcap", "kv_lengths"): (Faster(128, 128, tiles=2048), WIDE_MANY),
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
# Feature -> all features that it was timed together with; one that is not here was timed with every other.
TIMED_WITH = {
    "block_mask": frozenset(),
    **{mod: frozenset({"cu_seqlens", "kv_lengths", "precise_delta", "window"}) for mod in SCORE_MODS},
}


def needs_to_be_faster(
    which: str, request: AttentionRequest, features: frozenset[str], by_query: list[str]
) -> str | None:
    """What a call lacks to be where the Hopper kernels of a pass were timed faster, in words; None if it is there.

    features: those that add code to the pass. by_query: of `dispatch._by_query`.
    """
    head_dim, length, kv_len, heads = request.head_dim, request.length, request.kv_len, request.heads
    if "cu_seqlens_k" in features:
        features -= {"window"}  # the bounds of a call contain it
    asked = {name: FASTER.get((which, name), AS_WITHOUT) for name in ("", *sorted(features))}
    from_sides = length is None or kv_len is None or length <= kv_len  # else from tables: `masks.by_query`
    for why in by_query:
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
    """What the call lacks: the fewest queries, the fewest tiles, that a row asks for; none if a row takes it."""
    longer = [row.queries for row in rows if length < row.queries]
    more = [row.tiles for row in rows if length >= row.queries]
    if more and (heads is None or heads * -(-length // TILE) >= min(more)):
        return []
    needed = [f"{min(longer)} queries or more{with_name}, not {length}"] if longer else []
    return needed + ([f"{min(more)} tiles of {TILE} queries or more{with_name}"] if more else [])
