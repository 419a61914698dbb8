"""Saves a sharded model while it trains on: each rank copies its part, and a thread writes the copy."""

from __future__ import annotations

import secrets
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from .. import checkpoint
from ..config import ConfigError
from ..distributed import World
from ..files import REMEDY, unwritable


class PartsSaver:
    """Writes one checkpoint at a time, if the run `saves` any. All ranks call its methods together."""

    def __init__(self, ranks: World, run_dir: Path, keep: int, saves: bool) -> None:
        self._ranks, self._run_dir, self._keep = ranks, run_dir, keep
        if saves:
            self._check_seen_by_all()
        # A group for the threads alone: two collectives at once in one group could be matched with each other.
        self._group = dist.new_group(backend="gloo")
        self._writing: Future | None = None
        self._named = threading.Event()
        self._failed: BaseException | None = None
        self._step = 0

    def save(self, step: int, tensors: dict[str, Tensor], training: dict[str, Any]) -> None:
        """Begin the checkpoint of `step`; what `tensors` hold now is copied before this returns."""
        self.finish()
        if self._ranks.is_main:
            checkpoint.begin(self._run_dir, step, training)
        self._ranks.share(None)  # nobody writes into a folder that rank 0 is still clearing
        self._step, self._named = step, threading.Event()
        folder = checkpoint.partial(self._run_dir, step) / checkpoint.PARTS
        self._writing = dcp.async_save(tensors, checkpoint_id=folder, process_group=self._group)
        self._writing.add_done_callback(self._written)

    def _check_seen_by_all(self) -> None:
        """Raise ConfigError where a rank does not see what rank 0 writes: its parts would be lost to the others."""
        mark, why = self._run_dir / f".seen-{secrets.token_hex(4)}", None
        if self._ranks.is_main:
            try:
                self._run_dir.mkdir(parents=True, exist_ok=True)
                mark.touch()
            except OSError as error:
                why = str(unwritable(self._run_dir, error))
        mark, why = self._ranks.share((mark, why))
        blind = self._ranks.gather(not mark.exists())
        if self._ranks.is_main:
            mark.unlink(missing_ok=True)
        if not why and any(blind):
            why = (
                f"{self._run_dir} is not one directory for all ranks: rank {blind.index(True)} does not see what "
                "rank 0 writes there, and each writes its part of a model; name one on storage that all hosts share, "
                "with hydra.run.dir=/SHARED/RUN, or use parallel.shard=none."
            )
        if why:
            raise ConfigError(why)

    def _written(self, writing: Future) -> None:
        """On rank 0 this comes when all ranks have written: then the checkpoint gets its name."""
        self._failed = writing.exception()
        try:
            if self._ranks.is_main and not self._failed:
                checkpoint.complete(self._run_dir, self._step, self._keep)
        except ConfigError as error:
            self._failed = error
        finally:
            self._named.set()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written has its name. Raises ConfigError if it cannot get it."""
        if self._writing is None:
            return
        self._named.wait()
        self._writing = None
        # All ranks are told of one that could not write, but only rank 0 knows whether it could rename.
        failed = self._failed if self._ranks.is_main else None
        if why := self._ranks.share(failed and _reason(failed)):
            where = self._run_dir / checkpoint.FOLDER
            if self._ranks.is_main:  # by now no rank writes into it
                shutil.rmtree(checkpoint.partial(self._run_dir, self._step), ignore_errors=True)
            raise ConfigError(
                f"the checkpoint of step {self._step} could not be written to {where}: {why}; {REMEDY}"
            )


def _reason(error: BaseException) -> str:
    failures = getattr(error, "failures", {})
    return str(next(iter(failures.values()))[0] if failures else error)
