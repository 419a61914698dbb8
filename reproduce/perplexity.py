"""GPT-2 small trained with every attention, and longer contexts: does either change the perplexity?

FlashAttention, Table 2 and Figure 4: FlashAttention and standard attention reach the same perplexity. Table 4: a
longer context lowers it. Every run is one of the trainer's own, in its own process and run directory below `runs`;
with several GPUs, one on each. A run that is cut saves itself, and the same command continues it.

Six parts:
    gpt2      GPT-2 small on English text; attention alone differs. Controls say how close is the same: naive with
              another micro-batch (the same mathematics, rounded in another order), flash and naive with other
              weights; and whose rounding it is: standard attention with scores in float32.
    recipe    the paper's settings: dropout 0.1, attention scaled by the layer, float16; both draw one dropout mask.
    numerics  one checkpoint evaluated with every backend, and every backend's gradients against float64's, tensor by
              tensor: what attention changes, without the noise of training (perplexity_numerics.py).
    context   a smaller model on whole source files, contexts 512 to 4096. Every run sees the same tokens at every
              step. Evaluated on equal targets, with the longest model's windows cut, and by token position.
    stability the longest context again without precise_delta, so that it diverges; at half the rate, and with
              PyTorch's attention. And numerics of the longest context's best checkpoint.
    extend    GPT-2 small goes on from flash's last checkpoint, its context kept or extended, on the same tokens.
"""

import csv
import json
import shutil
import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from training import checkpoint
from training.config import Config
from training.corpus import prepare_corpus

from . import fleet
from .common import ReproduceError
from .experiment import Options, OutOfTime, Sample
from .fleet import CUT, DONE, FAILED, Follow, Job
from .perplexity_figures import draw, table
from .perplexity_runs import (
    PARTS,
    TINY,
    Settings,
    TrainingRun,
    data_config,
    longest_of,
    source_of,
    training_runs,
    wanted,
)
from .perplexity_verdicts import judge

__all__ = ["TINY", "Settings", "draw", "judge", "run", "table"]

# Which code was read is among the coordinates of the runs that read it.
SELECTION = ("parts", "only", "runs", "cache_dir", "code", "code_tokenizer")
NEEDED = ("seeds",)
ON_CODE = ("context", "stability")  # the parts that are trained on whole source files
# Beyond this a model of GPT-2's size learns its text by heart, and losses say little about attention.
MAX_EPOCHS = 8
# Left for the runs to save themselves in, before a budget is over.
_SAVING_S = 45.0
_BY_CONTEXT = "by_context.json"


class Task(NamedTuple):
    """A job, where its sample belongs, what reads it from the job's files, and whether there is something to read."""

    job: Job
    where: dict[str, Any]
    measure: Callable[[], Sample]
    begun: Callable[[], bool]


def run(options: Options) -> None:
    settings = _checked(options.settings)
    corpora = _corpora(options)
    every = {each.name: each for each in training_runs(settings, options)}
    runs = [each for each in every.values() if wanted(each.part, each.name, settings)]
    _check_names(runs, settings)
    for each in runs:
        tokens = each.config.trainer.steps * each.config.trainer.batch_tokens
        corpora[each.part in ON_CODE].train.epochs(tokens, at_most=MAX_EPOCHS)
    tasks = [_training(each, settings) for each in runs]
    # Before the runs that the verdict does not need.
    early = next((n for n, task in enumerate(tasks) if task.job.name in ("sdpa", "flash_triton")), len(tasks))
    tasks[early:early] = _numerics([*every.values()], settings)
    tasks = [task for task in tasks if not options.find(**task.where)]
    jobs = {task.job.name: task.job for task in tasks}
    for name in {job.after for job in jobs.values() if job.after} - jobs.keys():
        if not (every[name].directory(settings) / "summary.json").exists():
            tasks.insert(0, _training(every[name], settings))
    deadline = None if options.deadline is None else options.deadline - _SAVING_S
    by_name = {task.job.name: task for task in tasks}
    unfinished = False
    with closing(fleet.run([task.job for task in tasks], options.devices, deadline)) as ended:
        for job, state in ended:
            unfinished |= _collect(options, by_name[job.name], state)
    if unfinished:
        raise OutOfTime


