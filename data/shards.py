"""From parts to token shards, in two steps that any process can do for any unit and redo after a kill.

A unit is a sequence of parts, about `shard_bytes` of text. Step one tokenises it, documents in order with an
end-of-text token after each, into a staged file. Once all units are staged, the number of documents is known and so
is the split. Step two takes the validation documents out of each unit, and the rest becomes its training shard.
Then the validation documents of all units are put in the order of the split.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise, starmap
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from . import DataError
from .ahead import ahead
from .files import written_whole
from .readers import CUT, Part
from .tokenizer import load_encoder, load_tokenizer

_BLOCK_CHARACTERS = 1 << 20
# A multiple of the longest token of blanks; not the last blank of a run, which belongs to the next word.
_MANY_BLANKS = re.compile(r"\s{65536}(?=\s)")


@dataclass(frozen=True)
class Workshop:
    """Where one corpus is made, and with which tokenizer. Small and picklable: every job carries it."""

    directory: Path
    tokenizer: str
    dtype: str

    @property
    def partial(self) -> Path:
        return self.directory / "partial"

    def staged(self, unit: int) -> Path:
        """The tokens of a unit before the split; whole once its record is there."""
        return self.partial / f"{unit:05d}.tokens"

    def staged_record(self, unit: int) -> Path:
        return self.partial / f"{unit:05d}.tokens.json"

    def held_out(self, unit: int) -> Path:
        """The validation documents of a unit, in document order."""
        return self.partial / f"{unit:05d}.val"

    def split_record(self, unit: int) -> Path:
        """Written when a unit's shard and held_out are whole."""
        return self.partial / f"{unit:05d}.split.json"

    def shard(self, split: str, unit: int) -> Path:
        return self.directory / f"{split}-{unit:05d}.bin"

    def remove_half_written(self) -> None:
        """Remove files that written_whole() had begun; only while holding the lock, with no process at work."""
        for path in self.partial.glob("*.tmp"):
            path.unlink()


def dtype_for(encoding: tiktoken.Encoding) -> str:
    """uint16 while every token id fits, uint32 beyond; little-endian on any machine."""
    return "<u2" if encoding.n_vocab <= 1 << 16 else "<u4"


def group(parts: Iterable[Part], shard_bytes: int) -> list[list[Part]]:
    """Cut the sequence of parts into units of at least `shard_bytes` of text, but for the last."""
    units: list[list[Part]] = []
    room = 0
    for part in parts:
        if room <= 0:
            units.append([])
            room = shard_bytes
        units[-1].append(part)
        room -= part.text_bytes
    return units


def tokenise_unit(workshop: Workshop, unit: int, parts: list[Part], limit: int | None) -> int:
    """Write the staged file of a unit, at most `limit` documents of it; return the number of documents."""
    documents = size = 0
    with written_whole(workshop.staged(unit), workshop.partial) as file:
        for tokens, ends in encode(parts, workshop, limit):
            documents += ends
            size += len(tokens)
            file.write(tokens)
    _write_record(workshop.staged_record(unit), {"documents": documents, "tokens": size})
    return documents


