"""What a run writes to disk and prints when it begins and when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from filelock import FileLock, Timeout

from . import checkpoint
from .config import Config, ConfigError, to_yaml
from .console import for_shell, printable, table
from .distributed import World
from .environment import environment
from .files import unwritable, write_json, write_whole
from .loggers import CsvLogger, Kept, WandbLogger, check_wandb, kept_rows
from .report import Rows, banner, in_sweep, result
from .restore import AUTO
from .sampling import sample_text
from .seeds import stream_seed

if TYPE_CHECKING:
    from .trainer import Trainer


LOCK = ".lock"


@contextmanager
def claimed(config: Config, run_dir: Path, ranks: World) -> Iterator[None]:
    """Hold the run directory, so that no other process trains in it. Raises ConfigError if this run may not.

    Rank 0 decides: only it has the directory and the key.
    """
    lock = FileLock(run_dir / LOCK)
    try:
        if why := ranks.share(_refusal(config, run_dir, lock) if ranks.is_main else None):
            raise ConfigError(why)
        yield
    finally:
        if lock.is_locked and [path.name for path in run_dir.iterdir()] == [LOCK]:
            (run_dir / LOCK).unlink()  # nothing of a refused run stays
        lock.release()


def _refusal(config: Config, run_dir: Path, lock: FileLock) -> str | None:
    """Why the run may not begin: another process trains there, wandb would not take it, or it holds another run."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
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


class Opened(NamedTuple):
    """What a run has gathered to begin with. Nothing of an earlier run in its directory has been touched."""

    rows: Rows  # of the banner
    facts: dict[str, Any]
    environment: dict[str, Any]
    kept: Kept
    wandb: WandbLogger | None


def open_run(run: Trainer) -> Opened | None:
    """Ask wandb, which may refuse the run, and gather what `begin_run` writes. None on all ranks but 0."""
    if not run.world.is_main:
        return None
    kept = kept_rows(run.run_dir / "metrics.csv", run.start, run.evaluates_at(run.start))
    facts = {**run.facts(), "resumed": run.resumed.history}
    where, rows = environment(run.world.device), banner(run)
    logger = None
    if run.config.logger.wandb:
        logger = WandbLogger(run.config, run.run_dir, facts, where, kept, changed=bool(run.resumed.changed))
        rows += logger.where()
    return Opened(rows, facts, where, kept, logger)


def begin_run(run: Trainer, opened: Opened) -> CsvLogger:
    """Take the directory over: drop what is newer than the step to resume from, write what is known beforehand."""
    run_dir = run.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for end in ("summary.json", "sample.txt"):
            (run_dir / end).unlink(missing_ok=True)
        # Before the rows: a restart looks for the newest checkpoint.
        if gone := checkpoint.drop_after(run_dir, run.start):
            print(f"removed {', '.join(gone)}: newer than the step this run resumes from", flush=True)
    except OSError as error:  # the directory is a colleague's, or archived
        raise unwritable(run_dir, error) from error
    write_whole(run_dir / "config.yaml", to_yaml(run.config))
    write_whole(run_dir / "corpus", f"{run.corpus.directory}\n")  # for python -m data.inspect RUN
    write_json(run_dir / "tokenizer.json", run.corpus.manifest.tokenizer)
    write_json(run_dir / "environment.json", opened.environment)
    write_json(run_dir / "facts.json", opened.facts)
    metrics = CsvLogger(run_dir / "metrics.csv", opened.kept)
    print(table("tilegpt", [*opened.rows, ("run", str(run_dir))]), flush=True)
    return metrics


def stopped(run: Trainer, done: int) -> str:
    """What to say of a run that was told to stop: where it is, and what to type to resume it."""
    trainer = run.config.trainer
    if not trainer.steps:
        return "stopped during the evaluation"
    if trainer.resume == AUTO:
        return f"stopped at step {done:,} and saved; the same command, with this hydra.run.dir, resumes it"
    here = f"{for_shell(f'hydra.run.dir={run.run_dir}')} {for_shell(f'trainer.resume={run.run_dir}')}"
    how = f"adding {here}"
    if trainer.init_from and not trainer.resume:
        how = f"replacing trainer.init_from with {here}"
    if in_sweep(run.run_dir):  # -m would make another directory, and all its runs would resume this one
        how = f"without -m and with only this run's values, {how}"
    return f"stopped at step {done:,} and saved; to resume in the same directory, run the same command {how}"


def close_run(run: Trainer, summary: dict[str, Any]) -> None:
    """Write and print the results of a finished run, and a sample from its model."""
    write_json(run.run_dir / "summary.json", summary)
    if run.config.trainer.sample_tokens:
        text = _sample(run)
        write_whole(run.run_dir / "sample.txt", text)
        print(f"\nsample\n{printable(text)}")
    speeds = [run.config.trainer.batch_tokens / seconds for seconds in run.throughput.windows]
    print(
        "\n" + table("done", result(summary, run.run_dir, speeds, run.config.trainer.keep_best)), flush=True
    )


def _sample(run: Trainer) -> str:
    config = run.config
    tokenizer = run.corpus.tokenizer(config.data.tokenizer)
    generator = torch.Generator().manual_seed(stream_seed(config.seed, "sampling"))
    with run.autocast():  # in the precision its attention was picked for
        return sample_text(
            run.model, tokenizer, config.trainer.sample_prompt, config.trainer.sample_tokens, generator
        )