def _checked(settings: Settings) -> Settings:
    if unknown := set(settings.parts) - set(PARTS):
        raise ReproduceError(f"parts={sorted(unknown)[0]} is unknown; choose from {', '.join(PARTS)}")
    for context in (settings.context, *settings.contexts, *settings.extended):
        if settings.batch_tokens % context:
            raise ReproduceError(
                f"batch_tokens={settings.batch_tokens} is not a multiple of context {context}"
            )
    return settings


def _check_names(runs: list[TrainingRun], settings: Settings) -> None:
    known = {each.name for each in runs} | {"numerics_start", "numerics_end", "numerics_context"}
    if unknown := set(settings.only) - known:
        raise ReproduceError(f"only={sorted(unknown)[0]} is no run of parts={','.join(settings.parts)}")


def _corpora(options: Options) -> list[Any]:
    """The English text and the code, prepared here once, before several runs would do it at the same time."""
    settings, corpora = options.settings, []
    for kind, globs, tokenizer in (
        ("text", settings.text, settings.tokenizer),
        ("code", settings.code, settings.code_tokenizer),
    ):
        if kind == "code" and not {*ON_CODE} & set(settings.parts):
            continue
        corpus = prepare_corpus(data_config(globs, tokenizer, settings, options), quiet=options.tiny)
        corpora.append(corpus)
        about = {"name": corpus.name, "tokenizer": Path(corpus.manifest.tokenizer["name"]).name}
        about |= {"tokens": corpus.train.tokens, "validation_tokens": corpus.val.tokens}
        options.sample(lambda about=about: about, kind="corpus", of=kind)
    return corpora


# ---- one run -----------------------------------------------------------------------------------------


def train_in(device: torch.device, config: Config, directory: Path, contexts: tuple[int, ...] = ()) -> None:
    """Train `config` in `directory` to its end, from its newest checkpoint if it was cut.

    contexts: evaluate the last checkpoint with windows of these too, into `by_context.json`.
    """
    from training.trainer import train

    if not (directory / "summary.json").exists():
        if not checkpoint.saved(directory):
            shutil.rmtree(directory, ignore_errors=True)  # killed before its first checkpoint
        train(replace(config, trainer=replace(config.trainer, resume="auto")), directory)
    if contexts:
        from .perplexity_numerics import by_context

        (directory / _BY_CONTEXT).write_text(json.dumps(by_context(device, directory, contexts)))


def _training(each: TrainingRun, settings: Settings) -> Task:
    directory, metrics = each.directory(settings), each.directory(settings) / "metrics.csv"
    log, after = directory.with_suffix(".log"), settings.extend_from if each.part == "extend" else None
    arguments = (each.config, directory, settings.contexts if each.part == "context" else ())
    job = Job(each.name, train_in, arguments, log, after, Follow(each.name, log, having=": validation "))
    return Task(job, _where(each), partial(_curve, each, settings), lambda: bool(_rows(metrics)))


def _rows(file: Path) -> list[dict[str, float]]:
    if not file.exists():
        return []
    with file.open(newline="") as text:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(text)]


def _where(each: TrainingRun) -> dict[str, Any]:
    config = each.config
    return {
        "kind": "run",
        "part": each.part,
        "name": each.name,
        "attention": config.attention.name,
        "init_seed": config.seed if config.init_seed is None else config.init_seed,
        "context": config.model.seq_len,
        "micro_batch": config.trainer.micro_batch,
        "steps": config.trainer.steps,
        **({"code": [*config.data.files, config.data.tokenizer]} if each.part in ON_CODE else {}),
        **({"precise_delta": config.attention.precise_delta} if each.part in ON_CODE else {}),
        **({"lr": config.optimizer.lr} if each.part == "stability" else {}),
    }


