"""The manifest of a prepared corpus: what it was made from, what is in it, and the hash of every shard.

It is written last. A folder without one is unfinished work, whatever else lies in it.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import DataError
from .files import flush_to_disk, written_whole

VERSION = 2
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """Counts are per split ("train", "val"); `utf8_bytes` leaves the end-of-text tokens out."""

    name: str
    source: dict[str, Any]  # the arguments of make_corpus
    state: str  # which state of the source: a commit, or a hash of file names, sizes and times
    tokenizer: dict[str, Any]  # name, sha256, n_vocab, eot_token
    dtype: str
    shard_bytes: int  # of text; what cuts the corpus into shards
    val_fraction: float
    split_seed: int
    documents: dict[str, int]
    tokens: dict[str, int]
    utf8_bytes: dict[str, int]
    # file, split, documents, tokens, utf8_bytes, sha256; first_document where train
    shards: list[dict[str, Any]]
    version: int = VERSION
    # Of a mixture (mix.py): the name, training tokens and share of each corpus, in the order of the training shards,
    # whose files are in other folders.
    mix: list[dict[str, Any]] | None = None

    @staticmethod
    def counts(shards: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields `documents`, `tokens` and `utf8_bytes`."""
        return {
            key: {name: sum(s[key] for s in shards if s["split"] == name) for name in ("train", "val")}
            for key in ("documents", "tokens", "utf8_bytes")
        }

    @property
    def fingerprint(self) -> str:
        """The same for corpora of the same tokens, wherever and from whichever files they were made.

        It follows from the tokenizer, the splits and the hashes of the shards, in order, and the shares of a mixture;
        not from names and times.
        """
        tokens = {
            "tokenizer": self.tokenizer["sha256"],
            "dtype": self.dtype,
            "shards": [(shard["split"], shard["sha256"]) for shard in self.shards],
        }
        shares = {"shares": [each["share"] for each in self.mix]} if self.mix else {}
        return _digest(tokens | shares)[:16]

    def write(self, directory: Path, scratch: Path) -> None:
        """Flush the shards that it lists to the disk, then write it."""
        flush_to_disk(directory / shard["file"] for shard in self.shards)
        with written_whole(directory / MANIFEST_FILE, scratch) as file:
            content = asdict(self)
            if self.mix is None:  # so that older code can read it
                del content["mix"]
            file.write((json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())


def read_manifest(directory: Path) -> Manifest:
    """Raises DataError when there is none, or not one that this code can read."""
    path = directory / MANIFEST_FILE
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"{directory} holds no finished corpus ({MANIFEST_FILE}: {error.strerror}): name another folder; or, if "
            "it was being prepared, prepare it again, which continues from what is done"
        ) from None
    except ValueError:
        content = {}
    version = content.get("version", VERSION)
    if version != VERSION:
        raise DataError(
            f"{path} has version {version}, but this code reads version {VERSION}: "
            f"delete {directory} and prepare it again, or use the code that wrote it"
        )
    # Without it, of 1,500 manifests with one bit wrong 11 were accepted with other counts, and 109 failed later.
    if content.pop("sha256", None) != _digest(content):
        raise DataError(f"{path} is damaged: delete {directory} and prepare it again")
    return Manifest(**content)


def corpus_folder(path: Path) -> Path:
    """Return the corpus folder that `path` is, or that the run there was trained on."""
    named = path / "corpus"
    if not (path / MANIFEST_FILE).exists() and named.is_file():
        return Path(named.read_text(encoding="utf-8").strip())
    if not path.is_dir():
        raise DataError(f"there is no folder {path}: name a corpus folder or a run directory")
    if runs := sorted(path.glob("*/corpus")):
        raise DataError(f"{path} holds runs: name one of them, for example {runs[0].parent}")
    if not (path / MANIFEST_FILE).exists() and (corpora := sorted(path.glob(f"*/{MANIFEST_FILE}"))):
        names = ", ".join(each.parent.name for each in corpora)
        raise DataError(f"{path} holds prepared corpora: name one of these folders in it: {names}")
    return path.absolute()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def folder_hash(**settings: Any) -> str:
    """Return the hash that names a corpus folder before its tokens are known, of everything that decides them."""
    return _digest({"version": VERSION, **settings})[:12]
