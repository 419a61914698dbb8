"""From `config.data` to a prepared corpus on disk, as train.py and prepare.py both need it."""

from __future__ import annotations

from dataclasses import asdict

from data.corpora import Mix, make_corpus
from data.loader import Corpus
from data.prepare import prepare
from data.progress import ConsoleProgress
from data.source import Source

from . import torchrun
from .config import DataConfig

# Only rank 0 shows its progress, so it should be the one that prepares: the others let it begin first, for at most
# this long, and then wait for its lock. On a node that does not see rank 0's disk, one of that node's ranks prepares.
_GIVE_WAY_S = 10
# What `prepare` and the trainer take; every other field of DataConfig describes the source.
_NOT_SOURCE = ("tokenizer", "cache_dir", "val_fraction", "workers", "document_mask", "block_len")


def named_corpus(config: DataConfig) -> Source | Mix:
    """The corpus that `config` names; nothing is read yet. Raises data.DataError for what no corpus can be."""
    return make_corpus(**{name: value for name, value in asdict(config).items() if name not in _NOT_SOURCE})


def prepare_corpus(config: DataConfig, *, quiet: bool = False) -> Corpus:
    """The prepared corpus of `config`: reused when it is there, made when it is not. Raises data.DataError."""
    progress = None if quiet else ConsoleProgress()
    try:
        return prepare(
            named_corpus(config),
            config.tokenizer,
            config.cache_dir,
            val_fraction=config.val_fraction,
            workers=config.workers,
            progress=progress,
            give_way=0 if torchrun.is_main_rank() else _GIVE_WAY_S,
        )
    finally:
        if progress:
            progress.close()  # else tqdm draws its bar once more, after an error
