"""Make one damaged shard again from the source, byte for byte what the manifest says."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from . import DataError, hub
from .corpora import make_corpus
from .files import make_folder
from .loader import Corpus
from .prepare import lock
from .progress import Progress
from .readers import Part
from .shards import Workshop, group, split_order, split_unit, tokenise_unit, write_val_shard


def rebuild_shard(corpus: Corpus, file: str, progress: Progress, tokenizer: str | None) -> None:
    """Replace a shard. Raises DataError when the source is no longer what the corpus was made from.

    tokenizer: where the corpus's is by now, if it has moved; None: where it was.
    """
    manifest = corpus.manifest
    shard = next((shard for shard in manifest.shards if shard["file"] == file), None)
    if shard is None:
        raise DataError(f"{corpus.directory} has no shard {file!r}: its shards are {_names(manifest.shards)}")
    arguments = dict(manifest.source)
    if arguments["source"] == "hub" and hub.COMMIT.fullmatch(manifest.state):  # not a folder, which has none
        arguments["revision"] = manifest.state  # also where `main` was asked for
    source = make_corpus(**arguments)
    changed = DataError(
        f"the source of {corpus.directory} has changed since then, so {file} cannot be rebuilt: prepare a new corpus"
    )
    if source.state() != manifest.state:
        raise changed
    corpus.tokenizer(tokenizer)
    workshop = Workshop(corpus.directory, tokenizer or manifest.tokenizer["name"], manifest.dtype)
    with lock(corpus.directory, progress):
        make_folder(workshop.partial)
        source.fetch(progress, corpus.directory)
        units = group(source.parts(manifest.shard_bytes), manifest.shard_bytes)
        documents = sum(manifest.documents.values())
        order = split_order(documents, manifest.val_fraction, manifest.split_seed)
        if shard["split"] == "train":
            unit = int(file.removeprefix("train-").removesuffix(".bin"))
            tokenise_unit(workshop, unit, units[unit], source.limit_documents)
            split_unit(workshop, unit, shard["first_document"], documents, np.sort(order))
        else:
            _rebuild_val(workshop, units, order)
        shutil.rmtree(workshop.partial)
    if corpus.damage(shard, hashed=True):
        raise changed


def _rebuild_val(workshop: Workshop, units: list[list[Part]], order: np.ndarray) -> None:
    """Tokenise the validation documents alone, as if they were one unit."""
    parts = [part for unit in units for part in unit]
    tokenise_unit(workshop, 0, [_Chosen(parts, frozenset(order.tolist()))], None)
    # in a corpus of these documents only, every document is a validation document
    ranks = np.argsort(np.argsort(order))
    record = split_unit(workshop, 0, 0, len(order), np.arange(len(order)))
    write_val_shard(workshop, [record], ranks)


@dataclass(frozen=True)
class _Chosen:
    """The documents with these numbers, out of the parts."""

    parts: list[Part]
    documents: frozenset[int]
    text_bytes: int = 0

    def pieces(self) -> Iterator[tuple[str, bool]]:
        document, last = 0, max(self.documents)
        for part in self.parts:
            for text, ends in part.pieces():
                if document in self.documents:
                    yield text, ends
                document += ends
                if document > last:  # the next part may be a file to download
                    return


def _names(shards: list[dict]) -> str:
    return f"{shards[0]['file']} to {shards[-1]['file']}" if len(shards) > 1 else shards[0]["file"]
