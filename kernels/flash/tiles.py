"""Which tile each kernel runs with: a table keyed by architecture, kernel, head_dim, dtype and causal.

Each entry has passed `python -m kernels.compile_report`: no spills, tensor cores and asynchronous loads in use, none
of them serialised. Which candidate is fastest has not been measured yet; see LOG.md.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """BLOCK_M queries by BLOCK_N keys, computed by `warps` warps with loads `stages` tiles ahead."""

    block_m: int
    block_n: int
    warps: int
    stages: int


KERNELS = ("forward", "dq", "dkdv")
ARCHITECTURES = (80, 90, 100)
# Small, and different in both directions, so that short rows in the interpreter still cross several tiles.
INTERPRETER = {"forward": Tile(64, 32, 4, 1), "dq": Tile(32, 64, 4, 1), "dkdv": Tile(64, 32, 4, 1)}

# (architecture, kernel) -> the largest padded head_dim it serves -> tile for (full, causal), 16-bit types.
HALF = {
    (80, "forward"): {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 2)},
    (80, "dq"): {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    (80, "dkdv"): {64: Tile(64, 64, 4, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 64, 8, 1)},
    (90, "forward"): {64: Tile(64, 128, 4, 2), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)},
    (90, "dq"): {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    (90, "dkdv"): {64: Tile(64, 128, 8, 2), 128: Tile(32, 128, 8, 2), 256: Tile(32, 64, 8, 2)},
    (100, "forward"): {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 4, 3), 256: Tile(128, 32, 8, 2)},
    (100, "dq"): {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 2)},
    (100, "dkdv"): {64: Tile(64, 128, 8, 2), 128: Tile(32, 128, 8, 2), 256: Tile(32, 64, 8, 2)},
}
# float32 runs on the ordinary cores in full precision: small tiles, for tests and for those who need the digits.
SINGLE = {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 4, 1)}


def tile_for(kernel: str, architecture: int, block_d: int, dtype: torch.dtype, causal: bool) -> Tile:
    """The tile of `kernel` ("forward", "dq" or "dkdv").

    Args:
        architecture: compute capability, major * 10 + minor; one without entries takes those of the nearest below.
            0 means the interpreter.
        block_d: head_dim rounded up to a power of two.
        dtype: of q, k and v.
        causal: as passed to the kernel.
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
    return next(tile for largest, tile in tiles.items() if block_d <= largest)
