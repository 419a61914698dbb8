"""What results of older code are still good for: the hash that a result has under `depends` (depends.py) -> why.

A definition has changed, and its old hash is nowhere in today's code. Then results that have it are stale, unless it
is here: in `UNTOUCHED` (older_code.toml) what was measured has not changed, in `FASTER_SINCE` some of it has become
faster, which the report says beside the figures. A hash that no result has any more goes.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Old hash of a definition that has changed, but in nothing that was measured -> how that is known.
UNTOUCHED: dict[str, str] = {
    old: group["why"]
    for group in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["untouched"]
    for old in group["hashes"]
}


class Outrun(NamedTuple):
    """A speed-up made since some results were measured: in words, and `holds`, whether it affects a sample."""

    words: str
    holds: Callable[[Mapping[str, Any]], bool]


def _is_wide(sample: Mapping[str, Any]) -> bool:
    return "ms" in sample and sample.get("head_dim", 0) > 128


def _is_stored_by_tma(sample: Mapping[str, Any]) -> bool:
    """Out is stored by TMA now, or so few queries are scheduled in smaller groups. With most features neither is so.
    Whole models, whose samples have no head_dim, are left out: of their time it is less than their spread."""
    head_dim, length = sample.get("head_dim", 0), sample.get("length", 0)
    plain = "bound" not in sample and sample.get("mask", "plain") == "plain"
    plain = plain and sample.get("feature", "sinks") in ("sinks", "alibi_slopes")
    if not plain or "flash" not in sample.get("ms", ()) or not 0 < head_dim <= 128:
        return False
    causal = sample.get("causal", False)
    few = 128 < length <= (512 if causal else 256)
    return head_dim > 64 or few or length >= (4096 if causal else 2048)


def _is_of_short_rows(sample: Mapping[str, Any]) -> bool:
    """Of the short rows that were timed again, with a faster backward; what others gained was not measured."""
    head_dim, length = sample.get("head_dim"), sample.get("length", 0)
    if "flash" not in sample.get("ms", ()) or "bound" in sample or sample.get("mask", "plain") != "plain":
        return False
    heads = sample.get("batch", 0) * sample.get("heads", 0)
    if head_dim == 64:
        return not sample.get("causal") and length in (256, 512) and heads == 128
    return head_dim == 256 and length == 128 and heads >= 1024


def _has_one_loop_again(sample: Mapping[str, Any]) -> bool:
    """Padded, but not long at 64 without dropout: there keys that are all real keep a loop of their own."""
    mask, head_dim = str(sample.get("mask")), sample.get("head_dim", 0)
    padded = "padding" in mask or sample.get("feature") == "kv_lengths"
    two_loops = head_dim <= 64 and sample.get("length", 0) >= 1024 and "dropout" not in mask
    return padded and "flash" in sample.get("ms", ()) and head_dim <= 128 and not two_loops


def _is_of_eager_steps(sample: Mapping[str, Any]) -> bool:
    """Compiled and replayed steps have the launches of before; an eager one's memory is within 0.1 % of before."""
    return sample.get("kind") == "speed" and sample.get("mode") == "eager"


def _is_long_documents(sample: Mapping[str, Any]) -> bool:
    return _is_few_documents(sample) and sample.get("length", 0) > 4096


def _is_masked_and_stored_by_tma(sample: Mapping[str, Any]) -> bool:
    """Padding, timed without a causal mask, had it at 128, and gains nothing at 64 where `auto` takes it."""
    head_dim = sample.get("head_dim", 0)
    masked = ("bound" in sample or sample.get("feature") == "window") and 0 < head_dim <= 64
    dropped = sample.get("feature") == "dropout_p" and 64 < head_dim <= 128
    return (masked or dropped) and "flash" in sample.get("ms", ())


def _is_window_of_few_queries(sample: Mapping[str, Any]) -> bool:
    windowed = "window" in (sample.get("bound"), sample.get("feature"))
    few = 0 < sample.get("head_dim", 0) <= 64 and sample.get("length", 0) <= 1024
    return windowed and few and "flash" in sample.get("ms", ())


