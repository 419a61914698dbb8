"""Dropout masks as a pure function of (seed, batch, head, row, column), by a counter-based generator.

Philox 4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, where seven rounds
pass all of BigCrush; FlashAttention-2 draws with seven too) turns a 64-bit key and a 128-bit counter into four 32-bit
words. The key is the dropout seed. One counter serves the 2 x 2 x 2 elements

    (row, row + 8) x (column, column + 8) x (column, column + 1)

where bit 3 of row and column and bit 0 of column are 0; the counter contains row and column without these bits. Bit 3
of row and of column selects the word, and the even column takes its lower half. In the tensor cores' accumulator
layout a thread holds all eight elements in S and four of them in S^T, the most that is possible for both, so a kernel
draws a tile's mask without moving data. Here the same words are computed by plain int64 tensor operations, so that
kernel and reference can be compared element by element.

A half word has 16 bits: the dropped share is dropout_p rounded to a multiple of 2^-16, and kept elements are divided
by 1 minus that share, so that the expectation is exact.

In a matrix, such as the residual stream, element (row, column) uses a whole word: word column % 4 of the counter
(row, 0, column // 4, 0). In a kernel that streams rows, one thread holds these four adjacent elements.
"""

import torch

from .operators import operator

ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
ROUNDS = 7


def philox(
    seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox 4x32-7: int64 seed and counters (in [0, 2^32), broadcast) to four int64 words in [0, 2^32)."""
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(ROUNDS):
        # int64 products wrap modulo 2^64; no bit is lost.
        product_a, product_b = c0 * ROUND_A, c2 * ROUND_B
        c0, c1, c2, c3 = (
            ((product_b >> 32) & WORD) ^ c1 ^ k0,
            product_b & WORD,
            ((product_a >> 32) & WORD) ^ c3 ^ k1,
            product_a & WORD,
        )
        k0, k1 = (k0 + KEY_A) & WORD, (k1 + KEY_B) & WORD
    return c0, c1, c2, c3


def drop_threshold(dropout_p: float) -> int:
    """A 16-bit half word below this drops: dropout_p in units of 2^-16, at most 65535."""
    return min(round(dropout_p * 2**16), 2**16 - 1)


def drop_share(dropout_p: float) -> float:
    """The share actually dropped for dropout_p: off by at most 2^-17 (2^-16 just below 1); 0 for dropout_p up to
    2^-17."""
    return drop_threshold(dropout_p) / 2**16


def dropout_mask(
    seed: int | torch.Tensor | None,
    dropout_p: float,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """True where dropout keeps a probability: bool (batch, heads, q_len, kv_len). seed: int or 0-d int64;
    None is refused by `check_dropout`."""
    seed = torch.as_tensor(seed, dtype=torch.int64, device=device)
    return philox_mask(seed, drop_threshold(dropout_p), batch, heads, q_len, kv_len)


def philox_mask(
    seed: torch.Tensor, threshold: int, batch: int, heads: int, q_len: int, kv_len: int
) -> torch.Tensor:
    """True where the element's half word is at least `threshold`: bool (batch, heads, q_len, kv_len)."""

    def axis(size: int, dim: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.int64, device=seed.device).view(
            [-1 if d == dim else 1 for d in range(4)]
        )

    row_patches, column_patches = -(-q_len // 16), -(-kv_len // 16)
    four = philox(seed, axis(8 * row_patches, 2), axis(heads, 1), axis(4 * column_patches, 3), axis(batch, 0))
    words = torch.stack(torch.broadcast_tensors(*four))
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1)
    # (row bit 3, column bit 3, batch, heads, row_patches, 8, column_patches, 4, column bit 0)
    halves = halves.view(2, 2, batch, heads, row_patches, 8, column_patches, 4, 2)
    halves = halves.permute(2, 3, 4, 0, 5, 6, 1, 7, 8)
    halves = halves.reshape(batch, heads, 16 * row_patches, 16 * column_patches)
    return halves[:, :, :q_len, :kv_len] >= threshold


def row_threshold(dropout_p: float) -> int:
    """A 32-bit word below this drops: dropout_p in units of 2^-32, at most 2^32 - 1."""
    return min(round(dropout_p * 2**32), WORD)


def row_mask(
    seed: int | torch.Tensor, dropout_p: float, rows: int, width: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """True where dropout keeps an element of a matrix: bool (rows, width). seed: int or 0-d int64."""
    seed = torch.as_tensor(seed, dtype=torch.int64, device=device)
    row, zero = torch.arange(rows, device=device)[:, None], torch.zeros_like(seed)
    words = philox(seed, row, zero, torch.arange(-(-width // 4), device=device)[None, :], zero)
    return torch.stack(words, -1).flatten(1)[:, :width] >= row_threshold(dropout_p)


# Opaque to torch.compile: PyTorch 2.11 would compile its products in int32, where ROUND_A does not fit.
philox_mask = operator(
    philox_mask,
    lambda seed, threshold, batch, heads, q_len, kv_len: seed.new_empty(
        (batch, heads, q_len, kv_len), dtype=torch.bool
    ),
)
