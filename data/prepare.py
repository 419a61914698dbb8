"""Make a corpus ready: documents -> tokens -> shards and a manifest, in parallel, resumable after any kill.

The folder is named after a hash of everything that decides the tokens, so another limit, tokenizer or state of
the source is another folder, and what is found in a folder is always part of the same result (workshop.py). Two steps
take every unit of the text to its training shard: tokenise.py, and, once the number of documents is known, split.py.
"""

import multiprocessing
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import DataError
from .corpora import Mix
from .files import Need, make_folder, readable, require_room
from .loader import Corpus, open_corpus
from .manifest import MANIFEST_FILE, Manifest, folder_hash
from .mix import open_mix
from .parts import Part
from .progress import Progress, Silence
from .source import Source, Unfit, too_few
from .split import split_order, split_unit, write_val_shard
from .tokenise import measure, tokenise_unit
from .tokenizer import findable, load_encoder, load_tokenizer, tokenizer_hash
from .workers import Workers, cpu_count
from .workshop import Workshop, lock

# Small enough that a kill loses a second's work and the workers finish together; OpenWebText is 4,800 such files.
SHARD_BYTES = 8 << 20
# A process takes as long to start as to tokenise about this much.
WORTH_A_PROCESS = 16 << 20
# nanoGPT's and flash-attention's seed for OpenWebText; every corpus is split by the same rule
SPLIT_SEED = 2357
VAL_FRACTION = 0.01


@readable()
def prepare(
    source: Source | Mix,
    tokenizer: str,
    cache_root: str | Path,
    *,
    val_fraction: float = VAL_FRACTION,
    workers: int | None = None,
    progress: Progress | None = None,
    give_way: float = 0,
) -> Corpus:
    """Return the prepared corpus of `source` (see make_corpus), made now unless it is there already.

    tokenizer: see load_tokenizer. cache_root: the folder that the corpus folder is made in. val_fraction: fraction of
    the documents held out, at least one (of a mix: see mix.py). workers: tokenising processes, None for one per core;
    they change nothing in the result. progress: where to report it, None for nowhere. give_way: seconds to wait for
    another process to make the corpus before this one starts to.

    May be called by several processes at once: one works, the others wait for it. Raises DataError for whatever
    the user can put right.
    """
    progress = progress or Silence()
    if not 0 < val_fraction < 1:
        raise DataError(f"data.val_fraction={val_fraction}: it must be between 0 and 1, for example 0.01")
    if workers is not None and workers < 1:
        raise DataError(f"data.workers={workers}: it must be at least 1, or null for one process per core")
    if isinstance(source, Mix):
        if val_fraction != VAL_FRACTION:
            raise DataError("data.val_fraction does not apply to a mix: its corpora have been split")
        return open_mix(source, tokenizer, cache_root, progress)
    tokenizer = findable(tokenizer)  # for the manifest: inspection or repair may run in another folder
    encoding = load_tokenizer(tokenizer)
    settings: dict[str, Any] = {
        "source": source.arguments,
        "state": source.state(),
        "shard_bytes": SHARD_BYTES,
        "val_fraction": val_fraction,
        "split_seed": SPLIT_SEED,
    }
    name = folder_hash(tokenizer=tokenizer_hash(encoding), **settings)
    directory = Path(cache_root).expanduser().absolute() / f"{source.name}-{name}"
    # uint16 while every token id fits; little-endian on any machine
    workshop = Workshop(directory, tokenizer, "<u2" if encoding.n_vocab <= 1 << 16 else "<u4")
    manifest_file = directory / MANIFEST_FILE
    if manifest_file.exists() and not workshop.partial.exists():
        return open_corpus(directory)
    _require_main_guard()
    until = time.monotonic() + give_way
    while time.monotonic() < until and not manifest_file.exists():
        time.sleep(0.05)
    with lock(directory, progress):
        if not manifest_file.exists():  # finished meanwhile, or killed before it tidied up
            # readable() is inside, as its DataError decides what is kept
            with _resumable(workshop), readable():
                facts = _make(source, workshop, val_fraction, workers or cpu_count(), progress)
                if source.state() != settings["state"]:
                    raise Unfit(
                        f"the files of {source.name} changed while they were read: prepare them again when nothing "
                        "writes there (data.cache_dir must lie outside data.repo)"
                    )
            about = {
                "name": tokenizer,
                "sha256": tokenizer_hash(encoding),
                "n_vocab": encoding.n_vocab,
                "eot_token": encoding.eot_token,
            }
            manifest = Manifest(source.name, tokenizer=about, dtype=workshop.dtype, **settings, **facts)
            _check_expected(source, manifest)
            manifest.write(directory, workshop.partial)
        shutil.rmtree(workshop.partial, ignore_errors=True)
    return open_corpus(directory)


