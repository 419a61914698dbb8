"""The run directory: who may train in it, and what a run writes there and prints, at its start and its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from model.gpt import GPT

from . import checkpoint
from .banner import banner, in_sweep, noise, result, unsaved
from .config import Config, ConfigError, flatten, to_yaml
from .console import for_shell, printable, table
from .distributed import World
from .environment import environment
from .files import unwritable, write_json, write_whole
from .loggers import CsvLogger, Logger, kept_rows
from .parallel.config import Shard
from .parallel.context import leave_ring
from .plan import Plan
from .resume import AUTO
from .sampling import sample_text
from .seeds import stream_seed
from .tensorboard_logger import TensorBoardLogger, check_tensorboard
from .wandb_logger import WandbLogger, check_wandb

LOCK = ".lock"
# Prefixes of settings that may differ from host to host: where text, tokens and other runs are.
_OF_A_HOST = (
    *("logger.", "data.cache_dir", "data.workers", "data.files", "data.roots", "data.corpora"),
    *("data.repo", "data.tokenizer", "trainer.hellaswag_file", "trainer.init_from", "trainer.resume"),
)


@contextmanager
def claimed(config: Config, run_dir: Path, ranks: World) -> Iterator[None]:
    """Hold the run directory, so that no other process trains in it. Raises ConfigError if this run may not.

    Rank 0 decides: others may have neither the directory nor wandb's key.
    """
    _check_alike(config, ranks)
    lock = FileLock(run_dir / LOCK)
    try:
        if why := ranks.share(_refusal(config, run_dir, lock) if ranks.is_main else None):
            raise ConfigError(why)
        yield
    finally:
        if lock.is_locked and [path.name for path in run_dir.iterdir()] == [LOCK]:
            (run_dir / LOCK).unlink()  # a refused run leaves nothing
        lock.release()


def _check_alike(config: Config, ranks: World) -> None:
    """Raise ConfigError where ranks have unlike settings: they would wait for ever, or diverge silently."""
    from omegaconf import OmegaConf

    settings = flatten(OmegaConf.to_container(OmegaConf.create(to_yaml(config))))
    mine = {name: value for name, value in settings.items() if not name.startswith(_OF_A_HOST)}
    first = ranks.share(mine)
    unlike = [name for name in mine if mine[name] != first.get(name)]
    rank = ranks.disagreeing(bool(unlike))
    if rank is None:
        return
    how = "other settings than rank 0"
    if unlike:
        ours, theirs = (", ".join(f"{name}={each.get(name)}" for name in unlike) for each in (mine, first))
        rank, how = ranks.rank, f"{ours}, rank 0 with {theirs}"
    raise ConfigError(f"rank {rank} was started with {how}: give one command to torchrun on every host.")


def _refusal(config: Config, run_dir: Path, lock: FileLock) -> str | None:
    """Why the run may not begin: another process trains there, wandb would not take it, or it holds another run."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        check_tensorboard(config.logger)
        check_wandb(config.logger)
    except Timeout:
        return f"{run_dir} is in use: another process trains there; wait for it, or choose another hydra.run.dir."
    except OSError as error:  # the directory is a colleague's, or archived
        return str(unwritable(run_dir, error))
    except ConfigError as error:
        return str(error)
    kept = checkpoint.saved(run_dir)
    if not (kept or (run_dir / "metrics.csv").exists()) or _resumes_in_place(config, run_dir):
        return None
    if in_sweep(run_dir):  # not all runs of a sweep can resume this one
        return f"{run_dir} already holds a run: choose another hydra.sweep.dir."
    resume = for_shell(f"trainer.resume={run_dir}")
    remedy = f"resume that run with {resume}" if kept else "delete it: it has no checkpoint"
    return f"{run_dir} already holds a run: choose another hydra.run.dir, or {remedy}."


def _resumes_in_place(config: Config, run_dir: Path) -> bool:
    """Whether the run is resumed in its own directory."""
    resume = config.trainer.resume
    return resume == AUTO or (resume is not None and Path(resume).resolve().is_relative_to(run_dir.resolve()))


def _check_corpus(plan: Plan) -> None:
    """Raise ConfigError where a host has prepared other tokens than rank 0's, such as another Python's source."""
    mine, ranks = plan.corpus.fingerprint, plan.world
    if (rank := ranks.disagreeing(mine != ranks.share(mine))) is not None:
        raise ConfigError(
            f"rank {rank} has another corpus than rank 0: give all hosts the same text and tokenizer (data.files, "
            "data.roots, data.tokenizer), as on storage that they share."
        )


