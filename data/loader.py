"""Prepared corpora as batches: memory-mapped shards, and batch n computed from n.

No state and no scan: a batch is a pure function of (corpus, seed, n), so resuming is starting at another n, and the
sequences of a step do not depend on how many ranks share it.
"""

import shlex
from bisect import bisect_right
from collections.abc import Generator, Iterator
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import DataError
from .ahead import ahead
from .files import sha256_of
from .interleave import Interleave
from .manifest import read_manifest
from .permutation import Permutation
from .tokenizer import findable, load_tokenizer, tokenizer_hash

# Up to this size a corpus is hashed whenever it is opened (0.2 s); above, file sizes are compared.
_HASHED_BYTES = 256 << 20
IGNORED = -1  # the target where there is nothing to predict


class Corpus:
    """A prepared corpus on disk: its manifest, and its splits as tokens."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.manifest = read_manifest(directory)
        self.name = self.manifest.name
        self.fingerprint = self.manifest.fingerprint
        self.n_vocab: int = self.manifest.tokenizer["n_vocab"]
        self.eot_token: int = self.manifest.tokenizer["eot_token"]
        self.train = TokenSplit(self, "train")
        self.val = TokenSplit(self, "val")

    def tokenizer(self, name: str | None = None):
        """Return the tiktoken encoding the corpus was made with, found under `name` if it has moved.

        Raises DataError when it is a different tokenizer, whose ids would mean other text.
        """
        made_with = self.manifest.tokenizer["name"]
        name = findable(name or made_with)
        different = name != made_with and "bytes" in (name, made_with)  # known without loading it
        encoding = None if different else load_tokenizer(name)
        if encoding and tokenizer_hash(encoding) == self.manifest.tokenizer["sha256"]:
            return encoding
        if name == made_with:  # a rank file
            raise DataError(
                f"{name} has changed since {self.directory} was made with it: restore the old file, or prepare "
                "the corpus again with this one"
            )
        raise DataError(
            f"{self.directory} was made with tokenizer {made_with}, and {name} is a different one: "
            f"name the original with data.tokenizer={made_with} (or --tokenizer, where a command has that), or "
            f"prepare the corpus again with {name}"
        )

    def damage(self, shard: dict[str, Any], *, hashed: bool) -> str | None:
        """Return what is wrong with a shard, None if nothing: its size, and its sha256 if `hashed`."""
        path = self.directory / shard["file"]
        wanted = shard["tokens"] * np.dtype(self.manifest.dtype).itemsize
        size = path.stat().st_size if path.exists() else None
        if size != wanted:
            return "is missing" if size is None else f"has {size:,} bytes, but the manifest says {wanted:,}"
        if hashed and sha256_of(path) != shard["sha256"]:
            return "does not have the sha256 in the manifest"
        return None

    def damaged(self, shard_file: str, reason: str) -> DataError:
        file = self.directory / shard_file  # of a mix, in another corpus's folder
        remedy = (
            "rebuild just this shard with "
            f"python -m {__package__}.inspect {shlex.quote(str(file.parent))} --repair {file.name}"
        )
        if self.manifest.mix and file.parent == self.directory:
            remedy = f"delete {self.directory}, and prepare the mix again in a second"
        return DataError(f"{file} {reason}: {remedy}")


def open_corpus(directory: str | Path) -> Corpus:
    """Return the finished corpus in a folder. Raises DataError if it is not there, or not whole."""
    corpus = Corpus(Path(directory).absolute())
    small = sum(corpus.manifest.tokens.values()) * np.dtype(corpus.manifest.dtype).itemsize <= _HASHED_BYTES
    for shard in corpus.manifest.shards:
        if reason := corpus.damage(shard, hashed=small):
            raise corpus.damaged(shard["file"], reason)
    return corpus


class Share(NamedTuple):
    """A corpus of a mixture: how many training tokens it has, and which share of a batch comes from it."""

    name: str
    tokens: int
    share: float = 1.0


class TokenSplit:
    """The tokens of a split as one long sequence over its memory-mapped shards."""

    def __init__(self, corpus: Corpus, split: str):
        self.corpus = corpus
        self.shards = [shard for shard in corpus.manifest.shards if shard["split"] == split]
        self.documents: int = corpus.manifest.documents[split]
        self.tokens: int = corpus.manifest.tokens[split]
        self.utf8_bytes: int = corpus.manifest.utf8_bytes[split]
        self.name = split
        mix = corpus.manifest.mix if split == "train" else None
        # the corpora of a mixture, one after the other; else this one
        self.shares = [Share(**each) for each in mix or [{"name": self.corpus.name, "tokens": self.tokens}]]
        self._maps: dict[int, np.ndarray] = {}
        self._edges = [0, *accumulate(shard["tokens"] for shard in self.shards)]

    def __getstate__(self) -> dict[str, Any]:
        """Without the memory maps, which would be pickled with all their tokens; the copy maps the files again."""
        return self.__dict__ | {"_maps": {}}

    def epochs(self, tokens: int, at_most: float | None = None) -> float:
        """Return how often a run of `tokens` goes through the split. Raises DataError when above `at_most`.

        In a mixture, through the corpus that repeats most often. Up to 4 epochs are nearly as good as new text
        (Muennighoff et al., arXiv 2305.16264).
        """
        name, available, share = max(self.shares, key=lambda each: each.share / each.tokens)
        epochs = tokens * share / available
        if at_most is not None and epochs > at_most:
            most = int(at_most * available / share)
            raise DataError(
                f"{name} is too small: {tokens * share:,.0f} tokens are {epochs:.3g} epochs of its {available:,}, "
                f"more than {at_most:g}: give more text, or train on at most {most:,} tokens"
            )
        return epochs

    def shard_tokens(self, index: int) -> np.ndarray:
        """Return the tokens of one shard, memory-mapped at first use."""
        if index not in self._maps:
            path = self.corpus.directory / self.shards[index]["file"]
            self._maps[index] = mapped(path, self.corpus.manifest.dtype)
        return self._maps[index]

    def read(self, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length) as int64; less at the end of the split."""
        stop = min(start + length, self.tokens)
        tokens = np.empty(max(0, stop - start), np.int64)
        filled = 0
        while filled < len(tokens):
            shard = bisect_right(self._edges, start + filled) - 1
            offset = start + filled - self._edges[shard]
            piece = self.shard_tokens(shard)[offset : offset + len(tokens) - filled]
            tokens[filled : filled + len(piece)] = piece
            # large corpora are not hashed when opened; an id out of range would crash a GPU without an explanation
            if piece.max() >= self.corpus.n_vocab:
                raise self.corpus.damaged(
                    self.shards[shard]["file"],
                    f"holds token {piece.max()}, but the vocabulary has {self.corpus.n_vocab}",
                )
            filled += len(piece)
        return tokens


