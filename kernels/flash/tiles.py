"""Which tile each kernel runs with: a table keyed by architecture, kernel and head_dim, and what was measured of it.

Each 16-bit candidate has passed `python -m kernels.compile_report`: tensor cores and asynchronous loads in use, none
of them serialised, no spills. Among them the fastest measured runs: `measured/sm_90.json` ships the times of an H200
by causality and length, and `python -m kernels.tune` makes the like on your GPU. Without times the first one runs.
"""

import contextlib
import functools
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl

from ..philox import drop_share, drop_threshold
from .rules import Spec


@dataclass(frozen=True)
class Tile:
    """BLOCK_M queries by BLOCK_N keys, computed by `warps` warps with loads `stages` tiles ahead."""

    block_m: int
    block_n: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} w{self.warps} s{self.stages}"


KERNELS = ("forward", "dq", "dkdv")
ARCHITECTURES = (80, 90, 100)  # compute capability, major * 10 + minor
INTERPRETED, AMD = 0, 1  # which have none
# A tile is measured at these lengths of keys; others take the next larger one's, the longest the last one's.
LENGTHS = (512, 1024, 4096, 16384)
# Time there is spent per tile, not per element; yet 200 queries should cross several tiles in both directions.
INTERPRETER = {"forward": Tile(128, 64, 4, 1), "dq": Tile(64, 128, 4, 1), "dkdv": Tile(64, 128, 4, 1)}

