"""Make a corpus ready: documents -> tokens -> shards and a manifest, in parallel, resumable after any kill.

The folder is named after a hash of everything that decides the tokens, so another limit, tokenizer or state of
the source is another folder, and what is found in a folder is always part of the same result.
"""

import multiprocessing
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from . import DataError
from .corpora import Source, Unfit, too_few
from .files import Need, make_folder, readable, require_room, unwritable
from .loader import Corpus, open_corpus
from .manifest import MANIFEST_FILE, Manifest, folder_hash
from .progress import Progress, Silence
from .readers import Part
from .shards import (
    Workshop,
    dtype_for,
    group,
    measure,
    split_order,
    split_result,
    split_unit,
    staged_documents,
    tokenise_unit,
    write_val_shard,
)
from .tokenizer import findable, load_encoder, load_tokenizer, tokenizer_hash
from .workers import Workers, cpu_count

# Small enough that a kill loses a second's work and the workers finish together; OpenWebText is 4,800 such files.
SHARD_BYTES = 8 << 20
# A process takes as long to start as to tokenise about this much.
WORTH_A_PROCESS = 16 << 20
# nanoGPT's and flash-attention's seed for OpenWebText; every corpus is split by the same rule
SPLIT_SEED = 2357


@readable()
def prepare(
    source: Source,
    tokenizer: str,
    cache_root: str | Path,
    *,
    val_fraction: float = 0.01,
    workers: int | None = None,
    progress: Progress | None = None,
    give_way: float = 0,
) -> Corpus:
    """Return the prepared corpus of `source` (see make_corpus), made now unless it is there already.

    tokenizer: see load_tokenizer. cache_root: the folder that the corpus folder is made in. val_fraction: fraction of
    the documents held out, at least one. workers: tokenising processes, None for one per core; they change
    nothing in the result. progress: where to report it, None for nowhere. give_way: seconds to wait for another
    process to make the corpus before this one starts to.

    May be called by several processes at once: one works, the others wait for it. Raises DataError for whatever
    the user can put right.
    """
    progress = progress or Silence()
    if not 0 < val_fraction < 1:
        raise DataError(f"data.val_fraction={val_fraction}: it must be between 0 and 1, for example 0.01")
    if workers is not None and workers < 1:
        raise DataError(f"data.workers={workers}: it must be at least 1, or null for one process per core")
    tokenizer = findable(tokenizer)  # for the manifest: inspection or repair may run in another folder
    encoding = load_tokenizer(tokenizer)
    state = source.state()
    settings = {
        "source": source.arguments,
        "state": state,
        "shard_bytes": SHARD_BYTES,
        "val_fraction": val_fraction,
        "split_seed": SPLIT_SEED,
    }
    name = folder_hash(tokenizer=tokenizer_hash(encoding), **settings)
    directory = Path(cache_root).expanduser().absolute() / f"{source.name}-{name}"
    workshop = Workshop(directory, tokenizer, dtype_for(encoding))
    if (directory / MANIFEST_FILE).exists() and not workshop.partial.exists():
        return open_corpus(directory)

    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A worker imports the script that started it, anew and as a whole: it would wait here for its own parent.
        raise DataError(
            "a script that prepares a corpus needs `if __name__ == '__main__':` around its main code"
        )
    until = time.monotonic() + give_way
    while time.monotonic() < until and not (directory / MANIFEST_FILE).exists():
        time.sleep(0.05)
    with lock(directory, progress):
        if not (directory / MANIFEST_FILE).exists():  # finished meanwhile, or killed before it tidied up
            # readable() is inside, as its DataError decides what is kept
            with _resumable(workshop), readable():
                facts = _make(source, workshop, val_fraction, workers or cpu_count(), progress)
                if source.state() != state:
                    raise Unfit(
                        f"the files of {source.name} changed while they were read: prepare them again when nothing "
                        "writes there (data.cache_dir must lie outside data.repo)"
                    )
            manifest = Manifest(
                name=source.name,
                tokenizer={
                    "name": tokenizer,
                    "sha256": tokenizer_hash(encoding),
                    "n_vocab": encoding.n_vocab,
                    "eot_token": encoding.eot_token,
                },
                dtype=workshop.dtype,
                **settings,
                **facts,
            )
            _check_expected(source, manifest, val_fraction)
            manifest.write(directory, workshop.partial)
        shutil.rmtree(workshop.partial, ignore_errors=True)
    return open_corpus(directory)


