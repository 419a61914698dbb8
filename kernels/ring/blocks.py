"""Which part of a sequence a rank holds, and which of its queries see which keys of another rank.

Of 2 * ranks chunks, rank r holds chunks r and 2 * ranks - 1 - r. Under the causal mask its two chunks then see as
many keys together as those of any other rank, and with every other rank's keys it has the same work:

    keys of a lower rank    all queries see the first chunk, none the second
    keys of a higher rank   the queries of the second chunk see both, those of the first none

With packed documents two chunks share only the one document that reaches from one into the other: some last keys of
the earlier chunk and some first queries of the later one, where every query sees every key.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

ALL = slice(None)


class Block(NamedTuple):
    """Queries (of ours) and keys (of the rank they come from) of one call of attention."""

    queries: slice = ALL
    keys: slice = ALL
    causal: bool = False  # aligned bottom-right, as everywhere
    rows: slice = ALL  # of the batch
    own_documents: bool = False  # within the documents of this rank's part

    def of_queries(self, x: Tensor) -> Tensor:
        """The part of x (batch, heads, length, ...), as a view."""
        return x[self.rows, :, self.queries]

    def of_keys(self, x: Tensor) -> Tensor:
        """The part of x (batch, kv_heads, length, head_dim), as a view."""
        return x[self.rows, :, self.keys]


def shard_positions(length: int, rank: int, ranks: int) -> Tensor:
    """The positions in a sequence of `length` tokens that a rank holds, ascending: int64 (length / ranks,).

    x[:, positions] is a rank's part of x (batch, length). Raises ValueError unless 2 * ranks divides length and
    rank is one of the ranks.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be 0 to {ranks - 1}, one of {ranks} ranks, got {rank}")
    if length % (2 * ranks):
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut into {2 * ranks} chunks, two for each of {ranks} ranks"
        )
    chunks = torch.arange(length).view(2 * ranks, -1)
    return chunks[list(chunks_of(rank, ranks))].flatten()


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The chunks that a rank holds."""
    return rank, 2 * ranks - 1 - rank


class Layout:
    """The blocks of a rank that holds `length` tokens of each sequence.

    spans: of packed documents, as `documents.spans_of` returns them; None: each sequence is one document.
    """

    def __init__(self, rank: int, ranks: int, length: int, causal: bool, spans: Tensor | None) -> None:
        self.rank, self.ranks, self.length, self.causal = rank, ranks, length, causal
        self.documents = spans is not None
        self.spans: list[list[list[int]]] = [] if spans is None else spans.tolist()

    def own(self) -> tuple[list[Block], list[Block]]:
        """This rank's queries with its own keys, in two parts: what to compute while its keys leave, and while their
        gradients come home. Under the causal mask the first is a quarter of the work."""
        if self.documents:
            return self.between(self.rank), [self.own_whole()]
        half = self.length // 2
        seen_first = slice(0, half) if self.causal else ALL
        return [Block(slice(0, half), seen_first, self.causal)], [Block(slice(half, None), ALL, self.causal)]

    def own_whole(self) -> Block:
        """This rank's queries with its own keys, but for a document that reaches from one chunk into the other."""
        return Block(causal=self.causal, own_documents=self.documents)

    def between(self, source: int) -> list[Block]:
        """This rank's queries with the keys of the rank `source`; of its own, what `own_whole` leaves out."""
        if self.documents:
            return list(self._documents_across(source))
        if source == self.rank:
            return []
        if not self.causal:
            return [Block()]
        half = self.length // 2
        return [Block(keys=slice(0, half)) if source < self.rank else Block(queries=slice(half, None))]

    def with_all(self) -> list[Block]:
        """This rank's queries with the keys of all ranks in the order of the sequence; without packed documents."""
        if not self.causal:
            return [Block()]
        half = self.length // 2
        chunks = enumerate(chunks_of(self.rank, self.ranks))
        return [
            Block(slice(place * half, (place + 1) * half), slice(0, (chunk + 1) * half), causal=True)
            for place, chunk in chunks
        ]

    def _documents_across(self, source: int) -> Iterator[Block]:
        chunk = self.length // 2
        for row, (starts, ends) in enumerate(self.spans):
            for place, later in enumerate(chunks_of(self.rank, self.ranks)):
                queries = min(ends[later] - later * chunk, chunk)
                for key_place, earlier in enumerate(chunks_of(source, self.ranks)):
                    first = max(starts[later] - earlier * chunk, 0)
                    if earlier < later and first < chunk:
                        yield Block(
                            slice(place * chunk, place * chunk + queries),
                            slice(key_place * chunk + first, (key_place + 1) * chunk),
                            rows=slice(row, row + 1),
                        )
