"""A mixture of prepared corpora, in given proportions.

It is a corpus folder of its own, whose manifest lists the training shards where they are, in the folders of the
corpora: nothing is copied, and interleave.py says which corpus a training sequence is from. Only validation documents
are gathered in a shard of the mixture's own: from the start of each corpus's validation split, as many tokens as its
share allows, so that the validation loss is of the mixture that the model is trained on.
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from . import DataError
from .corpora import Mix
from .files import make_folder
from .interleave import PERIOD
from .loader import Corpus, open_corpus
from .manifest import MANIFEST_FILE, Manifest, corpus_folder, folder_hash
from .progress import Progress
from .split import write_shard
from .tokenizer import findable
from .workshop import Workshop, lock


def open_mix(mix: Mix, tokenizer: str, cache_root: str | Path, progress: Progress) -> Corpus:
    """Return the mixture as a corpus, made now unless it is there. Raises DataError if it cannot be made."""
    for folder, weight in mix.corpora.items():
        if not weight * PERIOD >= sum(mix.corpora.values()) > 0:
            raise DataError(
                f"data.corpora: the weight {weight:g} of {folder} is below {1 / PERIOD:.2%} of all weights: leave it "
                "out, or give it more"
            )
    corpora = [open_corpus(corpus_folder(Path(folder).expanduser())) for folder in mix.corpora]
    for corpus in corpora:
        corpus.tokenizer(tokenizer)
        if corpus.manifest.mix:
            raise DataError(f"{corpus.directory} is a mix itself: name the corpora that it is made of")
    if len({corpus.fingerprint for corpus in corpora}) < len(corpora):
        raise DataError("data.corpora names the same tokens twice: give each corpus one weight")
    weights = mix.corpora.values()
    shares = [weight / sum(weights) for weight in weights]
    about = [(str(corpus.directory), corpus.fingerprint) for corpus in corpora]
    directory = Path(cache_root).expanduser().absolute() / f"mix-{folder_hash(corpora=about, shares=shares)}"
    with lock(directory, progress):
        if not (directory / MANIFEST_FILE).exists():
            made = _make(directory, mix, findable(tokenizer), corpora, shares)
            whole = sum(corpus.val.tokens for corpus in corpora)
            progress.say(
                f"{made.name}: validation has {made.val.tokens:,} of {whole:,} tokens, for the same proportions"
            )
    return open_corpus(directory)


def _make(directory: Path, mix: Mix, tokenizer: str, corpora: list[Corpus], shares: list[float]) -> Corpus:
    first = corpora[0].manifest
    workshop = Workshop(directory, tokenizer, first.dtype)
    make_folder(workshop.partial)
    shards = [
        {**shard, "file": str(corpus.directory / shard["file"])}
        for corpus in corpora
        for shard in corpus.train.shards
    ]
    shards.append(write_shard(workshop, "val", 0, _validation(corpora, shares)))
    named = (f"{share:.3g} {corpus.name}" for corpus, share in zip(corpora, shares, strict=True))
    manifest = replace(  # its preparation's settings are those of the first corpus
        first,
        name=f"mix ({', '.join(named)})",
        source={"source": mix.kind, **asdict(mix)},
        tokenizer={**first.tokenizer, "name": tokenizer},
        state="-".join(corpus.fingerprint for corpus in corpora),
        shards=shards,
        mix=[
            {"name": corpus.name, "tokens": corpus.train.tokens, "share": share}
            for corpus, share in zip(corpora, shares, strict=True)
        ],
        **Manifest.counts(shards),
    )
    manifest.write(directory, workshop.partial)
    shutil.rmtree(workshop.partial)
    return Corpus(directory)


def _validation(corpora: list[Corpus], shares: list[float]) -> Iterator[np.ndarray]:
    """Yield whole documents of each validation split, in proportion; the one that is shortest for its share decides.

    They are mixed evenly, so that an evaluation of only the first tokens has the same proportions.
    """
    in_all = min(corpus.val.tokens / share for corpus, share in zip(corpora, shares, strict=True))
    documents: list[tuple[float, np.ndarray]] = []  # where a document's middle is in its split, 0 to 1
    for corpus, share in zip(corpora, shares, strict=True):
        (shard,) = corpus.val.shards
        path = corpus.directory / shard["file"]
        tokens = np.fromfile(path, corpus.manifest.dtype, max(1, round(in_all * share)))
        ends = np.flatnonzero(tokens == corpus.eot_token) + 1
        edges = [0, *ends.tolist()] if len(ends) else [0, len(tokens)]
        documents += [
            ((start + stop) / (2 * edges[-1]), tokens[start:stop]) for start, stop in pairwise(edges)
        ]
    for _, document in sorted(documents, key=lambda each: each[0]):
        yield document