def _curve(each: TrainingRun, settings: Settings) -> Sample:
    """What a run's files say: losses and validation by step, seconds, speed, memory, and a text it wrote."""
    directory = each.directory(settings)
    rows = _rows(directory / "metrics.csv")
    facts = json.loads((directory / "facts.json").read_text())
    done = (directory / (_BY_CONTEXT if each.part == "context" else "summary.json")).exists()
    summary = json.loads((directory / "summary.json").read_text()) if done else {}

    def column(name: str) -> list[list[Any]]:
        return [[int(row["step"]), row[name]] for row in rows if name in row]

    speeds = [speed for _, speed in column("perf/tokens_per_second")]
    sample: Sample = {
        "losses": [[step, round(loss, 5)] for step, loss in column("train/loss")],
        "validation": column("val/loss"),
        "seconds": round(rows[-1]["seconds"], 1),
        "tokens_per_second": round(statistics.median_high(speeds), 1) if speeds else None,
        "peak_gib": max((gib for _, gib in column("perf/peak_allocated_gib")), default=None),
        "tier": facts.get("attention_tier"),
        "parameters": facts["parameters"],
        "batch_tokens": each.config.trainer.batch_tokens,
    }
    if each.part in ON_CODE:
        norms = column("train/grad_norm")[::5]
        sample["gradient_norms"] = [[step, float(f"{norm:.3g}")] for step, norm in norms]
    if not done:
        return sample | {"partial": int(rows[-1]["step"])}
    sample |= {"bits_per_byte": summary["val/bits_per_byte"], "text": (directory / "sample.txt").read_text()}
    if each.part == "context":
        sample |= json.loads((directory / _BY_CONTEXT).read_text())
    return sample


def _collect(options: Options, task: Task, state: str) -> bool:
    """Store what a job left, if it left something; whether something of it is still to be done.

    What another machine has measured stays, also of a run that is made again for its checkpoint.
    """
    job = task.job
    if state == FAILED:

        def failed() -> Sample:
            raise RuntimeError(f"{_last_line(job.log)} (see {job.log})")

        options.sample(failed, **task.where)
    elif not options.find(**task.where) and (state == DONE or (state == CUT and task.begun())):
        sample = options.sample(task.measure, **task.where)
        if state == DONE and "validation" in sample:
            (step, loss), speed = sample["validation"][-1], sample["tokens_per_second"] or 0
            options.say(f"{job.name}: {step:,} steps, validation loss {loss:.4f}, {speed:,.0f} tokens/s")
    return state not in (DONE, FAILED)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it wrote nothing"


# ---- numerics ----------------------------------------------------------------------------------------


def _numerics(runs: list[TrainingRun], settings: Settings) -> list[Task]:
    """Evaluations and gradients of one run's weights before the first step and after the last, and of the longest
    context's where its validation loss was lowest."""
    from .perplexity_numerics import compare_backends

    short, long = source_of(runs, settings), longest_of(runs, settings)
    found = []
    for part, when, trained in (
        ("numerics", "start", short), ("numerics", "end", short), ("stability", "context", long)
    ):  # fmt: skip
        name = f"numerics_{when}"
        if not wanted(part, name, settings):
            continue
        directory = trained.directory(settings)
        weights, after = (None, None) if when == "start" else (directory, trained.name)
        batch = max(1, settings.numerics_batch * settings.context // trained.config.model.seq_len)
        output = directory.with_name(f"{name}_{directory.name}.json")
        arguments = (trained.config, weights, output, settings.numerics_tokens, batch)
        job = Job(name, compare_backends, arguments, output.with_suffix(".log"), after)
        where = {"kind": "numerics", "when": when, "of": trained.name}
        found.append(Task(job, where, lambda output=output: json.loads(output.read_text()), output.exists))
    return found
