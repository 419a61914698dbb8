"""What a run writes to disk and prints when it begins and when it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import checkpoint
from .config import Config, ConfigError, to_yaml
from .console import for_shell, printable, table
from .environment import environment
from .files import unwritable, write_json, write_whole
from .loggers import CsvLogger, Logger, WandbLogger, check_names, wandb_mode
from .report import banner, in_sweep, result
from .sampling import sample_text
from .seeds import stream_seed

if TYPE_CHECKING:
    from .trainer import Trainer


def refusal(config: Config, run_dir: Path) -> str | None:
    """Why the run may not begin: wandb would not take it, or the directory holds another run."""
    if config.logger.wandb:
        try:
            wandb_mode(config.logger.mode)
            check_names(config.logger)
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
    return resume is not None and Path(resume).resolve().is_relative_to(run_dir.resolve())


def open_run(run: Trainer) -> list[Logger]:
    """Write what is known beforehand, print the banner, and return the loggers (none but on rank 0)."""
    if not run.world.is_main:
        return []
    run_dir = run.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # Drop what is newer than the step to resume from: checkpoints first, since a restart looks for the newest.
        if gone := checkpoint.drop_after(run_dir, run.start):
            print(f"removed {', '.join(gone)}: newer than the step this run resumes from", flush=True)
        for end in ("summary.json", "sample.txt"):
            (run_dir / end).unlink(missing_ok=True)
    except OSError as error:  # the directory is a colleague's, or archived
        raise unwritable(run_dir, error) from error
    write_whole(run_dir / "config.yaml", to_yaml(run.config))
    write_whole(run_dir / "corpus", f"{run.corpus.directory}\n")  # for python -m data.inspect RUN
    write_json(run_dir / "tokenizer.json", run.corpus.manifest.tokenizer)
    where = environment(run.world.device)
    write_json(run_dir / "environment.json", where)
    facts = run.facts()
    write_json(run_dir / "facts.json", facts)
    loggers: list[Logger] = []
    rows = banner(run)
    if run.config.logger.wandb:
        wandb_logger = WandbLogger(run.config, run_dir, facts, where)
        loggers.append(wandb_logger)
        rows += wandb_logger.where()
    # After wandb, which may refuse the run: a directory with a metrics.csv counts as holding one.
    metrics = CsvLogger(run_dir / "metrics.csv", run.start, run.evaluates_at(run.start))
    loggers.insert(0, metrics)  # first, so that a row is on disk before wandb gets it
    run.resumed = run.resumed._replace(seconds=max(run.resumed.seconds, metrics.seconds))
    print(table("tilegpt", [*rows, ("run", str(run_dir))]), flush=True)
    return loggers


def stopped(run: Trainer, done: int) -> str:
    """What to say of a run that was told to stop: where it is, and what to type to resume it."""
    trainer = run.config.trainer
    if not trainer.steps:
        return "stopped during the evaluation"
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
