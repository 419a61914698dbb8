"""Any dataset with a text column, on the Hugging Face Hub or in a folder, read through `datasets`."""

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from . import DataError, hub
from .parts import Part, as_text, missing_column
from .progress import Progress, Silence
from .source import Source, limited, state_of


@dataclass(frozen=True)
class HubDataset(Source):
    """Any dataset with a text column, through datasets.load_dataset; a row is a document.

    repo: on the Hub, or a folder of files in any format that `datasets` reads, such as CSV, JSON lines or Arrow.
    streaming: read one file after another, over the network, with no copy on disk. Otherwise `datasets` downloads
    everything it is asked for and keeps an Arrow copy of it. On the Hub a row of a .txt file is a line, as its page
    shows; a folder of .txt files is refused, because text_files reads them whole.
    """

    kind: ClassVar = "hub"
    repo: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str = "text"
    files: tuple[str, ...] = ()
    streaming: bool = False

    def __post_init__(self) -> None:
        if not self.repo:
            raise DataError("hub needs a dataset: data.repo=owner/name, or a folder that `datasets` can load")
        if not self._folder and (self.repo.startswith((".", "/")) or self.repo.count("/") > 1):
            raise DataError(
                f"data.repo={self.repo}: there is no such folder, and a dataset on the Hub is written owner/name"
            )
        if self._folder and self.revision:
            raise DataError(
                f"data.revision={self.revision}: {self.repo} is a local folder, which has no revisions: leave it out"
            )

    @property
    def name(self) -> str:
        name = self._folder.name if self._folder else self.repo
        return limited(re.sub(r"[^\w.-]+", "-", name), self.limit_documents)

    @property
    def arguments(self) -> dict[str, Any]:
        return {**super().arguments, "repo": str(self._folder or self.repo)}

    def state(self) -> str:
        """The commit that the revision names now; for a folder, a hash of its files' names, sizes and times.

        Hidden files count only where `files` names them: `datasets` reads no others, and git, a file manager or a
        download from the Hub rewrite theirs.
        """
        if not self._folder:
            return self._commit
        hidden = any(map(_is_hidden, map(Path, self.files)))
        paths = (
            path
            for path in self._folder.rglob("*")
            if path.is_file() and (hidden or not _is_hidden(path.relative_to(self._folder)))
        )
        return state_of(sorted(paths))

    @cached_property
    def _folder(self) -> Path | None:
        return Path(self.repo).absolute() if os.path.isdir(self.repo) else None

    @cached_property
    def _commit(self) -> str:
        from huggingface_hub import HfApi, constants

        if self.revision and hub.COMMIT.fullmatch(self.revision):
            return self.revision
        if constants.HF_HUB_OFFLINE:
            return hub.remembered_commit(self.repo, self.revision)
        hub.require_reachable(self.repo)
        try:
            info = HfApi().dataset_info(self.repo, revision=self.revision, timeout=hub.TIMEOUT_SECONDS)
            return str(info.sha)
        except Exception as error:  # not there, private, gated, ...: the Hub's own words are the best
            raise hub.refused(self.repo, error) from error

    def fetch(self, progress: Progress, directory: Path) -> None:
        import datasets

        if not self.streaming:
            keeps = "an Arrow copy of it" if self._folder else "the download and an Arrow copy of it"
            less = "" if self._folder else ", and downloads no more than data.limit_documents needs"
            progress.say(
                f"{self.name}: `datasets` keeps {keeps} below {hub.cache().parent}; "
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
        if not self._folder:
            hub.remember_commit(self.repo, self.revision, self._commit)

    @cached_property
    def _dataset(self):
        """The `datasets` object, checked to have the column."""
        from huggingface_hub import constants

        hub.limit_retries()
        if not self._folder and not constants.HF_HUB_OFFLINE:
            hub.require_reachable(self.repo)
            hub.remove_unfinished(self.repo)
        try:
            builder = self._builder()
            if self.streaming:
                dataset = builder.as_streaming_dataset(split=self.split)
            else:
                builder.download_and_prepare()
                dataset = builder.as_dataset(split=self.split)
            self._require_column(dataset.column_names or list(next(iter(dataset))))
        except DataError:
            raise
        except Exception as error:  # a dozen types, and their own messages help most
            self._remove_damaged()
            raise hub.failed(self.repo, error) from error
        if not self.streaming:
            arrow_files = [Path(file["filename"]) for file in dataset.cache_files]
            self._remove_damaged(arrow_files[0].parent if arrow_files else None)
        return dataset.select_columns([self.column])

    def _builder(self):
        """What `datasets` makes of the repository or folder, if it is what was asked for."""
        import datasets

        files = list(self.files) or None
        if self._folder and not files and (self._folder / "state.json").exists():
            raise DataError(
                f"{self.repo} was written by save_to_disk: name its Arrow files, data.files='*.arrow'"
            )
        revision = None if self._folder else self._commit
        load = partial(
            datasets.load_dataset_builder, self.repo, self.config, revision=revision, data_files=files
        )
        builder = load()
        if self._folder and builder.name == "text":
            raise DataError(
                f"{self.repo} holds .txt files, and `datasets` would make each line a document, without its line "
                f"end: use data=text_files {shlex.quote(f'data.files={self._folder}')}"
            )
        # If the Hub refuses or drops a request, `datasets` turns to the newest copy it has, even of another commit.
        if not self._folder and builder.hash != self._commit:
            raise hub.another_commit(self.repo, self._commit, builder.hash)
        if builder.name == "csv":  # pandas would take NA for a missing value, and 007 for 7
            self._require_column(next(iter(builder.as_streaming_dataset(split=self.split)), {}))
            text = datasets.Features({self.column: datasets.Value("string")})
            builder = load(usecols=[self.column], features=text, na_filter=False)
        return builder

    def _require_column(self, names: Iterable[str]) -> None:
        if self.column not in names:
            raise missing_column(self.column, names, f"{self.repo} ({self.split})")

    def _remove_damaged(self, arrow_copy: Path | None = None) -> None:
        """Check what was downloaded; remove damaged files, and the Arrow copy made of them, and say so."""
        if self._folder:
            return
        files = (hub.repo_cache(self.repo) / "snapshots" / self._commit).rglob("*")
        damaged = [path for path in files if path.is_file() and hub.is_damaged(path)]
        for path in damaged:
            hub.remove(path)
        if damaged and arrow_copy:
            shutil.rmtree(arrow_copy)
        if damaged:
            raise hub.arrived_damaged(", ".join(f"{self.repo}/{path.name}" for path in damaged))

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


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


@dataclass(frozen=True)
class HubPart:
    """Some rows of a `datasets` dataset; it pickles as references to files."""

    path: str
    column: str
    dataset: Any
    text_bytes: int

    def pieces(self) -> Iterator[tuple[str, bool]]:
        hub.limit_retries()
        try:
            # as fast as 256 at a time, with which 68 rows of 12 MB took 2.1 GB of memory; now they take 0.9
            for rows in self.dataset.iter(8):
                for text in rows[self.column]:
                    yield as_text(text, self.column, self.path), True
        except DataError:
            raise
        except Exception as error:  # whatever a network, a file system and a file format can raise
            raise hub.failed(self.path, error, hub.GOES_ON) from error
