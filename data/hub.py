"""Corpora of the Hugging Face Hub: OpenWebText from its pinned parquet files, and any dataset with a text column.

Those of the Hub are pinned to a commit before anything is read, and say within seconds when the Hub is out of reach.
"""

import fnmatch
import math
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import DataError
from .corpora import limited, state_of
from .files import require_room, sha256_of, unwritable
from .progress import Progress, Silence
from .readers import Part, as_text, missing_column, parquet_parts

_COMMIT = re.compile("[0-9a-f]{40}")
_SECONDS = 5
_GOES_ON = " (the same command goes on from what is done)"
_DOWNLOADS_AT_ONCE = 4

OPENWEBTEXT = "Skylion007/openwebtext"
OPENWEBTEXT_COMMIT = "79d93d786212f7344586290adb811d4ae6a1762c"
OPENWEBTEXT_FILES = tuple(f"plain_text/train-{index:05d}-of-00080.parquet" for index in range(80))
_OPENWEBTEXT_DOWNLOAD_BYTES = 24_193_092_408
# nanoGPT's counts for the split of val_fraction 0.0005 with GPT-2's tokenizer
_OPENWEBTEXT_COUNTS = {"documents": 8_013_769, "train": 9_035_582_198, "val": 4_434_897}
_OPENWEBTEXT_VAL_FRACTION = 0.0005
_GPT2_HASH = "701d1e8ec4feb249e776a30ce771000e6f6efa186ccf07fa614bd7d2b2701688"


