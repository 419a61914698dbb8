"""Which attention probabilities dropout keeps: a pure function of (seed, batch, head, row, column).

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a 64-bit key and
a 128-bit counter into four 32-bit words. The key is the dropout seed. One counter serves the 2 x 2 elements

    (row, column), (row, column + 8), (row + 8, column), (row + 8, column + 8)

of a 16 x 16 patch, because those four lie in the registers of one thread in the tensor cores' accumulators,
in S and in its transpose alike, so a kernel draws a tile with one Philox call per four elements and moves no
data. Here the same words come from plain int64 tensor operations, so that the two can be compared element by
element.
"""

import torch

ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF


def philox(
    seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox 4x32-10: int64 seed and counters (in [0, 2^32), broadcast) to four int64 words in [0, 2^32)."""
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(10):
        # The product wraps modulo 2^64, which keeps all of its bits.
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
    """A word below this is dropped: dropout_p in units of 2^-32."""
    return min(round(dropout_p * 2**32), WORD)


def dropout_mask(
    seed: int | torch.Tensor,
    dropout_p: float,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """True where dropout keeps a probability: bool (batch, heads, q_len, kv_len). seed: int or 0-d int64."""
    seed = torch.as_tensor(seed, dtype=torch.int64, device=device)

    def axis(size: int, dim: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.int64, device=device).view(
            [-1 if d == dim else 1 for d in range(4)]
        )

    row_patches, column_patches = -(-q_len // 16), -(-kv_len // 16)
    words = philox(
        seed, axis(8 * column_patches, 3), axis(8 * row_patches, 2), axis(heads, 1), axis(batch, 0)
    )
    # (2, 2, batch, heads, row_patches, 8, column_patches, 8): the words' index is (row bit 3, column bit 3).
    words = torch.stack(torch.broadcast_tensors(*words)).view(
        2, 2, batch, heads, row_patches, 8, column_patches, 8
    )
    words = words.permute(2, 3, 4, 0, 5, 6, 1, 7).reshape(batch, heads, 16 * row_patches, 16 * column_patches)
    return words[:, :, :q_len, :kv_len] >= drop_threshold(dropout_p)