def encode(
    parts: list[Part], workshop: Workshop, limit: int | None = None
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the tokens of the parts, block by block, with the number of documents that end in the block."""
    encoding = load_encoder(workshop.tokenizer)
    documents = 0
    end_of_text = np.array([encoding.eot_token], np.uint32)
    # a thread reads the next blocks while this one tokenises, which frees the GIL
    for block in ahead(_blocks(parts), depth=2):
        tokens = []
        before = documents
        for text, ends, where in block:
            tokens.append(_encode_text(encoding, text, where))
            if ends:
                tokens.append(end_of_text)
                documents += 1
                if documents == limit:
                    break
        yield np.concatenate(tokens, dtype=workshop.dtype, casting="unsafe"), documents - before
        if documents == limit:
            return


def measure(parts: list[Part], workshop: Workshop) -> tuple[float, float]:
    """Return tokens per byte and bytes per document, measured on the first block of text."""
    with closing(encode(parts, workshop)) as blocks:
        tokens, documents = next(blocks, (np.empty(0, np.int64), 0))
    utf8_bytes = max(1, int(_byte_lengths(workshop.tokenizer)[tokens].sum(dtype=np.int64)))
    # Empty documents are a token each and no text; in a file they take more than a byte.
    return min(1.0, len(tokens) / utf8_bytes), utf8_bytes / max(1, documents)


def _encode_text(encoding: tiktoken.Encoding, text: str, where: str) -> np.ndarray:
    try:
        # the tokens of encode_ordinary() without the Python list
        return encoding.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can escape and UTF-8 cannot hold
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return _encode_text(encoding, whole, where)
    except ValueError as error:  # a million blanks in a row overflow the stack of the regex engine
        cuts = [0, *(blanks.end() for blanks in _MANY_BLANKS.finditer(text)), len(text)]
        if len(cuts) == 2:
            raise DataError(
                f"{where}: {encoding.name} cannot encode the text that begins {text[:40]!r}: {error}"
            ) from None
        return np.concatenate([_encode_text(encoding, text[slice(*cut)], where) for cut in pairwise(cuts)])


def _blocks(parts: list[Part]) -> Iterator[list[tuple[str, bool, str]]]:
    """Yield the pieces, with the file of each, in blocks of about a million characters."""
    block, characters = [], 0
    for part in parts:
        where = getattr(part, "path", str(part))
        try:
            for piece in chain.from_iterable(starmap(_cut, part.pieces())):
                block.append((*piece, where))
                characters += len(piece[0])
                if characters >= _BLOCK_CHARACTERS:
                    yield block
                    block, characters = [], 0
        except OSError as error:
            # pyarrow's own errors, of damaged compression, have no strerror
            reason = error.strerror or f"{error}: get the file again, then rerun the command"
            raise DataError(f"cannot read {where}: {reason}") from None
    if block:
        yield block


def _cut(text: str, ends: bool) -> Iterator[tuple[str, bool]]:
    """Cut a piece longer than a block: until they are written, its tokens take up to 8 times its memory."""
    start = 0
    while match := CUT.search(text, start + _BLOCK_CHARACTERS):
        yield text[start : match.start()], False
        start = match.start()
    yield text[start:], ends


def split_order(documents: int, val_fraction: float, seed: int) -> np.ndarray:
    """Return the validation documents, in the order of the validation split.

    The rule of datasets.Dataset.train_test_split(test_size=val_fraction, seed=seed), and so nanoGPT's split of
    OpenWebText: the first ceil(n * val_fraction) entries of numpy's default_rng(seed).permutation(n).
    """
    count = int(np.ceil(documents * val_fraction))
    return np.random.default_rng(seed).permutation(documents)[:count]


def split_unit(
    workshop: Workshop, unit: int, first_document: int, documents: int, val_documents: np.ndarray
) -> dict[str, Any]:
    """Turn the staged file of a unit into its training shard and its held-out documents; return its record.

    first_document: number of the document the unit starts in; documents: how many the corpus has;
    val_documents: the validation documents in this unit, sorted.
    """
    staged = workshop.staged(unit)
    tokens = staged.stat().st_size // np.dtype(workshop.dtype).itemsize
    edges = np.concatenate([[0], _end_of_text_positions(workshop, staged, tokens) + 1])
    if edges[-1] != tokens:  # the unit ends within a document
        edges = np.append(edges, tokens)
    # documents past a limit were only tokenised because units run in parallel
    edges = edges[: documents - first_document + 1]
    numbers = first_document + np.arange(len(edges) - 1)
    val = np.flatnonzero(np.isin(numbers, val_documents))

    record: dict[str, Any] = {
        "val_documents": numbers[val].tolist(),
        "val_lengths": np.diff(edges)[val].tolist(),
    }
    if len(val):
        with written_whole(workshop.held_out(unit), workshop.partial) as file:
            for index in val:
                for block in _read(workshop, staged, edges[index], edges[index + 1]):
                    file.write(block)
    if len(val) < len(numbers):
        # the training documents are what lies between the validation documents
        starts, stops = [0, *edges[val + 1]], [*edges[val], edges[-1]]
        train = chain.from_iterable(
            _read(workshop, staged, *edge) for edge in zip(starts, stops, strict=True)
        )
        record["shard"] = {**write_shard(workshop, "train", unit, train), "first_document": first_document}
    _write_record(workshop.split_record(unit), record)
    workshop.staged(unit).unlink()
    return record


def write_val_shard(workshop: Workshop, records: list[dict[str, Any]], order: np.ndarray) -> dict[str, Any]:
    """Gather the validation documents of all units in the order of the split; return the shard's facts."""
    pieces: dict[int, list[tuple[int, int, int]]] = {}  # a document can go on in the next unit
    for unit, record in enumerate(records):
        edges = np.concatenate([[0], np.cumsum(record["val_lengths"], dtype=np.int64)]).tolist()
        for document, (start, stop) in zip(record["val_documents"], pairwise(edges), strict=True):
            pieces.setdefault(document, []).append((unit, start, stop))
    blocks = chain.from_iterable(
        _read(workshop, workshop.held_out(unit), start, stop)
        for document in order
        for unit, start, stop in pieces[int(document)]
    )
    return write_shard(workshop, "val", 0, blocks)


def write_shard(workshop: Workshop, split: str, unit: int, blocks: Iterable[np.ndarray]) -> dict[str, Any]:
    """Write a shard, block by block, and return what the manifest says of it."""
    encoding = load_tokenizer(workshop.tokenizer)
    byte_lengths = _byte_lengths(workshop.tokenizer)
    path = workshop.shard(split, unit)
    digest = hashlib.sha256()
    tokens = documents = utf8_bytes = 0
    with written_whole(path, workshop.partial) as file:
        for block in blocks:
            file.write(block)
            digest.update(block)
            tokens += len(block)
            documents += int(np.count_nonzero(block == encoding.eot_token))
            utf8_bytes += int(byte_lengths[block].sum(dtype=np.int64))
    return {
        "file": path.name,
        "split": split,
        "documents": documents,
        "tokens": tokens,
        "utf8_bytes": utf8_bytes,
        "sha256": digest.hexdigest(),
    }


@lru_cache(maxsize=1)
def _byte_lengths(tokenizer: str) -> np.ndarray:
    """How many bytes of text each token stands for; 0 for the special ones."""
    encoding = load_tokenizer(tokenizer)
    lengths = np.zeros(encoding.n_vocab, np.uint16)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def _read(workshop: Workshop, path: Path, start: int, stop: int) -> Iterator[np.ndarray]:
    """Tokens start to stop of a file, a million at a time.

    Not memory-mapped: what was read would count as memory, 2.1 GB for 1.1 GB of text in one compressed file.
    """
    for at in range(start, stop, 1 << 20):
        count = min(stop - at, 1 << 20)
        yield np.fromfile(path, workshop.dtype, count, offset=at * np.dtype(workshop.dtype).itemsize)


def _end_of_text_positions(workshop: Workshop, path: Path, tokens: int) -> np.ndarray:
    end_of_text = load_tokenizer(workshop.tokenizer).eot_token
    found, start = [np.empty(0, np.int64)], 0
    for block in _read(workshop, path, 0, tokens):
        found.append(np.flatnonzero(block == end_of_text) + start)
        start += len(block)
    return np.concatenate(found)


def staged_documents(workshop: Workshop, unit: int) -> int | None:
    """Return how many documents the first step found in a unit, None if it is not done."""
    record = _read_record(workshop.staged_record(unit))
    if record is None:
        return None
    whole = split_result(workshop, unit) or _holds(workshop, workshop.staged(unit), record["tokens"])
    return record["documents"] if whole else None


def split_result(workshop: Workshop, unit: int) -> dict[str, Any] | None:
    """Return the record of the second step of a unit, None if it is not done."""
    record = _read_record(workshop.split_record(unit))
    if record is None:
        return None
    shard_tokens = record["shard"]["tokens"] if "shard" in record else 0
    whole = _holds(workshop, workshop.shard("train", unit), shard_tokens) and _holds(
        workshop, workshop.held_out(unit), sum(record["val_lengths"])
    )
    return record if whole else None


def _holds(workshop: Workshop, path: Path, tokens: int) -> bool:
    """Whether a file has its full size: after a power cut, one that was not yet flushed may be shorter."""
    size = path.stat().st_size if path.exists() else 0
    return size == tokens * np.dtype(workshop.dtype).itemsize


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _write_record(path: Path, record: dict[str, Any]) -> None:
    with written_whole(path, path.parent) as file:
        file.write(json.dumps(record).encode())