def _require_main_guard() -> None:
    """A worker imports the script that started it, anew and as a whole: it would wait here for its own parent."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise DataError(
            "a script that prepares a corpus needs `if __name__ == '__main__':` around its main code"
        )


@contextmanager
def _resumable(workshop: Workshop) -> Iterator[None]:
    """Keep of unfinished work what a later preparation can go on from; nothing if the text makes no corpus."""
    make_folder(workshop.partial)
    workshop.remove_half_written()  # by processes that were killed: gigabytes, of large units
    try:
        yield
    except DataError as error:
        if isinstance(error, Unfit) or not any(workshop.partial.glob("*.json")):
            shutil.rmtree(workshop.directory, ignore_errors=True)
        raise
    finally:
        workshop.remove_half_written()


def _make(
    source: Source, workshop: Workshop, val_fraction: float, workers: int, progress: Progress
) -> dict[str, Any]:
    """Fetch the text and write all shards; return the counts and shards of the manifest."""
    source.fetch(progress, workshop.directory)
    units = group(source.parts(SHARD_BYTES), SHARD_BYTES)
    if not units:
        raise too_few(source.name, 0)
    sizes = [sum(part.text_bytes for part in unit) for unit in units]
    if source.limit_documents is not None and source.arguments.get("streaming"):
        workers = 1  # several would work ahead of the limit, and download files that it does not need
    workers = min(workers, 1 + sum(sizes) // WORTH_A_PROCESS)
    with Workers(workers, first=partial(load_encoder, workshop.tokenizer)) as processes:
        # meanwhile the processes start: 0.2 s less, of 9 for 250 MB with two
        expected = _check_room(source, units[0], sum(sizes), workshop, progress)
        # A unit that the limit ends in or before counts with what is read of it; with 1 byte if more is read than the
        # first documents let expect, so that the bar ends with the last.
        sizes = np.maximum(np.diff(np.minimum(np.cumsum(sizes), expected), prepend=0), 1).tolist()
        results = partial(_results, sizes=sizes, workers=processes, progress=progress)
        counts = _tokenise(workshop, units, source.limit_documents, results)
        documents = min(sum(counts), source.limit_documents or sum(counts))
        order = _validation_documents(source.name, documents, val_fraction)
        records = _split(workshop, counts, documents, order, results)
    shards = [record["shard"] for record in records if "shard" in record]
    shards.append(write_val_shard(workshop, records, order))
    if not shards[-1]["utf8_bytes"]:
        raise Unfit(
            f"no validation document of {source.name} has any text ({len(order)} of {documents} documents held out): "
            "hold out more, with a larger data.val_fraction"
        )
    return {"shards": shards, **Manifest.counts(shards)}


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


def _tokenise(
    workshop: Workshop,
    units: list[list[Part]],
    limit: int | None,
    results: Callable[..., Generator[int, None, None]],
) -> list[int]:
    """Tokenise every unit; return the documents of each, up to the unit that reaches the limit."""
    staged = [workshop.staged_documents(unit) for unit in range(len(units))]
    jobs = [(workshop, unit, units[unit], limit) for unit in range(len(units))]
    counts: list[int] = []
    with closing(results("tokenising", tokenise_unit, jobs, staged)) as found:
        for documents in found:
            counts.append(documents)
            if limit is not None and sum(counts) >= limit:
                break
    return counts


def _validation_documents(name: str, documents: int, val_fraction: float) -> np.ndarray:
    if documents < 2:
        raise too_few(name, documents)
    order = split_order(documents, val_fraction, SPLIT_SEED)
    if len(order) == documents:
        raise Unfit(
            f"data.val_fraction={val_fraction} of {documents} documents leaves none to train on: use a smaller one"
        )
    return order


def _split(
    workshop: Workshop,
    counts: list[int],
    documents: int,
    order: np.ndarray,
    results: Callable[..., Iterable[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Split every unit; return the records of all."""
    firsts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    val_documents = np.sort(order)
    jobs = []
    for unit in range(len(counts)):
        # the last document can begin in this unit and end in the next
        low, high = np.searchsorted(val_documents, [firsts[unit], firsts[unit + 1] + 1])
        jobs.append((workshop, unit, firsts[unit], documents, val_documents[low:high]))
    return list(
        results("splitting", split_unit, jobs, [workshop.split_record(unit) for unit in range(len(counts))])
    )


def _results(
    stage: str,
    step: Callable[..., Any],
    jobs: list[tuple],
    known: list[Any],
    *,
    sizes: list[int],
    workers: Workers,
    progress: Progress,
) -> Generator[Any, None, None]:
    """Yield the result of every job, in order: known from an earlier preparation, or (None) made now."""
    sizes = sizes[: len(jobs)]
    done = sum(size for size, result in zip(sizes, known, strict=True) if result is not None)
    progress.advance(stage, done, sum(sizes))
    todo = (job for job, result in zip(jobs, known, strict=True) if result is None)
    try:
        with closing(workers.run(step, todo)) as made:
            for size, result in zip(sizes, known, strict=True):
                if result is None:
                    result = next(made)
                    done += size
                    progress.advance(stage, done, sum(sizes))
                yield result
    except GeneratorExit:  # the rest is not needed
        progress.advance(stage, sum(sizes), sum(sizes))


def _check_room(
    source: Source, first_unit: list[Part], text_bytes: int, workshop: Workshop, progress: Progress
) -> int:
    """Say how much the tokens will take, and refuse now rather than hours from now if that does not fit.

    Returns the bytes of text that will be read: with a limit, as many as the first documents let expect.
    """
    per_byte, bytes_per_document = measure(first_unit, workshop)
    if source.limit_documents is not None:
        text_bytes = min(text_bytes, int(source.limit_documents * bytes_per_document))
    written = sum(file.stat().st_size for file in workshop.directory.rglob("*") if file.is_file())
    size = int(text_bytes * per_byte * np.dtype(workshop.dtype).itemsize * 1.05)
    require_room([Need(workshop.directory, max(0, size - written))], source.name, "tokens", progress)
    return text_bytes


def _check_expected(source: Source, manifest: Manifest) -> None:
    """Compare with the published counts of the corpus, where it has some."""
    expected = source.expected(manifest.tokenizer["sha256"], manifest.val_fraction)
    counts = {"documents": sum(manifest.documents.values()), **manifest.tokens}
    if expected and counts != expected:
        raise DataError(
            f"{source.name} has {counts}, but the published counts are {expected}: a source file is not the "
            f"pinned one; delete {source.name}'s files from the Hub cache and the corpus folder, and prepare it again"
        )