# (architecture, kernel) -> largest head_dim it serves -> candidates, for 16-bit types, causal or full.
HALF = {
    (80, "forward"): {64: (Tile(64, 64, 4, 2),), 128: (Tile(64, 64, 4, 2),), 256: (Tile(64, 32, 8, 2),)},
    (80, "dq"): {64: (Tile(64, 64, 4, 2),), 128: (Tile(64, 64, 8, 2),), 256: (Tile(64, 32, 8, 2),)},
    (80, "dkdv"): {64: (Tile(32, 64, 4, 2),), 128: (Tile(32, 64, 8, 2),), 256: (Tile(32, 32, 8, 2),)},
    (90, "forward"): {
        64: (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
        128: (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
        256: (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
    },
    (90, "dq"): {
        64: (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
        128: (Tile(128, 64, 8, 3), Tile(64, 32, 4, 3)),
        256: (Tile(128, 32, 8, 3), Tile(64, 32, 8, 2)),
    },
    (90, "dkdv"): {
        64: (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
        128: (Tile(32, 128, 8, 2),),
        256: (Tile(32, 64, 8, 2), Tile(16, 64, 8, 2)),
    },
    (100, "forward"): {64: (Tile(128, 64, 8, 3),), 128: (Tile(128, 64, 8, 3),), 256: (Tile(128, 32, 8, 2),)},
    (100, "dq"): {64: (Tile(64, 64, 4, 3),), 128: (Tile(64, 64, 4, 2),), 256: (Tile(64, 32, 8, 2),)},
    (100, "dkdv"): {64: (Tile(64, 128, 8, 2),), 128: (Tile(32, 64, 8, 2),), 256: (Tile(32, 64, 8, 2),)},
    # Compiled for gfx942 and never run: matrix instructions, 64 KB of shared memory, no spills with dropout either.
    (AMD, "forward"): {64: (Tile(64, 64, 4, 2),), 128: (Tile(64, 64, 4, 2),), 256: (Tile(64, 32, 4, 2),)},
    (AMD, "dq"): {64: (Tile(64, 64, 4, 2),), 128: (Tile(64, 64, 4, 2),), 256: (Tile(64, 16, 4, 2),)},
    (AMD, "dkdv"): {64: (Tile(32, 64, 4, 2),), 128: (Tile(32, 32, 4, 2),), 256: (Tile(16, 32, 4, 2),)},
}
# Further candidates where nothing is causal: with a causal mask's second loop ptxas serialises or spills them.
FULL = {(90, "dkdv"): {64: (Tile(32, 64, 4, 3),), 128: (Tile(32, 64, 4, 2),), 256: ()}}
# float32 runs on the ordinary cores in full precision: small tiles, for tests and for those who need the digits.
SINGLE = {64: (Tile(32, 32, 8, 1),), 256: (Tile(16, 16, 8, 1),)}

_forced: dict[str, Tile] = {}


@functools.cache
def specify(
    tile: Tile,
    head_dim: int,
    causal: bool,
    group: int = 1,
    dropout_p: float = 0.0,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    alibi: bool = False,
    documents: bool = False,
    padded: bool = False,
) -> Spec:
    """The compile-time argument of a kernel at a tile. group: query heads to a key head."""
    return Spec(
        HEAD_DIM=tl.constexpr(head_dim),
        BLOCK_D=tl.constexpr(max(16, 1 << (head_dim - 1).bit_length())),
        BLOCK_M=tl.constexpr(tile.block_m),
        BLOCK_N=tl.constexpr(tile.block_n),
        GROUP=tl.constexpr(group),
        CAUSAL=tl.constexpr(causal),
        LEFT=tl.constexpr(left),
        RIGHT=tl.constexpr(right),
        SOFTCAP=tl.constexpr(softcap),
        ALIBI=tl.constexpr(alibi),
        DOCUMENTS=tl.constexpr(documents),
        PADDED=tl.constexpr(padded),
        DROPOUT_P=tl.constexpr(drop_share(dropout_p)),
        DROP_BELOW=tl.constexpr(drop_threshold(dropout_p)),
    )


def tile_for(
    kernel: str, architecture: int, head_dim: int, dtype: torch.dtype, causal: bool, length: int
) -> Tile:
    """The tile of `kernel` ("forward", "dq" or "dkdv").

    Args:
        architecture: compute capability, major * 10 + minor; one without entries takes those of the nearest below.
            Or INTERPRETED, or AMD.
        head_dim, dtype: of q, k and v.
        length: of the keys.
    """
    if kernel in _forced:
        return _forced[kernel]
    if architecture == INTERPRETED:
        return INTERPRETER[kernel]
    length_class = next((each for each in LENGTHS if length <= each), LENGTHS[-1])
    return _fastest(kernel, architecture, head_dim, dtype, causal, length_class)


@contextlib.contextmanager
def forced(**tiles: Tile) -> Iterator[None]:
    """Let the named kernels run with these tiles, whatever the table says: for tests, tuning and traffic counts."""
    before = dict(_forced)
    _forced.update(tiles)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def are_forced() -> bool:
    """Whether a `forced` is in force. Only the portable kernels have tiles, so then they run."""
    return bool(_forced)


def candidates(
    kernel: str, architecture: int, head_dim: int, dtype: torch.dtype, causal: bool
) -> tuple[Tile, ...]:
    """The tiles of the table; where none was measured, the first one runs."""
    known = architecture
    if (
        known >= 120
    ):  # consumer Blackwell has neither Hopper's nor data-centre Blackwell's tensor core instructions
        known = 80
    if known != AMD:
        known = max(each for each in ARCHITECTURES if each <= max(known, 80))
    tables = [SINGLE if dtype is torch.float32 else HALF[known, kernel]]
    if not causal and dtype is not torch.float32 and (known, kernel) in FULL:
        tables.append(FULL[known, kernel])
    served = [next(tiles for largest, tiles in table.items() if head_dim <= largest) for table in tables]
    return tuple(itertools.chain(*served))


@functools.cache
def _fastest(
    kernel: str, architecture: int, head_dim: int, dtype: torch.dtype, causal: bool, length: int
) -> Tile:
    times = _measured(architecture).get((kernel, head_dim, causal, length), {})
    tiles = candidates(kernel, architecture, head_dim, dtype, causal)
    return min(tiles, key=lambda tile: times.get(str(tile), math.inf))  # the first, if there are no times


@functools.cache
def _measured(architecture: int) -> dict[tuple[str, int, bool, int], dict[str, float]]:
    """(kernel, head_dim, causal, length) -> tile -> microseconds: this GPU's, or else what ships for its like."""
    shipped = Path(__file__).with_name("measured") / f"sm_{architecture}.json"
    paths = (tuned_path, lambda: shipped) if torch.cuda.is_available() else (lambda: shipped,)
    for path in paths:
        # Neither a home that cannot be read, or is none, nor a file that is not whole may stop an attention.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            entries = json.loads(path().read_text())["entries"]
            return {(e["kernel"], e["head_dim"], e["causal"], e["length"]): e["us"] for e in entries}
    return {}


def tuned_path() -> Path:
    """Where the times of this GPU with this Triton are kept: below $XDG_CACHE_HOME, or ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    gpu = torch.cuda.get_device_name().replace(" ", "_")
    return cache / "tilegpt" / "tiles" / f"{gpu}_triton_{triton.__version__}.json"
