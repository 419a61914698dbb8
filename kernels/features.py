"""The table of an attention's optional arguments ("features"), each of which a backend may lack.

`registry` reads it to tell what a call uses, `flash.dispatch` to choose kernels, `compile_report` to compile them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch


class Feature(NamedTuple):
    """An optional argument.

    Attributes:
        meaning: what it does.
        unused: the value that means "not used", as None does.
        words: its explanation in a message, where the name alone does not say it.
        hopper: the passes that flash's Hopper kernels can do with it; `flash.dispatch` has the conditions. The
            portable kernels do both passes with every feature.
        options: the compile-time options with which compile_report compiles the portable kernels for it.
        pointers: the optional arguments of those kernels that it needs.
    """

    meaning: str
    unused: object = None
    words: str = ""
    hopper: tuple[str, ...] = ()
    options: Mapping[str, object] = {}
    pointers: tuple[str, ...] = ()


BOTH = ("forward", "backward")

FEATURES: dict[str, Feature] = {
    "dropout_p": Feature(
        "probability that an attention weight is set to 0, rounded to a multiple of 2^-16; the others are divided by "
        "1 minus that",
        unused=0.0,
        hopper=BOTH,
        options={"dropout_p": 0.1},
        pointers=("Seed",),
    ),
    "window": Feature(
        "(left, right): a query sees at most so many keys before and after its position; -1 for no limit",
        unused=(-1, -1),
        hopper=BOTH,
        options={"left": 256},
    ),
    "softcap": Feature(
        "logits become softcap * tanh(logits / softcap) (Gemma 2)",
        unused=0.0,
        hopper=BOTH,
        options={"softcap": 30.0},
    ),
    "alibi_slopes": Feature(
        "(heads,): subtract slope * |query position - key position| (Press et al. 2022), after softcap",
        hopper=BOTH,
        options={"alibi": True},
        pointers=("Slopes",),
    ),
    "sinks": Feature(
        "(heads,): a learnable logit per head that enters the softmax and has no value (gpt-oss); -inf: none; +inf "
        "makes its head NaN, as a logit does in torch.softmax: it is a parameter that has diverged",
        hopper=BOTH,
        pointers=("Sinks",),
    ),
    "cu_seqlens": Feature(
        "int32 (documents + 1,): ascending offsets of packed documents in the batch * length tokens, first 0, last "
        "batch * length. A token sees only its own document, within its own row",
        words="packed documents",
        hopper=BOTH,
        options={"documents": True},
        pointers=("DocumentStart", "DocumentEnd"),
    ),
    "cu_seqlens_k": Feature(
        "int32 (documents + 1,), with cu_seqlens, which then has the queries' offsets alone: those of the keys, of "
        "as many documents, ascending, first 0, last batch * kv_len. Each document, or its part of a row, is aligned "
        "bottom-right by itself",
        words="offsets of the keys alone",
        hopper=BOTH,
        options={"documents": True, "ragged": True},
        pointers=("DocumentStart", "DocumentEnd"),
    ),
    "kv_lengths": Feature(
        "int32 (batch,): keys from this index on are padding, masked for every query, of documents too: one that "
        "reaches into it has fewer keys, or none. Alignment still uses kv_len, or the offsets",
        words="padded keys",
        hopper=BOTH,
        options={"padded": True},
        pointers=("KvLengths",),
    ),
    "block_mask": Feature(
        "bool (batch or 1, heads or 1, ceil(q_len / 128), ceil(kv_len / 128)): True for tiles that may be seen "
        "(FlashAttention section 3.3), combined with every other mask",
        hopper=BOTH,
        pointers=("Blocks",),
    ),
    "return_lse": Feature(
        "also return the log-sum-exp, whose gradient then joins in",
        unused=False,
        hopper=BOTH,
        pointers=("DLse",),
    ),
    "precise_delta": Feature(
        "a backward free of the output's rounding error (arXiv 2510.04212); `naive` always is",
        unused=False,
        hopper=BOTH,
        pointers=("OutLow",),
    ),
}


def is_used(name: str, value: object) -> bool:
    """Whether the value of the feature `name` is other than "not used"."""
    if value is None or isinstance(value, torch.Tensor):
        return value is not None
    return (tuple(value) if isinstance(value, list) else value) != FEATURES[name].unused
