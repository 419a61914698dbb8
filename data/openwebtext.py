"""OpenWebText, from its parquet files on the Hugging Face Hub at a pinned commit."""

import fnmatch
import math
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from . import DataError, hub
from .files import Need, require_room
from .parts import Part
from .progress import Progress
from .read_parquet import parquet_parts
from .source import Source, limited

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
class OpenWebText(Source):
    """The parquet files of Skylion007/openwebtext at one commit, in order; a row is a document.

    They are kept in the Hub cache and read there: `datasets` would make a 40 GB Arrow copy of them first.
    files: globs that choose some of the 80. limit_documents: only the files that hold them are downloaded.
    """

    kind: ClassVar = "openwebtext"
    files: tuple[str, ...] = ()
    revision: str = OPENWEBTEXT_COMMIT

    def __post_init__(self) -> None:
        if not hub.COMMIT.fullmatch(self.revision):
            raise DataError(
                f"data.revision={self.revision}: it must be a commit of {OPENWEBTEXT}, 40 hexadecimal digits; "
                f"for a branch or tag, use data=hub data.repo={OPENWEBTEXT}"
            )

    @property
    def name(self) -> str:
        count = len(self._names())
        part = "" if count == len(OPENWEBTEXT_FILES) else f"-{count}-files"
        return limited(f"openwebtext{part}", self.limit_documents)

    def state(self) -> str:
        return self.revision

    def expected(self, tokenizer_sha256: str, val_fraction: float) -> dict[str, int] | None:
        whole = self.limit_documents is None and len(self._names()) == len(OPENWEBTEXT_FILES)
        published = (tokenizer_sha256, val_fraction) == (_GPT2_HASH, _OPENWEBTEXT_VAL_FRACTION)
        return _OPENWEBTEXT_COUNTS if whole and published else None

    def fetch(self, progress: Progress, directory: Path) -> None:
        """Download what is missing and check every file against the sha256 that the Hub states for it."""
        hub.remove_unfinished(OPENWEBTEXT)
        names = self._names()
        file_bytes = _OPENWEBTEXT_DOWNLOAD_BYTES // len(OPENWEBTEXT_FILES)
        needed = len(names)
        if self.limit_documents is not None:
            per_file = _OPENWEBTEXT_COUNTS["documents"] / len(OPENWEBTEXT_FILES)
            needed = min(needed, math.ceil(self.limit_documents / per_file))
        missing = sum(not self._is_cached(name) for name in names[:needed])
        if missing:
            tokens = _OPENWEBTEXT_COUNTS["train"] + _OPENWEBTEXT_COUNTS["val"]
            token_bytes = 2 * tokens * needed // len(OPENWEBTEXT_FILES)
            needs = [Need(hub.cache(), missing * file_bytes, "HF_HOME"), Need(directory, token_bytes)]
            require_room(needs, self.name, "parquet, then tokens", progress)
            hub.require_reachable(f"{missing} of {needed} files of {OPENWEBTEXT} at {self.revision}")
        received = _Received(progress, (needed - missing) * file_bytes, needed * file_bytes)
        if self.limit_documents is None:
            with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
                list(pool.map(lambda name: _download(name, self.revision, received), names))
        else:
            downloads = (_download(name, self.revision, received) for name in names)
            self._up_to_limit(downloads, self.limit_documents)
        received.finish()

    def parts(self, step: int) -> list[Part]:
        paths: Iterable[Path] = map(self._local, self._names())
        if self.limit_documents is not None:
            paths = self._up_to_limit(paths, self.limit_documents)
        return [part for path in paths for part in parquet_parts(path, step, "text")]

    def _names(self) -> list[str]:
        if not self.files:
            return list(OPENWEBTEXT_FILES)
        for pattern in self.files:
            if not fnmatch.filter(OPENWEBTEXT_FILES, pattern):
                first, last = OPENWEBTEXT_FILES[0], OPENWEBTEXT_FILES[-1]
                raise DataError(
                    f"data.files={pattern} matches none of the files of {OPENWEBTEXT}, {first} to {last}"
                )
        return [name for name in OPENWEBTEXT_FILES if any(fnmatch.fnmatch(name, each) for each in self.files)]

    def _up_to_limit(self, paths: Iterable[Path], limit: int) -> list[Path]:
        import pyarrow.parquet

        taken, rows = [], 0
        for path in paths:
            taken.append(path)
            rows += pyarrow.parquet.read_metadata(path).num_rows
            if rows >= limit:
                break
        return taken

    def _local(self, name: str) -> Path:
        """Where fetch() has left a file."""
        from huggingface_hub import hf_hub_download

        return Path(
            hf_hub_download(
                OPENWEBTEXT, name, repo_type="dataset", revision=self.revision, local_files_only=True
            )
        )

    def _is_cached(self, name: str) -> bool:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(OPENWEBTEXT, name, revision=self.revision, repo_type="dataset")
        return isinstance(found, str)


def _download(name: str, revision: str, received: "_Received") -> Path:
    """Return the file in the Hub cache, whole: downloaded if it was missing or only partly there."""
    from huggingface_hub import hf_hub_download

    hub.limit_timeouts()
    try:
        path = hf_hub_download(
            OPENWEBTEXT, name, repo_type="dataset", revision=revision, tqdm_class=received.bar_class()
        )
    except Exception as error:
        raise hub.failed(f"{OPENWEBTEXT}/{name}", error, hub.GOES_ON) from error
    if hub.is_damaged(Path(path)):
        hub.remove(Path(path))
        raise hub.arrived_damaged(f"{OPENWEBTEXT}/{name}")
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
