"""Saves a run's checkpoints, sharded or not, keeps the best, and when a rank is lost, saves from one that is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import checkpoint
from .building import Built
from .parallel import parts
from .parallel.config import Shard
from .parallel.rescue import aside, snapshot
from .parallel.saving import PartsSaver
from .plan import Plan
from .resume import identity


class Saver:
    """Saves the model and optimizer of a Built. All ranks call its methods together, except `rescue`.

    seconds: how long the run has taken so far, for its checkpoint.
    """

    def __init__(self, plan: Plan, built: Built) -> None:
        self._plan, self._built, self._run_dir = plan, built, plan.run_dir
        self._keep, saves = plan.config.trainer.keep_checkpoints, plan.config.trainer.steps > 0
        sharded = plan.config.parallel.shard is not Shard.none
        self._parts = PartsSaver(plan.world, plan.run_dir, self._keep, saves) if sharded else None
        # Updates that have begun, and that have ended, counted on the device: the host is ahead of it.
        self._updates = torch.full((2,), plan.start.step, device=plan.world.device)
        self._updating = threading.Lock()
        waits = plan.world.size > 1 and plan.world.device.type == "cuda" and not sharded
        self._updated = torch.cuda.Event() if waits else None

    @contextmanager
    def update(self) -> Iterator[None]:
        """Context of an optimizer step, unless the model is sharded: `rescue` saves only states from between two."""
        with self._updating:
            self._updates[0] += 1
            yield
            self._updates[1] += 1
            if self._updated:
                self._updated.record()

    def keep_up(self) -> None:
        """With other ranks, wait until the device has made the last update; to be called once a forward is queued.

        The driver queues some 1,024 launches. Beyond that the launching thread waits in the driver, and may keep
        others out: if the device waits for a lost rank, `rescue` could not copy. GPT-2 small queues about 800 from
        a step's exchange to the end of the next forward, a larger model more. That forward keeps the device busy
        meanwhile. Not measured on a GPU yet.
        """
        if self._updated:
            self._updated.synchronize()  # releases Python's lock

    def save(self, done: int, seconds: float) -> None:
        """Save the state after `done` steps. Of a sharded model it is copied, and written while training goes on."""
        model, optimizer = self._built.model, self._built.optimizer
        if self._parts:
            self._parts.save(done, parts.tensors(model, optimizer), self._state(seconds))
        elif self._plan.world.is_main:
            self._save_whole(done, model.state_dict(), optimizer.state_dict(), seconds)

    def finish(self) -> None:
        """Wait for what is still being written."""
        if self._parts:
            self._parts.finish()

    def has(self, done: int) -> bool:
        """Whether the checkpoint of step `done` is there, and whole."""
        self.finish()
        return self._plan.world.share(checkpoint.at(self._run_dir, done).exists())

    def is_best(self, loss: float) -> bool:
        """Whether no checkpoint is kept as the best, or the kept one's validation loss is higher."""
        best = checkpoint.best(self._run_dir)
        return self._plan.world.share(best is None or loss < best.loss)

    def keep_best(self, done: int, loss: float, tokens: int) -> None:
        """Make the checkpoint of step `done`, which has been saved, the best."""
        self.finish()
        if self._plan.world.is_main:
            checkpoint.keep_best(self._run_dir, done, loss, tokens, self._keep)

    def rescue(self, seconds: float) -> int | None:
        """Save all of the run as another rank is lost; the step saved, None if this rank has no step or only parts.

        Called in the watch's thread: the main thread waits in a collective, and so may the device.
        """
        if self._parts:
            return None
        # For good: the main thread makes no other update.
        with self._updating, aside(self._plan.world.device):
            done, *states = snapshot(self._built.model, self._built.optimizer, self._updates)
            if done and not checkpoint.at(self._run_dir, done).exists():
                self._save_whole(done, *states, seconds)
        return done or None

    def _save_whole(self, done: int, weights: dict, optimizer: dict, seconds: float) -> None:
        state = {"optimizer": optimizer, **self._state(seconds)}
        checkpoint.save(self._run_dir, done, weights, state, self._keep)

    def _state(self, seconds: float) -> dict[str, Any]:
        """The entries of training.pt other than the step and the optimizer's state."""
        return {
            "scaler": self._built.scaler.state_dict(),
            "seconds": seconds,
            "identity": identity(self._plan.config, self._plan.corpus),
            "init_from": self._plan.config.trainer.init_from,
        }