class Recorder:
    """Writes a run's files and its rows of metrics, and keeps its clock; on all ranks but 0, only the clock.

    The constructor starts wandb, which may refuse the run: nothing of an earlier run is touched before `begin`.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        _check_corpus(plan)
        self._loggers: list[Logger] = []
        config, step, before = plan.config, plan.start.step, plan.start.seconds
        if plan.world.is_main:
            self._kept = kept_rows(plan.run_dir / "metrics.csv", step, config.trainer.evaluates_at(step))
            self._facts, self._environment = plan.facts(), environment(plan.world.device)
            self._banner, before = banner(plan), max(before, self._kept.seconds)
            if config.logger.wandb:
                about = self._facts, self._environment, self._kept
                logger = WandbLogger(config, plan.run_dir, *about, changed=bool(plan.start.changed))
                self._loggers.append(logger)
                self._banner += logger.where()
        self._began = time.perf_counter() - before

    def seconds(self) -> float:
        """How long the run has taken so far, with its time before it was resumed."""
        return time.perf_counter() - self._began

    def begin(self) -> None:
        """Take the directory over: drop what is newer than the step to resume from, write what is known by now."""
        plan, run_dir = self._plan, self._plan.run_dir
        if not plan.world.is_main:
            return
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            for end in ("summary.json", "sample.txt"):
                (run_dir / end).unlink(missing_ok=True)
            # Before the rows: a restart looks for the newest checkpoint.
            if gone := checkpoint.drop_after(run_dir, plan.start.step):
                print(f"removed {', '.join(gone)}: newer than the step this run resumes from", flush=True)
        except OSError as error:  # the directory is a colleague's, or archived
            raise unwritable(run_dir, error) from error
        write_whole(run_dir / "config.yaml", to_yaml(plan.config))
        write_whole(run_dir / "corpus", f"{plan.corpus.directory}\n")  # for python -m data.inspect RUN
        write_json(run_dir / "tokenizer.json", plan.corpus.manifest.tokenizer)
        write_json(run_dir / "environment.json", self._environment)
        write_json(run_dir / "facts.json", self._facts)
        if plan.config.logger.tensorboard:
            self._loggers.insert(0, TensorBoardLogger(plan.config, run_dir, plan.start.step))
        # First of all: a row is on disk before wandb gets it.
        self._loggers.insert(0, CsvLogger(run_dir / "metrics.csv", self._kept))
        print(table("tilegpt", [*self._banner, ("run", str(run_dir))]), flush=True)
        if why := unsaved(plan.config):
            print(f"warning: {why}", file=sys.stderr, flush=True)

    def log(self, done: int, metrics: dict[str, float]) -> None:
        """A row of metrics after `done` steps."""
        tokens = done * self._plan.config.trainer.batch_tokens
        for logger in self._loggers:
            logger.log({"step": done, "tokens": tokens, "seconds": self.seconds(), **metrics})

    def sample(self, done: int, model: GPT) -> str:
        """Text from the model after `done` steps, which the loggers and sample.txt get as well."""
        text = _sample(self._plan, model)
        if self._plan.world.is_main:
            write_whole(self._plan.run_dir / "sample.txt", text)
        for logger in self._loggers:
            logger.sample(done, self._plan.config.trainer.sample_prompt, text)
        return text

    def alert(self, why: str) -> None:
        """Tell someone that the run ends with an error."""
        for logger in self._loggers:
            logger.alert(why)

    def close(self, model: GPT, summary: dict[str, Any], window_seconds: list[float]) -> None:
        """Write and print the results of a finished run, and a sample from its model. All ranks call it.

        window_seconds: seconds a step, in each window that was measured.
        """
        plan, config, run_dir = self._plan, self._plan.config.trainer, self._plan.run_dir
        is_main = plan.world.is_main
        if is_main:
            write_json(run_dir / "summary.json", summary)
        if plan.layout.context_size > 1:
            leave_ring(model, plan.computation.attention_fn)
        in_parts = plan.config.parallel.shard is not Shard.none  # each rank has one, so all of them sample
        text = self.sample(config.steps, model) if config.sample_tokens and (is_main or in_parts) else ""
        if not is_main:
            return
        if config.sample_tokens:
            print(f"\nsample\n{printable(text)}")
        speeds = [config.batch_tokens / seconds for seconds in window_seconds]
        print("\n" + table("done", result(summary, run_dir, speeds, config)), flush=True)

    def finish(self, summary: dict[str, Any]) -> None:
        """Close the loggers; `summary` is empty when the run did not end well."""
        for logger in self._loggers:
            logger.finish(summary)


def stopped(plan: Plan, done: int, window_seconds: Iterable[float] = ()) -> str:
    """The message for a run that was told to stop: its step, how to resume it, and what may have made it slow."""
    speeds = [plan.config.trainer.batch_tokens / seconds for seconds in window_seconds]
    slowed = noise(speeds, plan.world.device.type == "cpu")
    return _where_it_is(plan, done) + (f"\nits speed {slowed}" if slowed else "")


def _where_it_is(plan: Plan, done: int) -> str:
    trainer, run_dir = plan.config.trainer, plan.run_dir
    if not trainer.steps:
        return "stopped during the evaluation"
    if trainer.resume == AUTO:
        return f"stopped at step {done:,} and saved; the same command, with this hydra.run.dir, resumes it"
    here = f"{for_shell(f'hydra.run.dir={run_dir}')} {for_shell(f'trainer.resume={run_dir}')}"
    how = f"adding {here}"
    if trainer.init_from and not trainer.resume:
        how = f"replacing trainer.init_from with {here}"
    if in_sweep(run_dir):  # -m would make another directory, and all its runs would resume this one
        how = f"without -m and with only this run's values, {how}"
    return f"stopped at step {done:,} and saved; to resume in the same directory, run the same command {how}"


def _sample(plan: Plan, model: GPT) -> str:
    config = plan.config
    tokenizer = plan.corpus.tokenizer(config.data.tokenizer)
    generator = torch.Generator().manual_seed(stream_seed(config.seed, "sampling"))
    with plan.autocast():  # in the precision its attention was picked for
        return sample_text(
            model, tokenizer, config.trainer.sample_prompt, config.trainer.sample_tokens, generator
        )
