"""From `config.data` to tokens on disk: the one call train.py and prepare.py share."""

from __future__ import annotations

from dataclasses import asdict

from data.corpora import make_corpus
from data.loader import Corpus
from data.prepare import prepare
from data.progress import ConsoleProgress

from . import torchrun
from .config import DataConfig

# Only rank 0 shows its progress, so it should be the one that prepares: the others let it begin first, for at most
# this long, and then wait for its lock. On another node, which does not see rank 0's disk, one of them prepares.
_GIVE_WAY_S = 10
# What `prepare` and the trainer take; every other field of DataConfig describes the source.
_NOT_SOURCE = ("tokenizer", "cache_dir", "val_fraction", "workers", "document_mask", "block_len")


def prepare_corpus(config: DataConfig, *, quiet: bool = False) -> Corpus:
    """The prepared corpus of `config`: reused when it is there, made when it is not. Raises data.DataError."""
    source = {name: value for name, value in asdict(config).items() if name not in _NOT_SOURCE}
    progress = None if quiet else ConsoleProgress()
    try:
        return prepare(
            make_corpus(**source),
            config.tokenizer,
            config.cache_dir,
            val_fraction=config.val_fraction,
            workers=config.workers,
            progress=progress,
            give_way=0 if torchrun.is_main_rank() else _GIVE_WAY_S,
        )
    finally:
        if progress:
            progress.close()  # else tqdm draws its bar once more, behind an error
