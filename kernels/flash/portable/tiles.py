"""Tile sizes of the portable kernels: candidates by architecture, kernel and head_dim, and the choice among them.

Every 16-bit candidate has passed `python -m kernels.compile_report`: tensor cores and asynchronous loads in use, no
serialised wgmma, no spills. The fastest measured candidate runs: `measured/sm_90.json` ships the times of an H200 by
causality and length, and `python -m kernels.tune` measures them on your GPU. Without times the first candidate runs.
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


@dataclass(frozen=True)
class Tile:
    """BLOCK_M queries by BLOCK_N keys, with num_warps = `warps` and num_stages = `stages`."""

    block_m: int
    block_n: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} w{self.warps} s{self.stages}"


KERNELS = ("forward", "dq", "dkdv")
ARCHITECTURES = (80, 90, 100)  # compute capability, major * 10 + minor
INTERPRETED, AMD = 0, 1  # these have no compute capability
# Tiles are measured at these kv_len; another length uses the next larger one, or the last.
LENGTHS = (512, 1024, 4096, 16384)
# The interpreter's time grows with tiles, not elements; yet the tests' 200 queries should span several, both ways.
INTERPRETER = {"forward": Tile(128, 64, 4, 1), "dq": Tile(64, 128, 4, 1), "dkdv": Tile(64, 128, 4, 1)}

Table = dict[int, tuple[Tile, ...]]  # largest head_dim served -> candidates
# By (architecture, kernel); 16-bit dtypes, causal or full.
HALF: dict[tuple[int, str], Table] = {
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
    # Compiled for gfx942 and never run: MFMA in use, 64 KB of shared memory, no spills, with dropout neither.
    (AMD, "forward"): {64: (Tile(64, 64, 4, 2),), 128: (Tile(64, 64, 4, 2),), 256: (Tile(64, 32, 4, 2),)},
    (AMD, "dq"): {64: (Tile(64, 64, 4, 2),), 128: (Tile(64, 64, 4, 2),), 256: (Tile(64, 16, 4, 2),)},
    (AMD, "dkdv"): {64: (Tile(32, 64, 4, 2),), 128: (Tile(32, 32, 4, 2),), 256: (Tile(16, 32, 4, 2),)},
}
# More candidates without causal mask: with the causal mask's second loop, ptxas serialises or spills them.
FULL: dict[tuple[int, str], Table] = {
    (90, "dkdv"): {64: (Tile(32, 64, 4, 3),), 128: (Tile(32, 64, 4, 2),), 256: ()}
}
# float32 uses FMA in full precision, not tensor cores: small tiles, for tests and for those who need the accuracy.
SINGLE: Table = {64: (Tile(32, 32, 8, 1),), 256: (Tile(16, 16, 8, 1),)}

_forced: dict[str, Tile] = {}


def tile_for(
    kernel: str, architecture: int, head_dim: int, dtype: torch.dtype, causal: bool, length: int
) -> Tile:
    """The tile of `kernel` ("forward", "dq" or "dkdv").

    Args:
        architecture: compute capability, major * 10 + minor, or INTERPRETED, or AMD. One without entries uses those
            of the nearest lower one.
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
def forced(of: dict[str, Tile] = _forced, /, **tiles: Tile) -> Iterator[None]:
    """Context: run the named kernels with these tiles, not the table's: for tests, tuning, traffic counts."""
    before = dict(of)
    of.update(tiles)
    try:
        yield
    finally:
        of.clear()
        of.update(before)


def are_forced() -> bool:
    """Whether a `forced` context is active. Only the portable kernels have tiles, so then those run."""
    return bool(_forced)


def candidates(
    kernel: str, architecture: int, head_dim: int, dtype: torch.dtype, causal: bool
) -> tuple[Tile, ...]:
    """The table's tiles, in order of preference when nothing was measured."""
    known = architecture
    if known >= 120:  # consumer Blackwell has neither wgmma nor tcgen05
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
    return min(tiles, key=lambda tile: times.get(str(tile), math.inf))  # the first, without times


@functools.cache
def _measured(architecture: int) -> dict[tuple[str, int, bool, int], dict[str, float]]:
    """(kernel, head_dim, causal, length) -> tile -> microseconds: this GPU's own, else those shipped for its
    architecture."""
    shipped = Path(__file__).with_name("measured") / f"sm_{architecture}.json"
    paths = (tuned_path, lambda: shipped) if torch.cuda.is_available() else (lambda: shipped,)
    for path in paths:
        # A missing or unreadable home directory or an incomplete file must not stop an attention.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            entries = json.loads(path().read_text())["entries"]
            return {(e["kernel"], e["head_dim"], e["causal"], e["length"]): e["us"] for e in entries}
    return {}


def tuned_path() -> Path:
    """The file with the times of this GPU and Triton version: under $XDG_CACHE_HOME, or ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    gpu = torch.cuda.get_device_name().replace(" ", "_")
    return cache / "tilegpt" / "tiles" / f"{gpu}_triton_{triton.__version__}.json"
