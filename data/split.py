"""The second step of a preparation: the tokens of a unit -> its training shard; then the rest -> validation shard.

It begins when every unit is tokenised, for only then the number of documents is known, which decides the split.
"""

import hashlib
from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .files import written_whole
from .tokenizer import byte_lengths, load_tokenizer
from .workshop import Workshop


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
    # documents past a limit were only tokenised because units run in parallel
    edges = _document_edges(workshop, staged)[: documents - first_document + 1]
    numbers = first_document + np.arange(len(edges) - 1)
    val = np.flatnonzero(np.isin(numbers, val_documents))

    record: dict[str, Any] = {
        "val_documents": numbers[val].tolist(),
        "val_lengths": np.diff(edges)[val].tolist(),
    }
    if len(val):
        with written_whole(workshop.held_out(unit), workshop.partial) as file:
            for index in val:
                for block in workshop.read(staged, edges[index], edges[index + 1]):
                    file.write(block.data)
    if len(val) < len(numbers):
        # the training documents are what lies between the validation documents
        starts, stops = [0, *edges[val + 1]], [*edges[val], edges[-1]]
        train = (workshop.read(staged, *edge) for edge in zip(starts, stops, strict=True))
        shard = write_shard(workshop, "train", unit, chain.from_iterable(train))
        record["shard"] = {**shard, "first_document": first_document}
    workshop.record_split(unit, record)
    return record


def write_val_shard(workshop: Workshop, records: list[dict[str, Any]], order: np.ndarray) -> dict[str, Any]:
    """Gather the validation documents of all units in the order of the split; return the shard's facts."""
    pieces: dict[int, list[tuple[int, int, int]]] = {}  # a document can go on in the next unit
    for unit, record in enumerate(records):
        edges = np.concatenate([[0], np.cumsum(record["val_lengths"], dtype=np.int64)]).tolist()
        for document, (start, stop) in zip(record["val_documents"], pairwise(edges), strict=True):
            pieces.setdefault(document, []).append((unit, start, stop))
    blocks = chain.from_iterable(
        workshop.read(workshop.held_out(unit), start, stop)
        for document in order
        for unit, start, stop in pieces[int(document)]
    )
    return write_shard(workshop, "val", 0, blocks)


def write_shard(workshop: Workshop, split: str, unit: int, blocks: Iterable[np.ndarray]) -> dict[str, Any]:
    """Write a shard, block by block, and return what the manifest says of it."""
    end_of_text = load_tokenizer(workshop.tokenizer).eot_token
    lengths = byte_lengths(workshop.tokenizer)
    path = workshop.shard(split, unit)
    digest = hashlib.sha256()
    tokens = documents = utf8_bytes = 0
    with written_whole(path, workshop.partial) as file:
        for block in blocks:
            file.write(block.data)
            digest.update(block.data)
            tokens += len(block)
            documents += int(np.count_nonzero(block == end_of_text))
            utf8_bytes += int(lengths[block].sum(dtype=np.int64))
    return {
        "file": path.name,
        "split": split,
        "documents": documents,
        "tokens": tokens,
        "utf8_bytes": utf8_bytes,
        "sha256": digest.hexdigest(),
    }


def _document_edges(workshop: Workshop, path: Path) -> np.ndarray:
    """Return where documents begin in a file, and where the last one ends or the file does."""
    end_of_text = load_tokenizer(workshop.tokenizer).eot_token
    edges, size = [np.zeros(1, np.int64)], 0
    for block in workshop.read(path):
        edges.append(np.flatnonzero(block == end_of_text) + size + 1)
        size += len(block)
    whole = np.concatenate(edges)
    return whole if whole[-1] == size else np.append(whole, size)  # a document goes on in the next unit
