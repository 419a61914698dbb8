"""What results of older code are still good for: the hash that a result has under `depends` (depends.py) -> why.

A definition has changed, and its old hash is nowhere in today's code. Then results that have it are stale, unless it
is here: in `UNTOUCHED` what was measured has not changed, in `FASTER_SINCE` some of it has become faster, which the
report says beside the figures. A hash that no result has any more, or only stale ones, goes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Old hash of a definition that has changed, but in nothing that was measured -> how that is known.
UNTOUCHED: dict[str, str] = {
    "b4fcdd223f": "library.sdpa: annotations, and an assertion of what check_dropout has checked",
    "6f8f3e6504": "library.sdpa: enable_gqa is left out where it would be False, which is its default",
    "008a7d7eec": "library.flex: an annotation",
    "15be1ba293": "precision.compiled: it names how Triton fuses multiplications, as it did",
    "cac01e1838": "encoders.run: training on ListOps is longer, and has seeds; times are as before",
    "93f779ba6f": "flash1.BACKWARD: another tile at 128, where only history times: the fastest, or it says so",
    "ffdc9e02a8": "precision.compiled: no cache tag from torch 2.13 on: where timed tiles are kept, not which",
    "14b0f5b720": "features.run: other head_dims are checked at twice the length; what is timed is as before",
    "3ad113a17f": "specify: softcap, precise_delta, and grouped heads of few queries have the form of before again",
    "9204167d2d": "history.run: FlashAttention-3 with one of its schedules undone is new; other calls are as before",
    "5da83dcba3": "compiled_to_graphs: what it does before it compiles is a function of its own",
    "5852a1659a": "sparse.run: what is counted, counting.py, no longer reads in new_zeros, which no kernel here has",
}
UNTOUCHED |= dict.fromkeys(
    ("7df027823e", "6888c23409", "859267798d", "91d95a4de2"),
    "run of attention, numerics, history, traffic: shared scaffolding, and what a GPU times; counts are as before",
)
UNTOUCHED |= dict.fromkeys(
    ("bee8479119", "33751029d9", "d61745727a"),
    "run of attention, encoders, history, sparse, traffic, training: a clock that nvidia-smi tells late is left out; "
    "of attention: workloads of lengths that no paper has",
)
UNTOUCHED |= dict.fromkeys(
    ("24ee1db730", "a5eecf7a3e"),
    "delta_kernel, round_kernel: an option that no CPU takes; on a GPU it came with another hopper_backward_kernel",
)
UNTOUCHED |= dict.fromkeys(
    ("6733e0309b", "a2193c75fe"),
    "Hopper forward, and the passes beside the backward: head_dims, features; plain, at 64 and 128, PTX as it was",
)
UNTOUCHED |= dict.fromkeys(
    ("82f86f9b35", "5337b26474"),
    "cu_seqlens_k is new. naive: without it the same operations; flash: a call's host time within 0.1 us of 30; "
    "dkdv_kernel: a branch that is compiled with it alone, 135 other forms keep their PTX",
)
UNTOUCHED |= dict.fromkeys(
    ("c984a6a150", "bdcfcee7cd", "33ff0cc7fd", "b25076b9dd", "15180cfdf0"),
    "Hopper forward: a barrier where TMA stores out, which windows and documents, alone recorded with it, do not",
)
UNTOUCHED |= dict.fromkeys(
    (
        *("217f3d6b62", "3b064d20a5", "5c6bf28676", "3096ad8b7b", "d424c04b90", "fb3892486c", "b562157e18"),
        *("83327a261a", "ad85b63fdd", "072c25ac4c", "52d107f36c", "bd1139b5ed", "94da2c936a", "a4b477e0a9"),
        *("558cd83f41", "0fc98657c1", "c19b7813a3", "7b4a62a858", "16fe97e480", "453ced0a34", "2d2c0f0bf4"),
        "c3c351f62c",
    ),
    "Hopper kernels: only the columns that head_dim needs are multiplied; at 64, 128 and 256 the PTX is as it was; "
    "specify, FASTER: key padding at 128, other head_dims; what was measured of these is in FASTER_SINCE",
)
UNTOUCHED |= dict.fromkeys(
    ("6612de8fb6", "95680653b9", "24fac23141"),
    "FASTER, _prepare_backward, specify: rewritten; what was timed with them gets the same kernels as before",
)
UNTOUCHED |= dict.fromkeys(
    (
        *("c8ddeb08ce", "9994f9d784", "0abc6fc3e9", "d40b706c24", "70b012c6e2", "270a41a7d9"),
        *("06b7658fca", "e9d98a3449", "b08ae029bc", "9612de70d4", "bf8ccd7adc", "ce72e59948", "77bf87149e"),
        *("3d5e08d09e", "97b369337c", "7147e56d4c", "ed0c8fee57", "57c24ba1de", "47f0471095", "17119063dd"),
        *("dfb072a5a3", "a1513fa62d", "bac16f1506", "c2c85acc85"),
    ),
    "Hopper kernels, 90096cf8: the same in fewer lines; all that was timed has the same PTX as before",
)
UNTOUCHED |= dict.fromkeys(
    ("7924b76677", "0951168caf", "6aaf3a2f5e", "878b616d50", "edff3ed25f", "f38f2f1b32"),
    "Hopper backward: dQ's columns at 32 and 72 to 96, all timed again; other head_dims have the same PTX as before",
)
UNTOUCHED |= dict.fromkeys(
    (
        *("123acdf6d8", "4a5e629154", "55ef04a300", "6cd68413b2", "84f416ca93", "86ffce5383", "b422259628"),
        *("b8af1f0acb", "d16807b303", "d3157eff8c"),
    ),
    "Hopper backward, b68a8a1b: other registers at 32 in short rows, not timed; all else has the same PTX as before",
)
UNTOUCHED |= dict.fromkeys(
    ("0980ef4c1c", "f5001aa809", "2e2ecfd9ca", "3e2fb9f275", "3fe9f173c0"),
    "library.flex, precision.compiled, compiled_to_graphs, run of attention, numerics, features: torch.compile is "
    "told to fuse multiplications with additions, the default of Triton 3.7, with which all was measured",
)
UNTOUCHED |= dict.fromkeys(
    (
        *("2e3ce79740", "e17c6069c6", "4a6938a3f7", "87bb3a1704", "88343d8002", "ebfb71993b", "11298d3529"),
        *("34ac29db2e", "ec186bc935"),
    ),
    "Hopper backward above head_dim 128: features are new; without them all 26 forms keep their PTX, byte for byte",
)
UNTOUCHED |= dict.fromkeys(
    ("90f78043a1", "9a1d746cad", "a0bd9752df"),
    "Hopper forward: it waits for a Q that lands late, at head_dim 136 to 256; at 256 0.994 to 1.002 of the time (an "
    "H200, 8 points), 136 to 192 were timed again, all others have the same PTX",
)
UNTOUCHED |= dict.fromkeys(
    (
        *("2816ce88dc", "3995913b95", "991dbf5bb0", "999fcd2ac7", "b21cea09f6", "b676cf0832", "d9fc1873c7"),
        *("dccf593874", "ff5fe6633c"),
    ),
    "Hopper forward: tiles of 128 + 64 columns at head_dim 136 to 192, which were timed again; all others, the "
    "backward and FlashAttention-3's have the same PTX",
)
UNTOUCHED |= dict.fromkeys(
    ("7c677f7790", "aca8019bfe", "70580d0985", "f89e3f8038", "64266deb63"),
    "run of attention, history, traffic: standard+cut, then stored_p are new; other calls are as before",
)
UNTOUCHED |= dict.fromkeys(
    (
        *("61f5830167", "f9f5264dde", "705672169b", "f733cc3cad", "e7bf3f1a57", "66e08a20c3", "a00310b108"),
        *("b2639e1d35", "70fac119e4", "cc0ab992c1", "13d4bf6444", "e43c74fd7e", "9b94663a38", "71128a3b1f"),
        *("938c5e0e30", "067ff7dcac", "3f96cc31fe", "34758d2165", "554131bb00", "88c301faff"),
    ),
    "Hopper forward, backward up to 128, FlashAttention-3: key padding, dropout and sinks above head_dim 128 are "
    "new; the forms that were there keep their PTX, byte for byte",
)
UNTOUCHED |= dict.fromkeys(
    (
        *("c242d7e7d5", "7e37ebd930", "bed8f6e12c", "7481cb216a", "0ae6e8f559", "cdee13f612", "d4d14a5d66"),
        *("0c278f32f6", "5d1bb143ee", "cb17eaaff3", "73dc051511"),
    ),
    "Hopper backward above head_dim 128: likewise at 200 to 256; 136 to 192 has tiles of 128 + 64 columns, and was "
    "timed again",
)
UNTOUCHED |= dict.fromkeys(
    ("97aec86e81", "fa06c403d4", "19b1ae1ecb"),
    "FASTER: rows above head_dim 128 for features; what was timed with them before was timed again",
)
UNTOUCHED |= dict.fromkeys(
    (
        *("7284977f0c", "89f454ca1c", "677cc0d134", "d8f568e19c", "064c6bd5c6", "4de3d897b8"),
        *("8483154ab4", "620172f8ed", "d4a73ecaef", "6b9104c5b8", "83b0cb2a3f", "c16ad701c5", "dc06441f9f"),
        *("6a820ff51c", "d1ad3a3ba5", "c9f6b4713b", "96db7e1b99", "8ba1437dca", "cec8232005", "bcb56ffc5e"),
        *("f2f30556ed", "e254c56f33", "b625c1bc0a", "44c155e526", "7e6374cbe4", "ca40f220fc", "846031e70d"),
        *("7a0a6dbf04", "17680ea12b", "1d3385c5a4"),
    ),
    "Hopper kernels, FlashAttention-3: bounds by query and keys that a window hides are new; the forms that were "
    "there keep their PTX, byte for byte",
)
UNTOUCHED |= dict.fromkeys(
    ("12bbc9b0ec", "369625235a"),
    "Hopper dK/dV above head_dim 128: with dropout another form, timed again; all else has the same PTX",
)
UNTOUCHED |= dict.fromkeys(
    ("dc6eaf8c83", "00f4340dd9", "6612f49ba6", "97b2742e5c"),
    "Hopper kernels, 1991c4ef: windows over more keys and few tiles at 256 have another form since, and no figure "
    "of before; all else has the same PTX",
)
UNTOUCHED |= dict.fromkeys(
    ("1e0b006386", "41b656bd2f", "2d083e0c69", "b6e7878505", "aa811ceed6"),
    "stored_p, of which no figure is older than this code",
)
UNTOUCHED["4be4db18df"] = (
    "Hopper backward: key padding has one loop or two, as `consume`; all else has the same PTX"
)
UNTOUCHED["548c15d3f2"] = (
    "training.run: others' gradients are added by autograd again; timed with it is our model alone"
)
UNTOUCHED["7e9d23b0da"] = "Hopper backward: windows over twice as many keys at head_dim 128 were timed again"
UNTOUCHED |= dict.fromkeys(
    ("9af6515a4c", "0f2e806c13"),
    "flash_attention: cu_seqlens_k, which nothing here measures, is prepared by other kernels",
)
UNTOUCHED |= dict.fromkeys(
    ("9d69d843bf", "8ff4704e40"),
    "FASTER, by_query_kernel: documents with bounds by query, which nothing here measures",
)
UNTOUCHED["4d68cf4f2b"] = (
    "run of attention: what standard+cut does with a causal mask is a function of its own, the same operations"
)
UNTOUCHED["d147f5976a"] = "training.run: standard+cut is new; the other contenders are built as before"


class Outrun(NamedTuple):
    """What has become faster since it was measured: in words, and whether a sample is of it."""

    words: str
    holds: Callable[[Mapping[str, Any]], bool]


def _is_wide(sample: Mapping[str, Any]) -> bool:
    return "ms" in sample and sample.get("head_dim", 0) > 128


def _is_stored_by_tma(sample: Mapping[str, Any]) -> bool:
    """Or has so few queries that their tiles are scheduled in smaller groups. With most features neither is so. Whole
    models, whose samples have no head_dim, are left out: of their time it is less than their spread."""
    head_dim, length = sample.get("head_dim", 0), sample.get("length", 0)
    plain = "bound" not in sample and sample.get("mask", "plain") == "plain"
    plain = plain and sample.get("feature", "sinks") in ("sinks", "alibi_slopes")
    if not plain or "flash" not in sample.get("ms", ()) or not 0 < head_dim <= 128:
        return False
    causal = sample.get("causal", False)
    few = 128 < length <= (512 if causal else 256)
    return head_dim > 64 or few or length >= (4096 if causal else 2048)


def _is_of_short_rows(sample: Mapping[str, Any]) -> bool:
    """Where its backward was timed again; what other short rows gained was not."""
    head_dim, length = sample.get("head_dim"), sample.get("length", 0)
    if "flash" not in sample.get("ms", ()) or "bound" in sample or sample.get("mask", "plain") != "plain":
        return False
    heads = sample.get("batch", 0) * sample.get("heads", 0)
    if head_dim == 64:
        return not sample.get("causal") and length in (256, 512) and heads == 128
    return head_dim == 256 and length == 128 and heads >= 1024


def _is_of_few_wide_tiles(sample: Mapping[str, Any]) -> bool:
    """Which was timed again at 128 and 256 tokens."""
    plain = sample.get("mask", "plain") == "plain" and "feature" not in sample
    few = bool(sample.get("causal")) and sample.get("length") == 512
    return plain and few and sample.get("head_dim") == 256 and "flash" in sample.get("ms", ())


def _is_padded(sample: Mapping[str, Any]) -> bool:
    masked = "padding" in str(sample.get("mask")) or sample.get("feature") == "kv_lengths"
    return masked and "flash" in sample.get("ms", ()) and sample.get("head_dim", 0) <= 128


def _has_two_loops(sample: Mapping[str, Any]) -> bool:
    """Those whose keys are all real have a loop of their own in the backward."""
    long = sample.get("head_dim", 0) <= 64 and sample.get("length", 0) >= 1024
    return _is_padded(sample) and long and "dropout" not in str(sample.get("mask"))


def _has_one_loop_again(sample: Mapping[str, Any]) -> bool:
    return _is_padded(sample) and not _has_two_loops(sample)


def _is_of_eager_steps(sample: Mapping[str, Any]) -> bool:
    """Compiled and replayed steps have the launches of before; an eager one's memory is within 0.1 % of before."""
    return sample.get("kind") == "speed" and sample.get("mode") == "eager"