def mapped(path: Path, dtype: str) -> np.ndarray:
    """Return the array that a file holds, memory-mapped for as long as it is used, with no descriptor kept open.

    numpy's map keeps one, and OpenWebText has 4,800 shards where a shell allows 1,024. Random windows of 1,025 tokens
    over 200 shards are read as fast, 490 M tokens/s against 494 M; opening a file for each takes twice as long.
    """
    import torch

    content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    return content.numpy().view(dtype)


class Batches:
    """Training batches: windows of block_len + 1 tokens at stride block_len, each once an epoch in a new order.

    Each window is cut into sequences of seq_len, so runs that differ in seq_len, but not in block_len and tokens a
    batch, see the same tokens in every batch. sequences_per_batch counts the sequences of all ranks together. Epoch e
    uses the permutation keyed by (seed, e); a batch may take the last windows of one epoch and the first of the next.
    In a mixture each corpus has epochs of its own, and interleave.py says whose turn it is.
    Raises DataError when the split is shorter than one window, or a batch or a window cannot be cut evenly.

    Args:
        block_len: tokens of a window; None: seq_len.
    """

    def __init__(
        self,
        split: TokenSplit,
        seq_len: int,
        sequences_per_batch: int,
        seed: int,
        block_len: int | None = None,
    ):
        _check(split, seq_len, sequences_per_batch)
        block_len = block_len or seq_len
        if block_len % seq_len or sequences_per_batch * seq_len % block_len:
            raise DataError(
                f"block_len={block_len:,} must be a multiple of seq_len={seq_len:,}, and divide the "
                f"{sequences_per_batch * seq_len:,} tokens of a batch"
            )
        for name, tokens, _ in split.shares:
            if tokens <= block_len:
                raise DataError(
                    f"the {split.name} split of {name} has {tokens:,} tokens, but one sequence takes "
                    f"{block_len + 1:,}: give more text, or a model.seq_len of at most {max(1, tokens - 1)}"
                )
        self.split, self.seq_len, self.block_len, self.seed = split, seq_len, block_len, seed
        self.windows_per_batch = sequences_per_batch * seq_len // block_len
        sizes = np.array([each.tokens for each in split.shares])
        # of each corpus: its windows, the number of its first one, and the token that this starts at
        self._counts = (sizes - 1) // block_len
        self._bases = np.cumsum(self._counts) - self._counts
        self._tokens = np.cumsum(sizes) - sizes
        self.windows = int(self._counts.sum())
        self._interleave = Interleave([each.share for each in split.shares], seed)
        # Windows are computed for a group of batches at once, and the last group is kept: numpy calls for eight
        # sequences at a time were most of the data time of the default run. Not an lru_cache, which cannot be
        # pickled, and which a copy would share with the original.
        self._group = max(1, 512 // self.windows_per_batch)
        self._last_group: tuple[tuple[int, int], np.ndarray] | None = None

    def batch(self, n: int, rank: int = 0, world_size: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of batch n for one rank, int64 (sequences_per_batch / world_size, seq_len)."""
        windows = self._windows(n, rank, world_size)
        source = np.searchsorted(self._bases, windows, "right") - 1
        starts = self._tokens[source] + (windows - self._bases[source]) * self.block_len
        tokens = np.stack([self.split.read(int(start), self.block_len + 1) for start in starts])
        return tokens[:, :-1].reshape(-1, self.seq_len), tokens[:, 1:].reshape(-1, self.seq_len)

    def _windows(self, n: int, rank: int, world_size: int) -> np.ndarray:
        group, place = divmod(n, self._group)
        key, last = (group, self.seed), self._last_group  # read once, as another thread may write it
        if last is None or last[0] != key:
            last = self._last_group = key, self._group_windows(group)
        return last[1][place][_of_rank(self.windows_per_batch, rank, world_size)]

    def _group_windows(self, group: int) -> np.ndarray:
        """Return the windows of a group's batches, int64 (batches, windows_per_batch)."""
        size = self._group * self.windows_per_batch
        sources, items = self._interleave(np.arange(group * size, (group + 1) * size))
        epochs, positions = np.divmod(items, self._counts[sources])
        windows = np.empty_like(positions)
        for source, epoch in np.unique(np.stack([sources, epochs]), axis=1).T.tolist():
            inside = (sources == source) & (epochs == epoch)
            permuted = Permutation(int(self._counts[source]), self.seed, epoch)(positions[inside])
            windows[inside] = self._bases[source] + permuted
        return windows.reshape(self._group, self.windows_per_batch)


class EvaluationBatches:
    """Batches that ask for each token of the split but the first exactly once, in order.

    Targets are -1 where a window ends early, and in the whole rows that fill up the last batch, so that every rank
    gets the same number of batches of one shape.
    """

    def __init__(self, split: TokenSplit, seq_len: int, sequences_per_batch: int):
        _check(split, seq_len, sequences_per_batch)
        self.split, self.seq_len, self.sequences_per_batch = split, seq_len, sequences_per_batch
        self.windows = -(-(split.tokens - 1) // seq_len)

    def __len__(self) -> int:
        return -(-self.windows // self.sequences_per_batch)

    def batch(self, n: int, rank: int = 0, world_size: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of batch n for one rank, int64 (sequences_per_batch / world_size, seq_len)."""
        windows = n * self.sequences_per_batch + _of_rank(self.sequences_per_batch, rank, world_size)
        inputs = np.zeros((len(windows), self.seq_len), np.int64)
        targets = np.full((len(windows), self.seq_len), IGNORED, np.int64)
        for row, window in enumerate(windows):
            tokens = self.split.read(int(window) * self.seq_len, self.seq_len + 1)
            if len(tokens) > 1:
                inputs[row, : len(tokens) - 1] = tokens[:-1]
                targets[row, : len(tokens) - 1] = tokens[1:]
        return inputs, targets


def _check(split: TokenSplit, seq_len: int, sequences_per_batch: int) -> None:
    if not isinstance(split, TokenSplit):
        raise TypeError(f"split must be a TokenSplit, such as open_corpus(FOLDER).train, not {split!r}")
    if min(seq_len, sequences_per_batch) < 1:
        raise DataError(f"seq_len={seq_len}, sequences_per_batch={sequences_per_batch}: at least 1 each")


def _of_rank(sequences: int, rank: int, world_size: int) -> np.ndarray:
    """Return the positions in a batch that belong to a rank."""
    if sequences % world_size:
        nearest = max(1, round(sequences / world_size)) * world_size
        raise DataError(
            f"a batch of {sequences} sequences cannot be shared equally by {world_size} ranks: {nearest} can"
        )
    each = sequences // world_size
    return np.arange(rank * each, (rank + 1) * each)


def prefetch(
    batches: Batches | EvaluationBatches,
    start: int = 0,
    stop: int | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> Generator[tuple[Any, Any], None, None]:
    """Yield batches start, start + 1, ... (before `stop`) as int64 torch tensors on the CPU, made by a thread.

    Without `stop`, evaluation ends after its last batch, and training never. pin_memory: in page-locked memory, so
    that copies do not block. Closing the generator ends the thread.
    """
    import torch

    if stop is None and isinstance(batches, EvaluationBatches):
        stop = len(batches)

    def make() -> Iterator[tuple[Any, Any]]:
        for n in count(start) if stop is None else range(start, stop):
            inputs, targets = map(
                torch.from_numpy, map(np.ascontiguousarray, batches.batch(n, rank, world_size))
            )
            yield (inputs.pin_memory(), targets.pin_memory()) if pin_memory else (inputs, targets)

    return ahead(make(), depth=2)