@dataclass(frozen=True)
class OpenWebText:
    """The parquet files of Skylion007/openwebtext at one commit, in order; a row is a document.

    They are kept in the Hub cache and read there: `datasets` would make a 40 GB Arrow copy of them first.
    files: globs that choose some of the 80. limit_documents: only the files that hold them are downloaded.
    """

    files: tuple[str, ...] = ()
    revision: str = OPENWEBTEXT_COMMIT
    limit_documents: int | None = None

    def __post_init__(self) -> None:
        if not _COMMIT.fullmatch(self.revision):
            raise DataError(
                f"data.revision={self.revision}: {OPENWEBTEXT} is read at a commit, 40 hexadecimal digits; "
                f"a branch or tag with data=hub data.repo={OPENWEBTEXT}"
            )

    @property
    def name(self) -> str:
        count = len(self._names())
        part = "" if count == len(OPENWEBTEXT_FILES) else f"-{count}-files"
        return limited(f"openwebtext{part}", self.limit_documents)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"source": "openwebtext", **asdict(self)}

    def state(self) -> str:
        return self.revision

    def expected(self, tokenizer_sha256: str, val_fraction: float) -> dict[str, int] | None:
        whole = self.limit_documents is None and len(self._names()) == len(OPENWEBTEXT_FILES)
        published = (tokenizer_sha256, val_fraction) == (_GPT2_HASH, _OPENWEBTEXT_VAL_FRACTION)
        return _OPENWEBTEXT_COUNTS if whole and published else None

    def fetch(self, progress: Progress, directory: Path) -> None:
        """Download what is missing and check every file against the sha256 that the Hub states for it."""
        names = self._names()
        file_bytes = _OPENWEBTEXT_DOWNLOAD_BYTES // len(OPENWEBTEXT_FILES)
        needed = len(names) if self.limit_documents is None else self._expected_files()
        missing = sum(not self._cached(name) for name in names[:needed])
        if missing:
            tokens = _OPENWEBTEXT_COUNTS["train"] + _OPENWEBTEXT_COUNTS["val"]
            token_bytes = 2 * tokens * needed // len(OPENWEBTEXT_FILES)
            room = {_hub_cache(): missing * file_bytes, directory: token_bytes}
            require_room(room, self.name, "parquet, then tokens", progress)
            require_hub(f"{missing} of {needed} files of {OPENWEBTEXT} at {self.revision}")
        received = _Received(progress, (needed - missing) * file_bytes, needed * file_bytes)
        if self.limit_documents is None:
            with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
                list(pool.map(lambda name: _download(name, self.revision, received), names))
        else:
            self._up_to_limit(_download(name, self.revision, received) for name in names)
        received.finish()

    def parts(self, step: int) -> list[Part]:
        paths = (self._cached(name) for name in self._names())
        if self.limit_documents is not None:
            paths = self._up_to_limit(paths)
        return [part for path in paths for part in parquet_parts(path, step, "text")]

    def _names(self) -> list[str]:
        if not self.files:
            return list(OPENWEBTEXT_FILES)
        names = [
            name for name in OPENWEBTEXT_FILES if any(fnmatch.fnmatch(name, glob) for glob in self.files)
        ]
        if not names:
            first, last = OPENWEBTEXT_FILES[0], OPENWEBTEXT_FILES[-1]
            raise DataError(
                f"data.files={','.join(self.files)} matches none of the files of {OPENWEBTEXT}, {first} to {last}"
            )
        return names

    def _expected_files(self) -> int:
        documents_per_file = _OPENWEBTEXT_COUNTS["documents"] / len(OPENWEBTEXT_FILES)
        return min(len(self._names()), math.ceil(self.limit_documents / documents_per_file))

    def _up_to_limit(self, paths: Iterable[Path]) -> list[Path]:
        import pyarrow.parquet

        taken, rows = [], 0
        for path in paths:
            taken.append(path)
            rows += pyarrow.parquet.read_metadata(path).num_rows
            if rows >= self.limit_documents:
                break
        return taken

    def _cached(self, name: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(OPENWEBTEXT, name, revision=self.revision, repo_type="dataset")
        return Path(found) if isinstance(found, str) else None


@dataclass(frozen=True)
class HubDataset:
    """Any dataset with a text column, through datasets.load_dataset; a row is a document.

    repo: on the Hub, or a folder of files in any format that `datasets` reads, CSV, JSON lines or Arrow say.
    streaming: read one file after another, over the network, with no copy on disk. Otherwise `datasets` downloads
    everything it is asked for and keeps an Arrow copy of it.
    """

    repo: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str = "text"
    files: tuple[str, ...] = ()
    streaming: bool = False
    limit_documents: int | None = None

    @property
    def name(self) -> str:
        name = self._folder.name if self._folder else self.repo
        return limited(re.sub(r"[^\w.-]+", "-", name), self.limit_documents)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"source": "hub", **asdict(self), "repo": str(self._folder or self.repo)}

    def expected(self, tokenizer_sha256: str, val_fraction: float) -> None:
        """Nothing is published of it."""

    def state(self) -> str:
        """The commit that the revision names now; of a folder a hash of its files' names, sizes and times."""
        if self._folder:
            return state_of(sorted(path for path in self._folder.rglob("*") if path.is_file()))
        return self._commit

    @cached_property
    def _folder(self) -> Path | None:
        return Path(self.repo).absolute() if os.path.isdir(self.repo) else None

    @cached_property
    def _commit(self) -> str:
        from huggingface_hub import HfApi, constants

        if self.revision and _COMMIT.fullmatch(self.revision):
            return self.revision
        if constants.HF_HUB_OFFLINE:
            snapshots = sorted(
                _repo_cache(self.repo).glob("snapshots/*"), key=lambda path: path.stat().st_mtime
            )
            if not snapshots or self.revision:
                raise offline(f"{self.repo} at {self.revision or 'any commit'}")
            return snapshots[-1].name
        require_hub(self.repo)
        try:
            return HfApi().dataset_info(self.repo, revision=self.revision, timeout=_SECONDS).sha
        except Exception as error:  # not there, private, gated, ...: the Hub's own words are the best
            raise _refused(self.repo, error) from error

    def fetch(self, progress: Progress, directory: Path) -> None:
        import datasets

        if not self.streaming:
            keeps = "an Arrow copy of it" if self._folder else "the download and an Arrow copy of it"
            less = "" if self._folder else ", and downloads no more than data.limit_documents needs"
            progress.say(
                f"{self.name}: `datasets` keeps {keeps} below {_hub_cache().parent}; "
                f"data.streaming=true keeps none{less}"
            )
        bars = datasets.is_progress_bar_enabled()
        if isinstance(progress, Silence):
            datasets.disable_progress_bars()
        try:
            self._dataset  # noqa: B018
        finally:
            if bars:
                datasets.enable_progress_bars()

    @cached_property
    def _dataset(self):
        """The `datasets` object, checked to have the column."""
        from datasets import load_dataset
        from huggingface_hub import constants

        _limit_retries()
        if not self._folder and not constants.HF_HUB_OFFLINE:
            require_hub(self.repo)
        try:
            dataset = load_dataset(
                self.repo,
                self.config,
                split=self.split,
                revision=None if self._folder else self._commit,
                data_files=list(self.files) or None,
                streaming=self.streaming,
            )
            names = dataset.column_names or list(next(iter(dataset)))
        except Exception as error:  # a dozen kinds, and what they say is what helps
            self._remove_damaged()
            raise _failed(self.repo, error) from error
        if not self.streaming:
            arrow_files = [Path(file["filename"]) for file in dataset.cache_files]
            self._remove_damaged(arrow_files[0].parent if arrow_files else None)
        if self.column not in names:
            raise missing_column(self.column, names, f"{self.repo} ({self.split})")
        return dataset.select_columns([self.column])

    def _remove_damaged(self, arrow_copy: Path | None = None) -> None:
        """Check what was downloaded; remove damaged files, and the Arrow copy made of them, and say so."""
        if self._folder:
            return
        files = (_repo_cache(self.repo) / "snapshots" / self._commit).rglob("*")
        damaged = [path for path in files if path.is_file() and _damaged(path)]
        for path in damaged:
            _remove(path)
        if damaged and arrow_copy:
            shutil.rmtree(arrow_copy)
        if damaged:
            raise arrived_damaged(", ".join(f"{self.repo}/{path.name}" for path in damaged))

    def parts(self, step: int) -> list[Part]:
        dataset = self._dataset
        if self.streaming:
            count = dataset.num_shards
            # each is a unit of its own, whatever it holds: a file can only be streamed from its start
            size = max(step, (dataset.info.dataset_size or 0) // count)
            return [
                HubPart(self.repo, self.column, dataset.shard(count, index), size) for index in range(count)
            ]
        count = max(1, min(len(dataset), dataset.data.nbytes // step))
        edges = [len(dataset) * index // count for index in range(count + 1)]
        rows = (dataset.select(range(start, stop)) for start, stop in pairwise(edges))
        return [HubPart(self.repo, self.column, part, dataset.data.nbytes // count) for part in rows]


@dataclass(frozen=True)
class HubPart:
    """Some rows of a `datasets` dataset; it pickles as references to files."""

    path: str
    column: str
    dataset: Any
    text_bytes: int

    def pieces(self) -> Iterator[tuple[str, bool]]:
        _limit_retries()
        try:
            for rows in self.dataset.iter(256):
                for text in rows[self.column]:
                    yield as_text(text, self.column, self.path), True
        except DataError:
            raise
        except Exception as error:  # whatever a network, a file system and a file format can raise
            raise _failed(self.path, error, _GOES_ON) from error


def _limit_patience() -> None:
    """Have every request to the Hub wait no longer than this for an answer, unless the user says how long.

    huggingface_hub waits 60 s in each of its last six tries for the headers of a file: six minutes of a mute network.
    """
    from huggingface_hub import get_session

    hooks = get_session().event_hooks["request"]
    if _in_a_hurry not in hooks:
        hooks.append(_in_a_hurry)


def _in_a_hurry(request: Any) -> None:
    longest = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", _SECONDS))
    timeouts = request.extensions["timeout"]
    for phase in ("connect", "read"):
        timeouts[phase] = min(timeouts[phase] or longest, longest)


def _limit_retries() -> None:
    """Have a stream give up a refused connection after 25 s and a mute one after a minute (both measured).

    That is huggingface_hub's own patience, six tries and 23 s of pauses; `datasets` would begin it again up to 20
    times, nine minutes where connections are refused. What is finished stays when this gives up.
    """
    import datasets

    _limit_patience()
    for kind in ("READ", "OPEN"):
        setattr(datasets.config, f"STREAMING_{kind}_MAX_RETRIES", 1)
        setattr(datasets.config, f"STREAMING_{kind}_RETRY_INTERVAL", 0)


def require_hub(what: str, remedy: str = "") -> None:
    """Fail within seconds if the Hub cannot be reached; its clients would retry for half a minute or more."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        raise offline(what)
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # the HTTP library behind it is an implementation detail of huggingface_hub
        raise DataError(
            f"{what} cannot be had: no answer from {constants.ENDPOINT} ({type(error).__name__}): check the network, "
            f"or name a mirror in HF_ENDPOINT; what the Hub cache has already is used with HF_HUB_OFFLINE=1{remedy}"
        ) from None


def offline(what: str) -> DataError:
    return DataError(
        f"{what} not in the Hub cache {_hub_cache()}, and HF_HUB_OFFLINE is set: unset it, or set HF_HOME to a cache "
        "that has them"
    )


def arrived_damaged(what: str) -> DataError:
    return DataError(
        f"{what} arrived damaged (its sha256 is not the one the Hub states) and has been removed: "
        "the same command downloads it again"
    )


def _damaged(path: Path) -> bool:
    """The cache names large files after the sha256 that the Hub states for them."""
    blob = path.resolve()
    return bool(re.fullmatch("[0-9a-f]{64}", blob.name)) and sha256_of(blob) != blob.name


def _remove(path: Path) -> None:
    path.resolve().unlink()
    path.unlink()


def _refused(what: str, error: BaseException, remedy: str = "") -> DataError:
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__:  # itself it says nothing
        error = error.__cause__
    message = " ".join(str(error).split())
    return DataError(f"{what} cannot be read: {type(error).__name__}: {message}{remedy}")


def _failed(what: str, error: BaseException, remedy: str = "") -> DataError:
    """Return the error of something that the network may be to blame for."""
    from huggingface_hub import constants

    try:
        if not os.path.isdir(what) and not constants.HF_HUB_OFFLINE:
            require_hub(what, remedy)
    except DataError as unreachable:
        return unreachable
    return _refused(what, error, remedy)


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _repo_cache(repo: str) -> Path:
    return _hub_cache() / f"datasets--{repo.replace('/', '--')}"


def _download(name: str, revision: str, received: "_Received") -> Path:
    """Return the file in the Hub cache, downloaded if it was not there (or in part), and whole."""
    from huggingface_hub import hf_hub_download

    _limit_patience()
    try:
        path = hf_hub_download(
            OPENWEBTEXT,
            name,
            repo_type="dataset",
            revision=revision,
            tqdm_class=received.bar_class(),
        )
    except OSError as error:
        if error.errno is not None:
            raise unwritable(_hub_cache(), error, "HF_HOME") from None
        raise _failed(f"{OPENWEBTEXT}/{name}", error, _GOES_ON) from error
    except Exception as error:
        raise _failed(f"{OPENWEBTEXT}/{name}", error, _GOES_ON) from error
    if _damaged(Path(path)):
        _remove(Path(path))
        raise arrived_damaged(f"{OPENWEBTEXT}/{name}")
    return Path(path)


class _Received:
    """Adds up what the download threads receive."""

    def __init__(self, progress: Progress, done: int, total: int):
        self._progress, self._done, self._total = progress, done, total
        self._lock = threading.Lock()

    def add(self, count: float) -> None:
        with self._lock:
            # files differ a little in size from the average that the total is made of
            self._done = min(self._done + int(count), self._total - 1)
            self._progress.advance("downloading", self._done, self._total)

    def finish(self) -> None:
        self._progress.advance("downloading", self._total, self._total)

    def bar_class(self) -> type:
        """Return a tqdm class for hf_hub_download that shows nothing itself."""
        from tqdm.std import tqdm

        received = self

        class Bar(tqdm):
            def __init__(self, *args, **options):
                super().__init__(*args, **{**options, "disable": True})

            def update(self, n: float = 1) -> None:
                received.add(n)

        return Bar
