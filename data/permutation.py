"""A permutation of range(n) that is computed on demand, without an array of n entries.

A balanced Feistel network permutes the numbers below a power of four; a value that lands at n or beyond is sent
through again until it lands below (cycle walking), which keeps it a permutation. Black and Rogaway, "Ciphers with
arbitrary finite domains" (2002).
"""

import numpy as np

_ROUNDS = 8


class Permutation:
    """The permutation of range(n) keyed by (seed, epoch)."""

    def __init__(self, n: int, seed: int, epoch: int):
        self.n = n
        self._half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)
        words = np.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, np.uint64)
        self._keys = [np.uint64(word) for word in words]

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Map indices in [0, n), of any shape, to their images, int64."""
        value = self._network(index.astype(np.uint64))
        while len(outside := np.flatnonzero(value >= self.n)):
            value[outside] = self._network(value[outside])
        return value.astype(np.int64)

    def _network(self, value: np.ndarray) -> np.ndarray:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