def _is_long_documents(sample: Mapping[str, Any]) -> bool:
    return (
        sample.get("bound") == "documents"
        and sample.get("head_dim") == 128
        and sample.get("length", 0) > 4096
    )


def _is_of_short_windows(sample: Mapping[str, Any]) -> bool:
    window = "window" in (sample.get("bound"), sample.get("feature"))
    return window and sample.get("head_dim") == 128 and sample.get("length", 0) <= 2048 and "ms" in sample


def _is_masked_and_stored_by_tma(sample: Mapping[str, Any]) -> bool:
    """Padding, timed without a causal mask, had it at 128, and gains nothing at 64 where `auto` takes it."""
    head_dim = sample.get("head_dim", 0)
    masked = ("bound" in sample or sample.get("feature") == "window") and 0 < head_dim <= 64
    dropped = sample.get("feature") == "dropout_p" and 64 < head_dim <= 128
    return (masked or dropped) and "flash" in sample.get("ms", ())


def _is_of_order_at_128(sample: Mapping[str, Any]) -> bool:
    return (sample.get("kind"), sample.get("head_dim")) == ("order", 128)


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
# Of history's run before flash1's tiles at 128 were raced to the end; all else of it is as before.
_faster_since(
    "128c173582",
    "the loops' order at head_dim 128: flash1's backward had a tile with which it took 1.9 times as long, so its "
    "points are not judged",
    _is_of_order_at_128,
)
SLOWER_FLASH1 = {"128c173582": FASTER_SINCE["128c173582"]}
_faster_since(
    "041cffd4e2",
    "16 x 8 heads of 256 and 512 queries at head_dim 64, full, and 1,024 heads of 128 at 256: "
    "the backward took up to 1.12, at 256 up to 1.35 of the time that it takes now",
    _is_of_short_rows,
)
_faster_since(
    "adfbb52be6",
    "key padding at head_dim 64 without dropout, 1024 tokens and more: the backward took up to 1.02 of the time "
    "that it takes now",
    _has_two_loops,
)
_faster_since(
    "bc0ab1783c",
    "windows at head_dim 128 in rows of up to 2048 tokens: the backward had a quarter of the heads side by side, "
    "now half; timed again only over twice as many keys, where it took 1.19 of the time that it takes now",
    _is_of_short_windows,
)
_faster_since(
    "5cbe58ad4c",
    "512 tokens at head_dim 256, causal: the forward took 1.04 of the time that it takes now",
    _is_of_few_wide_tiles,
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
_faster_since(
    "1435df3209 24fac23141 2d2c0f0bf4 3ad113a17f 5cbe58ad4c 6a7122fb85 97b2742e5c",
    "windows and documents at head_dim 64, dropout at 128: the forward took 0.99 to 1.02, with dropout 1.02 to 1.14 "
    "of the time that it takes now",
    _is_masked_and_stored_by_tma,
)
