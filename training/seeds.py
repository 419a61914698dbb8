"""Named random streams: switching one thing on never shifts another thing's random numbers."""

import hashlib


def stream_seed(seed: int, stream: str, *indices: int) -> int:
    """A 63-bit seed for `stream` ("init", "data", "dropout", "sampling"), and for a step or rank within it."""
    key = "/".join(map(str, (seed, stream, *indices)))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