def _is_few_documents(sample: Mapping[str, Any]) -> bool:
    """Of up to 24 tiles a program, as at 16k tokens of 16 heads; of 32 heads there are more."""
    return sample.get("bound") == "documents" and sample.get("head_dim") == 128


def _is_of_short_rows_at_32(sample: Mapping[str, Any]) -> bool:
    where = [sample.get(key) for key in ("feature", "head_dim", "length")]
    return where == ["head_dim", 32, 1024]


# Likewise, but some of what was measured has become faster: those figures stay, and the report says which.
FASTER_SINCE: dict[str, tuple[Outrun, ...]] = {}


def _faster_since(hashes: str, words: str, holds: Callable[[Mapping[str, Any]], bool]) -> None:
    for each in hashes.split():
        FASTER_SINCE[each] = (*FASTER_SINCE.get(each, ()), Outrun(words, holds))


_faster_since(
    "1435df3209",
    "head_dim above 128: the forward took up to 1.06 of the time that it takes now",
    _is_wide,
)
_faster_since(
    "c63176c26a a3981ff85c 86fcb7a68c ccca7e91f7 7aebc1f5fa",
    "head_dim up to 128: the forward took 0.98 to 1.10 of the time that it takes now",
    _is_stored_by_tma,
)
# Of the code before forwards with documents had 16 heads side by side, which no hash shows.
_faster_since(
    "5bf11dbfb7",
    "documents in rows of 8,192 tokens and more at head_dim 128: the forward took 1.04 to 1.06 of the time that it "
    "takes now",
    _is_long_documents,
)
_faster_since(
    "041cffd4e2",
    "16 x 8 heads of 256 and 512 queries at head_dim 64, full, and 1,024 heads of 128 at 256: "
    "the backward took up to 1.12, at 256 up to 1.35 of the time that it takes now",
    _is_of_short_rows,
)
# Of code whose backward had two loops wherever keys were padded: `consume` of 90096cf8, 1307f4b8, 1991c4ef.
_faster_since(
    "ead0e3ca45 9de491f4d4 abb5515974",
    "key padding with dropout, at head_dim 128, or below 1024 tokens: the backward took up to 1.16 of the time "
    "that it takes now at 128 tokens, 1.04 at 256, 1.02 above",
    _has_one_loop_again,
)
_faster_since(
    "1137f2f116 9582e27bf7",
    "eager steps: flash+fused launched 2,942 kernels, 2,125 now, and took 0.93 to 1.27 of the time that it takes "
    "now, in the median of five processes 1.16; with other attention our model's too has fewer launches",
    _is_of_eager_steps,
)
# `specify` before windows, documents, key padding and dropout had out by TMA. Full padding at 128 had it.
BEFORE_TMA = "1435df3209 24fac23141 3ad113a17f 5cbe58ad4c 6a7122fb85"
_faster_since(
    BEFORE_TMA,
    "windows and documents at head_dim 64, dropout at 128: the forward took 0.99 to 1.02, with dropout 1.02 to 1.14 "
    "of the time that it takes now",
    _is_masked_and_stored_by_tma,
)
# Before the tiles of a window alone were dealt where there are few queries.
_faster_since(
    BEFORE_TMA,
    "windows at head_dim 64 in rows of up to 1024 tokens: with one of 512 the forward took 1.02 of the time that it "
    "takes now; others were not timed again",
    _is_window_of_few_queries,
)
_faster_since(
    "97aec86e81",
    "head_dim 32 at 1024 tokens: the backward, on the portable kernels, took 1.04 of the time that it takes now",
    _is_of_short_rows_at_32,
)
# `produce` before the forward with documents claimed late where tiles are few.
_faster_since(
    "506caa9b83",
    "documents at head_dim 128: the forward took, by single rows of 8,192 and 16,384 tokens, 1.02 of the time "
    "that it takes now",
    _is_few_documents,
)
