"""The points of race.py, by part; what is wanted most comes first, as a race may be cut."""

import dataclasses
import itertools
import os

from kernels.flash.faster import TILE

TRY = "TRY" in os.environ


@dataclasses.dataclass(frozen=True)
class Point:
    # tokens: 16,384 of hidden size 2048, as in FlashAttention-2's benchmark; row: one sequence as wide; small: few
    # tiles; grouped; 256: so many tiles of 128 queries
    kind: str
    length: int
    head_dim: int
    causal: bool
    feature: str = ""  # names of `Inputs`, joined by "+"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sequences, heads, key-value heads."""
        if TRY:
            return 2, 2, 2
        if self.kind == "small":
            return 2, 8, 8
        if self.kind.isdigit():
            heads = int(self.kind) // (self.length // TILE)
            return max(heads // 8, 1), min(heads, 8), min(heads, 8)
        heads = min(max(2048 // self.head_dim, 8) // 2 * 2, 32)
        if self.kind == "row":
            return 1, heads, heads
        if self.kind == "grouped":
            return 16384 // self.length, heads // 4 * 4, heads // 4
        return 16384 // self.length, heads, heads

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.kind:8} {self.length:6} d{self.head_dim:<4}{mask:7}{self.feature}"

    @property
    def family(self) -> list:
        """What is left out once one of it hung."""
        return [self.head_dim, self.causal, self.feature]


def every(kind: str, *ranges: tuple) -> list[Point]:
    return [Point(kind, *each) for each in itertools.product(*ranges)]


BOTH, CAUSAL, FULL = (True, False), (True,), (False,)
ALONE, BOUNDS, SCORE_MODS = ("padding", "dropout", "sinks"), ("window", "documents"), ("softcap", "alibi")
DIMS = (64, 128)
DIMS256 = (*DIMS, 256)
PRECISE, SINKS = (tuple(f"{each}+{name}" for name in BOUNDS) for each in ("precise", "sinks"))
LATE = ("precise+sinks", "precise+padding", "precise+dropout")
TOGETHER = tuple(f"{each}+{name}" for name in BOUNDS for each in SCORE_MODS)
BY_QUERY = ("own", "documents+padding")
PRECISE_MODS, MODS_DOCUMENTS, MODS_PADDING = (
    tuple(f"{each}+{name}" for each in SCORE_MODS) for name in ("precise", "documents", "padding")
)
OWN = tuple(f"own+{each}" for each in ("padding", "sinks", "window", "precise"))
POINTS = {
    "plain": [
        *every("tokens", (1024, 4096, 16384), DIMS, BOTH),
        *every("small", (128, 256, 512, 1024), DIMS, BOTH),
    ],
    "ours": every("tokens", (1024, 2048, 4096, 8192, 16384), DIMS, CAUSAL),
    "wide": [
        *every("tokens", (1024, 4096, 2048, 512, 8192, 16384), (256, 192, 160), BOTH),
        *every("grouped", (512, 2048), (256,), BOTH),
        *every("small", (128, 256, 512, 1024), (256, 192), BOTH),
        *every("tokens", (1024, 4096), (136, 224), BOTH),
    ],
    "wide_features": [
        *every("tokens", (8192, 16384), (256,), CAUSAL, ("gemma",)),
        *every("tokens", (1024, 4096, 16384), (256,), CAUSAL, BOUNDS + SCORE_MODS),
        *every("tokens", (1024, 4096), (256,), (False,), SCORE_MODS),
        *every("tokens", (4096,), (256,), CAUSAL, TOGETHER),
        *every("tokens", (1024, 4096), (160, 192), CAUSAL, BOUNDS + SCORE_MODS),
        *every("512", (512, 2048), (256,), CAUSAL, BOUNDS + SCORE_MODS),
        *every("128", (256, 1024), (256,), CAUSAL, BOUNDS + SCORE_MODS),
        *every("grouped", (2048,), (256,), CAUSAL, ("gemma", *BOUNDS)),
        *every("tokens", (1024,), (256,), CAUSAL, ("window+longer",)),
        *every("tokens", (2048,), (136, 224), CAUSAL, BOUNDS + SCORE_MODS),
    ],
    "wide_padding": [
        *every("tokens", (4096, 1024), (256,), BOTH, ("padding", "dropout")),
        *every("tokens", (4096,), (192, 160), BOTH, ("padding", "dropout")),
        *every("tokens", (16384,), (256,), BOTH, ("padding", "dropout")),
        *every("512", (2048, 512), (256,), BOTH, ("padding", "dropout")),
        *every("tokens", (1024, 4096), (256,), BOTH, ("sinks",)),
        *every("128", (1024,), (256,), BOTH, ("padding", "dropout")),
        *every("tokens", (1024,), (160, 192), BOTH, ALONE),
        *every("grouped", (2048,), (256,), BOTH, ("padding", "dropout")),
        *every("tokens", (4096,), (256,), CAUSAL, ("near", "softcap+padding", "sinks+window")),
        *every("512", (2048,), (160, 192), BOTH, ALONE),
        *every("tokens", (2048,), (144, 224), CAUSAL, ALONE),
    ],
    "by_query": [
        *every("row", (16384,), (128, 64), BOTH, ("own+longer", "same")),
        *every("tokens", (4096,), (128, 64), BOTH, ("documents+padding",)),
        *every("row", (16384,), (256,), BOTH, ("own+longer", "same")),
        *every("tokens", (4096,), (256,), BOTH, ("documents+padding",)),
        *every("tokens", (1024,), DIMS, BOTH, BY_QUERY),
        *every("512", (1024,), (64, 128, 256), CAUSAL, BY_QUERY),
        *every("128", (512,), (64, 128, 256), CAUSAL, BY_QUERY),
        *every("row", (2048,), (64, 128, 256), BOTH, ("own+longer",)),
        *every("grouped", (2048,), (128,), CAUSAL, BY_QUERY),
        *every("tokens", (4096,), (96, 160, 192), CAUSAL, BY_QUERY),
        *every("tokens", (4096,), (128,), BOTH, OWN),
    ],
    "full": [
        *every("tokens", (4096, 1024, 16384), (64, 128), FULL, ("window", "documents")),
        *every("tokens", (4096, 1024), (64, 128, 256), BOTH, ("window+padding",)),
        *every("tokens", (4096, 1024), (256,), FULL, ("window", "documents")),
        *every("512", (1024,), (64, 128, 256), FULL, ("window", "documents", "window+padding")),
        *every("128", (512,), (64, 128, 256), FULL, ("window", "documents", "window+padding")),
        *every("tokens", (2048,), (64, 128), FULL, ("window", "documents")),
        *every("tokens", (4096,), (96, 160, 192), FULL, ("window", "documents")),
        *every("row", (4096,), (64, 128), FULL, ("window+longer",)),
        *every("row", (16384, 4096), (64, 128, 256), FULL, ("documents",)),
        *every("tokens", (4096, 1024), (64, 128, 256), FULL, ("window+documents", "window+longer")),
        *every("128", (512,), (64, 128), FULL, ("window+documents",)),
    ],
    "lengths": [
        *every("tokens", (512, 2048, 128, 8192, 256), DIMS256, BOTH, ("softcap", "sinks", "dropout")),
        *every("tokens", (512, 2048, 128, 8192, 256), DIMS256, FULL, ("near",)),
        *every("tokens", (2048, 8192), DIMS256, BOTH, ("window",)),
        *every("row", (2048, 8192, 32768), DIMS256, BOTH, ("documents",)),
        *every("row", (32768,), DIMS256, BOTH, ("window", "softcap", "sinks", "dropout")),
        *every("row", (65536,), DIMS256, CAUSAL, ("window", "documents", "softcap")),
    ],
    "untimed": [
        *every("tokens", (4096,), (128, 64), BOTH, PRECISE_MODS),
        *every("tokens", (4096,), (256,), BOTH, PRECISE_MODS[:1]),
        *every("tokens", (4096,), (192,), BOTH, PRECISE_MODS[1:]),
        *every("tokens", (4096,), (128, 64, 256), CAUSAL, ("softcap+precise+window",)),
        *every("512", (4096,), (128, 64), BOTH, PRECISE_MODS),
        *every("tokens", (16384, 1024), (128, 64), CAUSAL, PRECISE_MODS),
        *every("128", (4096,), (128, 64), BOTH, PRECISE_MODS),
        *every("tokens", (4096, 1024), (128, 64), CAUSAL, MODS_DOCUMENTS),
        *every("tokens", (4096,), (256,), CAUSAL, MODS_DOCUMENTS),
        *every("tokens", (4096,), (128, 64), CAUSAL, ("softcap+precise+documents",)),
        *every("512", (1024,), (128, 64), CAUSAL, MODS_DOCUMENTS),
        *every("128", (512,), (128, 64), CAUSAL, MODS_DOCUMENTS),
        *every("tokens", (4096, 1024), (128, 64), BOTH, MODS_PADDING),
        *every("tokens", (4096,), (256,), BOTH, MODS_PADDING[:1]),
        *every("512", (1024,), (128, 64), BOTH, MODS_PADDING),
        *every("128", (512,), (128, 64), BOTH, MODS_PADDING),
        *every("tokens", (4096, 1024), (96, 80), BOTH, ALONE),
        *every("tokens", (4096, 1024), (96, 80), CAUSAL, BOUNDS),
        *every("512", (1024,), (96, 80), BOTH, ALONE),
        *every("512", (1024,), (96, 80), CAUSAL, BOUNDS),
        *every("tokens", (4096, 1024), (32,), BOTH, ("", *ALONE)),
        *every("tokens", (4096, 1024), (32,), CAUSAL, BOUNDS),
        *every("128", (512,), (96, 80), BOTH, ALONE),
        *every("128", (512,), (96, 80), CAUSAL, BOUNDS),
        *every("tokens", (4096, 1024), (96, 80, 32), BOTH, SCORE_MODS),
        *every("tokens", (4096, 1024), (96, 80), FULL, BOUNDS),
    ],
    "wide_dropout": [
        *every("tokens", (4096, 1024), (136, 184), BOTH, ("dropout",)),
        *every("tokens", (4096, 1024), (160, 192), BOTH, ("precise+dropout",)),
        *every("tokens", (4096, 1024), (160,), BOTH, ("alibi+padding",)),
        *every("128", (1024,), (136, 192), BOTH, ("dropout", "precise+dropout")),
        *every("tokens", (16384,), (136, 184), CAUSAL, ("dropout",)),
        *every("grouped", (2048,), (136, 256), BOTH, ("dropout",)),
        *every("tokens", (4096,), (152, 168), BOTH, ("dropout",)),
        *every("512", (2048,), (136, 192), BOTH, ("alibi+padding", "dropout")),
    ],
    "dims": [
        *every("tokens", (1024, 4096, 512, 2048, 16384), (80, 96, 112, 32, 48, 16, 72, 120), BOTH),
        *every("small", (128, 256, 512), (80, 96, 32), BOTH),
        *every("grouped", (2048,), (80, 96), BOTH),
    ],
    "combined": [
        *every("tokens", (4096, 8192), DIMS, CAUSAL, PRECISE),
        *every("128", (4096,), DIMS, CAUSAL, PRECISE),
        *every("256", (8192,), DIMS, CAUSAL, PRECISE),
        *every("tokens", (4096,), DIMS, BOTH, LATE),
        *every("128", (4096,), DIMS, CAUSAL, ("precise", "")),
        *every("512", (512,), DIMS, BOTH, ALONE),
        *every("256", (512,), DIMS, BOTH, ALONE),
        *every("128", (512,), DIMS, BOTH, ALONE),
        *every("tokens", (1024, 4096), DIMS, BOTH, SCORE_MODS),
        *every("128", (512,), DIMS, BOTH, SCORE_MODS),
        *every("16", (256,), DIMS, BOTH, ("", *SCORE_MODS)),
        *every("tokens", (1024, 4096), DIMS, CAUSAL, SINKS),
        *every("512", (1024,), DIMS, CAUSAL, (*SINKS, "sinks+window+precise", *SCORE_MODS)),
        *every("64", (512, 1024), DIMS, BOTH, ("",)),
        *every("256", (1024, 4096), DIMS, BOTH, ("precise", "")),
        *every("512", (2048, 4096), DIMS, CAUSAL, (*LATE, *PRECISE)),
        *every("512", (2048,), DIMS, BOTH, ALONE),
        *every("tokens", (512, 2048), DIMS, BOTH, SCORE_MODS),
        *every("tokens", (4096,), DIMS, CAUSAL, ("softcap+window", "alibi+window")),
        *every("tokens", (1024, 4096), DIMS, CAUSAL, ("window+longer",)),
        *every("128", (1024,), DIMS, CAUSAL, ("window+longer",)),
        *every("tokens", (4096,), (80, 96, 256), CAUSAL, ("precise",)),
    ],
    "features": [
        *every("tokens", (1024, 4096, 512, 2048, 8192), (64, 128), BOTH, ALONE),
        *every("tokens", (1024, 4096), (64, 128), BOTH, ("near", "precise", "padding+sinks")),
        *every("tokens", (1024, 4096), (64,), BOTH, ("padding+dropout", "dropout+sinks")),
        *every("small", (256, 512), (64, 128), BOTH, ALONE),
        *every("grouped", (2048,), (128,), CAUSAL, ALONE),
    ],
}
# For a trial on a CPU: features, and whether there is a full mask too.
TRIED = {
    "features": (("padding", "dropout"), BOTH),
    "by_query": (("own+longer", "same+padding"), BOTH),
    "full": (("documents", "window+padding"), FULL),
    "lengths": (("sinks", "dropout"), BOTH),
    "untimed": (("softcap+precise", "alibi+padding"), CAUSAL),
    "wide_dropout": (("precise+dropout", "alibi+padding"), BOTH),
    "combined": (("precise+documents", "window+longer"), CAUSAL),
    "wide_features": (("softcap+window", "documents"), CAUSAL),
    "wide_padding": (("padding", "sinks"), BOTH),
}


def points(part: str) -> list[Point]:
    if TRY:
        features, masks = TRIED.get(part, (("",), BOTH))
        return every("tokens", (64,), (32,), masks, features)
    return POINTS[part]
