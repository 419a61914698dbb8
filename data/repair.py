"""Make one damaged shard again from the source, byte for byte what the manifest says."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import DataError, hub
from .corpora import Mix, make_corpus
from .files import make_folder
from .loader import Corpus
from .manifest import Manifest
from .parts import Part
from .prepare import group
from .progress import Progress
from .split import split_order, split_unit, write_val_shard
from .tokenise import tokenise_unit
from .workshop import Workshop, lock


def rebuild_shard(corpus: Corpus, file: str, progress: Progress, tokenizer: str | None) -> None:
    """Replace a shard. Raises DataError when the source no longer gives what the corpus was made from.

    tokenizer: where the corpus's tokenizer is now, if it has moved; None: where it was.
    """
    manifest = corpus.manifest
    shard = next((shard for shard in manifest.shards if shard["file"] == file), None)
    if shard is None:
        raise DataError(f"{corpus.directory} has no shard {file!r}: its shards are {_names(manifest.shards)}")
    corpus.tokenizer(tokenizer)
    arguments = dict(manifest.source)
    if arguments["source"] == "hub" and hub.COMMIT.fullmatch(manifest.state):  # not a folder, which has none
        arguments["revision"] = manifest.state  # also where `main` was asked for
    source = make_corpus(**arguments)
    if isinstance(source, Mix):
        raise DataError(
            f"{corpus.directory} is a mix: repair the corpora in it, or delete it, and prepare it again in a second"
        )
    # apart from the corpus, whose shards are replaced only by what has their hash
    workshop = Workshop(corpus.directory / "repair", tokenizer or manifest.tokenizer["name"], manifest.dtype)
    with lock(corpus.directory, progress):
        try:
            make_folder(workshop.partial)
            source.fetch(progress, corpus.directory)
            units = group(source.parts(manifest.shard_bytes), manifest.shard_bytes)
            if shard["split"] == "train":
                made = _rebuild_train(workshop, manifest, shard, units, source.limit_documents)
            else:
                made = _rebuild_val(workshop, manifest, units)
            if made is None or made["sha256"] != shard["sha256"]:
                raise DataError(
                    f"the source of {corpus.directory} has changed since then, so {file} cannot be rebuilt: prepare "
                    "a new corpus"
                )
            os.replace(workshop.directory / file, corpus.directory / file)
        finally:
            shutil.rmtree(workshop.directory, ignore_errors=True)


def _rebuild_train(
    workshop: Workshop, manifest: Manifest, shard: dict[str, Any], units: list[list[Part]], limit: int | None
) -> dict[str, Any] | None:
    """None: the unit is not there."""
    unit = int(shard["file"].removeprefix("train-").removesuffix(".bin"))
    if unit >= len(units):
        return None
    documents = sum(manifest.documents.values())
    order = split_order(documents, manifest.val_fraction, manifest.split_seed)
    tokenise_unit(workshop, unit, units[unit], limit)
    return split_unit(workshop, unit, shard["first_document"], documents, np.sort(order)).get("shard")


def _rebuild_val(workshop: Workshop, manifest: Manifest, units: list[list[Part]]) -> dict[str, Any] | None:
    """Tokenise the validation documents alone, as if they were one unit; None: they are not all there."""
    order = split_order(sum(manifest.documents.values()), manifest.val_fraction, manifest.split_seed)
    parts = [part for unit in units for part in unit]
    if tokenise_unit(workshop, 0, [_Chosen(parts, frozenset(order.tolist()))], None) != len(order):
        return None
    # in a corpus of these documents only, every document is a validation document
    ranks = np.argsort(np.argsort(order))
    record = split_unit(workshop, 0, 0, len(order), np.arange(len(order)))
    return write_val_shard(workshop, [record], ranks)


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