@contextmanager
def _resumable(workshop: Workshop) -> Iterator[None]:
    """Keep of unfinished work what a later preparation can go on from; nothing, where the text makes no corpus."""
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
        raise DataError(f"{source.name} holds no text")
    text_bytes = sum(part.text_bytes for unit in units for part in unit)
    if source.limit_documents is not None and source.arguments.get("streaming"):
        workers = 1  # several work ahead of the limit, and would download files that it does not need
    workers = min(workers, 1 + text_bytes // WORTH_A_PROCESS)
    with Workers(workers, first=partial(load_encoder, workshop.tokenizer)) as processes:
        # behind it the processes start: 0.2 s less, of 9 for 250 MB with two
        _check_room(source, units, workshop, progress)
        return _make_shards(source, units, workshop, val_fraction, processes, progress)


def _make_shards(
    source: Source,
    units: list[list[Part]],
    workshop: Workshop,
    val_fraction: float,
    workers: Workers,
    progress: Progress,
) -> dict[str, Any]:
    """Do both steps of shards.py for every unit; refuse what makes no corpus as soon as its counts are known."""
    counts = _tokenise(units, workshop, source.limit_documents, workers, progress)
    documents = sum(counts)
    if source.limit_documents is not None:
        documents = min(documents, source.limit_documents)
    if documents < 2:
        raise too_few(source.name, documents)
    order = split_order(documents, val_fraction, SPLIT_SEED)
    if len(order) == documents:
        raise Unfit(
            f"data.val_fraction={val_fraction} of {documents} documents leaves none to train on: use a smaller one"
        )
    records = _split(units, counts, workshop, documents, order, workers, progress)
    shards = [record["shard"] for record in records if "shard" in record]
    shards.append(write_val_shard(workshop, records, order))
    if sum(shard["tokens"] for shard in shards) == documents:
        raise Unfit(f"the {documents} documents of {source.name} are all empty")
    if not shards[-1]["utf8_bytes"]:
        raise Unfit(
            f"no validation document of {source.name} has any text ({len(order)} held out): "
            "hold out more, with a larger data.val_fraction"
        )
    facts: dict[str, Any] = {"shards": shards}
    for key in ("documents", "tokens", "utf8_bytes"):
        facts[key] = {split: sum(s[key] for s in shards if s["split"] == split) for split in ("train", "val")}
    return facts


def _tokenise(
    units: list[list[Part]], workshop: Workshop, limit: int | None, workers: Workers, progress: Progress
) -> list[int]:
    """Stage every unit not yet staged; return the documents of each, up to the unit that reaches the limit."""
    staged = [staged_documents(workshop, unit) for unit in range(len(units))]
    todo = [unit for unit, documents in enumerate(staged) if documents is None]
    jobs = ((workshop, unit, units[unit], limit) for unit in todo)
    with closing(workers.run(tokenise_unit, jobs)) as results:
        report = _Report("tokenising", units, todo, progress)
        counts: list[int] = []
        for unit, documents in enumerate(staged):
            counts.append(next(results) if documents is None else documents)
            if documents is None:
                report.finished(unit)
            if limit is not None and sum(counts) >= limit:
                report.skip_rest()
                break
    return counts


def _split(
    units: list[list[Part]],
    counts: list[int],
    workshop: Workshop,
    documents: int,
    order: np.ndarray,
    workers: Workers,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Split every unit not yet split; return the records of all."""
    records = [split_result(workshop, unit) for unit in range(len(counts))]
    todo = [unit for unit, record in enumerate(records) if record is None]
    firsts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    val_documents = np.sort(order)
    jobs = []
    for unit in todo:
        # the last document can begin in this unit and end in the next
        low, high = np.searchsorted(val_documents, [firsts[unit], firsts[unit + 1] + 1])
        jobs.append((workshop, unit, firsts[unit], documents, val_documents[low:high]))
    with closing(workers.run(split_unit, jobs)) as results:
        report = _Report("splitting", units[: len(counts)], todo, progress)
        for unit, record in zip(todo, results, strict=True):
            records[unit] = record
            report.finished(unit)
    return records


class _Report:
    """Reports finished units to Progress, in bytes of text."""

    def __init__(self, stage: str, units: list[list[Part]], todo: list[int], progress: Progress):
        self._stage, self._progress = stage, progress
        self._sizes = [sum(part.text_bytes for part in unit) for unit in units]
        self._total = sum(self._sizes)
        self._done = self._total - sum(self._sizes[unit] for unit in todo)
        self._show()

    def finished(self, unit: int) -> None:
        self._done += self._sizes[unit]
        self._show()

    def skip_rest(self) -> None:
        self._done = self._total
        self._show()

    def _show(self) -> None:
        self._progress.advance(self._stage, self._done, self._total)


def _check_room(source: Source, units: list[list[Part]], workshop: Workshop, progress: Progress) -> None:
    """Say how much the tokens will take, and refuse now rather than hours from now if that does not fit."""
    text_bytes = sum(part.text_bytes for unit in units for part in unit)
    per_byte, bytes_per_document = measure(units[0], workshop)
    if source.limit_documents is not None:
        text_bytes = min(text_bytes, int(source.limit_documents * bytes_per_document))
    written = sum(file.stat().st_size for file in workshop.directory.rglob("*") if file.is_file())
    size = int(text_bytes * per_byte * np.dtype(workshop.dtype).itemsize * 1.05)
    require_room([Need(workshop.directory, max(0, size - written))], source.name, "tokens", progress)


def _check_expected(source: Source, manifest: Manifest, val_fraction: float) -> None:
    """Compare with the published counts of the corpus, where it has some."""
    expected = source.expected(manifest.tokenizer["sha256"], val_fraction)
    counts = {"documents": sum(manifest.documents.values()), **manifest.tokens}
    if expected and counts != expected:
        raise DataError(
            f"{source.name} has {counts}, but the published counts are {expected}: a source file is not the "
            f"pinned one; delete {source.name}'s files from the Hub cache and the corpus folder, and prepare it again"
        )


@contextmanager
def lock(directory: Path, progress: Progress) -> Iterator[None]:
    """Let one process at a time make a corpus. The system lets go of the lock when its holder dies."""
    held = FileLock(directory / ".lock")
    try:
        while not held.is_locked:
            make_folder(directory)
            with suppress(FileNotFoundError):  # its holder failed, and removed the folder
                try:
                    held.acquire(timeout=0)
                except Timeout:
                    progress.say(f"another process is preparing {directory}: waiting for it")
                    held.acquire()
    except OSError as error:
        raise unwritable(directory, error) from None
    try:
        yield
    finally:
        held.release()
