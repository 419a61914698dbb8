"""Which tile each kernel runs with: a table keyed by architecture, kernel, head_dim and dtype.

Each 16-bit entry has passed `python -m kernels.compile_report`: tensor cores and asynchronous loads in use, none of
them serialised, and no spills but those its SPILLS_ALLOWED names. Which candidate is fastest is not measured; LOG.md
has what was compiled.
"""

import functools
from dataclasses import dataclass

import torch
import triton.language as tl

from ..philox import drop_threshold
from .rules import Spec


@dataclass(frozen=True)
class Tile:
    """BLOCK_M queries by BLOCK_N keys, computed by `warps` warps with loads `stages` tiles ahead."""

    block_m: int
    block_n: int
    warps: int
    stages: int


KERNELS = ("forward", "dq", "dkdv")
ARCHITECTURES = (80, 90, 100)
# Time there is spent per tile, not per element; yet 200 queries should cross several tiles in both directions.
INTERPRETER = {"forward": Tile(128, 64, 4, 1), "dq": Tile(64, 128, 4, 1), "dkdv": Tile(64, 128, 4, 1)}

# (architecture, kernel) -> largest head_dim it serves -> tile, for 16-bit types, causal or full.
HALF = {
    (80, "forward"): {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 2)},
    (80, "dq"): {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    (80, "dkdv"): {64: Tile(32, 64, 4, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
    (90, "forward"): {64: Tile(64, 128, 4, 2), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)},
    (90, "dq"): {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    (90, "dkdv"): {64: Tile(64, 128, 8, 2), 128: Tile(32, 128, 8, 2), 256: Tile(16, 64, 8, 2)},
    (100, "forward"): {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)},
    (100, "dq"): {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 2)},
    (100, "dkdv"): {64: Tile(64, 128, 8, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 64, 8, 2)},
}
# float32 runs on the ordinary cores in full precision: small tiles, for tests and for those who need the digits.
SINGLE = {64: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)}


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
        DROPOUT_P=tl.constexpr(dropout_p),
        DROP_BELOW=tl.constexpr(drop_threshold(dropout_p)),
    )


def tile_for(kernel: str, architecture: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile of `kernel` ("forward", "dq" or "dkdv").

    Args:
        architecture: compute capability, major * 10 + minor; one without entries takes those of the nearest below.
            0 means the interpreter.
        head_dim, dtype: of q, k and v.
    """
    if architecture == 0:
        return INTERPRETER[kernel]
    if dtype is torch.float32:
        tiles = SINGLE
    else:
        # Consumer Blackwell (12.x) has neither Hopper's nor data-centre Blackwell's tensor core instructions.
        known = (
            80
            if architecture >= 120
            else max(each for each in ARCHITECTURES if each <= max(architecture, 80))
        )
        tiles = HALF[known, kernel]
    return next(tile for largest, tile in tiles.items() if head_dim <= largest)
