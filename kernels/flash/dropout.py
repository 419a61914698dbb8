"""The dropout mask of kernels/philox.py, element by element, drawn inside the kernels.

On an H200 drawing it once cost more than the attention itself, so every instruction counts here; see LOG.md.
"""

import os

import torch
import triton
import triton.language as tl

from .. import philox as reference

ROUNDS = tl.constexpr(reference.ROUNDS)
ROUND_A, ROUND_B = tl.constexpr(reference.ROUND_A), tl.constexpr(reference.ROUND_B)
KEY_A, KEY_B = tl.constexpr(reference.KEY_A), tl.constexpr(reference.KEY_B)
HAS_PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)


@triton.jit
def is_kept(first_row, row_index, first_key, key_index, rules, SPEC: tl.constexpr):
    """Whether dropout keeps the probability of query first_row + row_index and key first_key + key_index.

    first_row and first_key are multiples of 16; the indices broadcast against the tile. Written as if every element
    evaluated Philox and picked its 16-bit half word; the compiler merges equal evaluations within a thread's
    registers. For that, bits must be dropped from the indices before the sum, and by exactly these shifts: LLVM knows
    no bits of a loop-carried sum and merged nothing; with & ~8 or & 7 it merged in some loops only (LOG.md).
    """
    row_in_tile = (row_index >> 4 << 3) | ((row_index >> 1 & 3) << 1) | (row_index & 1)
    column_in_tile = (key_index >> 4 << 2) | (key_index >> 1 & 3)
    row = ((first_row >> 1) + row_in_tile).to(tl.uint32)
    column = ((first_key >> 2) + column_in_tile).to(tl.uint32)
    head, batch = rules.head.to(tl.uint32), rules.batch.to(tl.uint32)
    word_0, word_1, word_2, word_3 = philox(rules.seed, row, head, column, batch)
    right = (key_index & 8) != 0
    word = tl.where((row_index & 8) != 0, tl.where(right, word_3, word_2), tl.where(right, word_1, word_0))
    # Even keys shift their lower half up, odd keys use the upper half in place; one comparison serves both.
    word <<= ((~key_index & 1) << 4).to(tl.uint32)
    return word >= SPEC.DROP_BELOW << 16


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Philox 4x32: the four words of kernels/philox.py, from an int64 seed and uint32 counters.

    The counters keep their unbroadcast shapes, so what depends on the row or the column alone is hoisted out of the
    loop over the other: two products of the first round, and the like in the next rounds.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        product_a, product_b = wide_product(c0, ROUND_A), wide_product(c2, ROUND_B)
        c0, c1 = (product_b >> 32).to(tl.uint32) ^ c1 ^ k0, product_b.to(tl.uint32)
        c2, c3 = (product_a >> 32).to(tl.uint32) ^ c3 ^ k1, product_a.to(tl.uint32)
        k0 = tl.add(k0, KEY_A, sanitize_overflow=False)
        k1 = tl.add(k1, KEY_B, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def wide_product(word, FACTOR: tl.constexpr):
    """The 64-bit product of a uint32 and a constant: one IMAD.WIDE.

    In inline PTX, because LLVM splits the plain form (and tl.philox) into a high and a low product, and both stay.
    """
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            "mul.wide.u32 $0, $1, $2;", "=l,r,r", [word, FACTOR], tl.uint64, is_pure=True, pack=1
        )
    return word.to(tl.uint64) * FACTOR
