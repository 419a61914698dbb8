"""Loss curves: every attention with the same seed and data, and longer contexts at equal tokens.

FlashAttention, Table 2 and Figure 4: FlashAttention and standard attention reach the same perplexity. Here short runs
are compared: the difference between backends must be smaller than that between runs of one backend that differ only
in their initial weights. Table 4: a longer context lowers perplexity. Here every context predicts each token of the
validation split exactly once.
"""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from data.loader import Batches, Corpus, EvaluationBatches, open_corpus, prefetch
from kernels import ATTENTION, resolve_attention
from model.config import GPTConfig
from model.gpt import GPT
from training.distributed import World
from training.evaluation import evaluate
from training.optimizer import OptimizerConfig, build_optimizer, update
from training.schedule import ScheduleConfig, learning_rate
from training.seeds import stream_seed

from .contenders import backends as registered
from .experiment import Options, ReproduceError, Sample
from .perplexity_figures import draw, judge, table

__all__ = ["TINY", "Settings", "draw", "judge", "run", "table"]

BASELINE = "naive"


@dataclass(frozen=True)
class Settings:
    parts: tuple[str, ...] = ("backends", "context")
    # A corpus folder prepared by prepare.py; if empty, Python's standard library as bytes, prepared here.
    corpus: str = ""
    cache_dir: str = "data/cache"
    # Folders of Python source; if empty, the standard library.
    roots: tuple[str, ...] = ()
    # Names in kernels.ATTENTION; if empty, all but the historical ones. The baseline, naive, is always included.
    backends: tuple[str, ...] = ()
    # Seeds of the initial weights: every backend has the first, the others show the spread. All share one data order.
    seeds: tuple[int, ...] = (1337, 1, 2)
    dtype: str = "bfloat16"
    n_layer: int = 6
    n_head: int = 8
    n_embd: int = 512
    context: int = 1024
    batch_tokens: int = 32768
    steps: int = 400
    lr: float = 6e-4
    contexts: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    context_backend: str = "auto"
    # A longer context learns more slowly at first: after 400 steps of 2048 tokens on a CPU, 256 was 0.25 behind 16.
    context_steps: int = 2000


TINY = Settings(
    roots=(str(Path(json.__file__).parent),),
    backends=("naive", "sdpa"),
    seeds=(1337, 1),
    dtype="float32",
    n_layer=1,
    n_head=2,
    n_embd=32,
    context=16,
    batch_tokens=128,
    steps=12,
    contexts=(8, 32),
    context_steps=12,
)


def run(options: Options) -> None:
    settings = options.settings
    if unknown := set(settings.parts) - set(Settings().parts):
        raise ReproduceError(
            f"parts={sorted(unknown)[0]} is unknown; choose from {', '.join(Settings().parts)}"
        )
    if unknown := set(settings.backends) - set(ATTENTION):
        raise ReproduceError(f"backends={sorted(unknown)[0]} is unknown; choose from {', '.join(ATTENTION)}")
    for context in (settings.context, *settings.contexts):
        if settings.batch_tokens % context:
            raise ReproduceError(
                f"batch_tokens={settings.batch_tokens} is not a multiple of context {context}"
            )
    corpus = _corpus(options)
    about = {
        "corpus": corpus.directory.name,
        "tokenizer": corpus.manifest.tokenizer["name"],
        "tokens": corpus.train.tokens,
    }
    options.sample(lambda: about, kind="corpus")
    # flash first: once it and a second seed of the baseline are done, the comparison has an answer on any budget.
    others = sorted(
        set(settings.backends or registered()) - {BASELINE}, key=lambda name: (name != "flash", name)
    )
    first, *more = settings.seeds
    jobs = [("backends", name, first, settings.context, settings.steps) for name in (BASELINE, *others)]
    # The spread between seeds is measured on the baseline.
    spread = [("backends", BASELINE, seed, settings.context, settings.steps) for seed in more]
    jobs = jobs[:2] + spread[:1] + jobs[2:] + spread[1:]
    jobs += [
        ("context", settings.context_backend, first, context, settings.context_steps)
        for context in settings.contexts
    ]
    for part, backend, seed, context, steps in jobs:
        if part not in settings.parts:
            continue
        where = {"part": part, "backend": backend, "seed": seed, "context": context, "steps": steps}
        sample = options.sample(partial(_train, options, corpus, **where), kind="run", **where)
        _report(options, sample)


def _corpus(options: Options) -> Corpus:
    settings = options.settings
    if settings.corpus:
        return open_corpus(settings.corpus)
    from data.corpora import make_corpus
    from data.prepare import prepare

    source = make_corpus("python_source", roots=list(settings.roots))
    return prepare(source, "bytes", settings.cache_dir, workers=1 if options.tiny else None)


def _report(options: Options, sample: Sample) -> None:
    name = f"{sample['part']}: {sample['backend']}, context {sample['context']}, seed {sample['seed']}"
    if "validation" in sample:
        options.say(f"{name}: validation loss {sample['validation'][-1][1]:.4f}, {sample['seconds']:.0f} s")
    else:
        options.say(f"{name}: {sample.get('refused') or sample.get('failed') or 'out of memory'}")


def _train(
    options: Options, corpus: Corpus, *, part: str, backend: str, seed: int, context: int, steps: int
) -> Sample:
    """Train as the trainer does, but without a run directory; record the training loss of every step, and the
    validation loss after each quarter of the steps."""
    settings, ranks = options.settings, World(options.device)
    dtype = getattr(torch, settings.dtype)
    config = GPTConfig(corpus.n_vocab, context, settings.n_layer, settings.n_head, settings.n_embd)
    resolved, attention = resolve_attention(
        backend, device=options.device, dtype=dtype, head_dim=config.head_dim
    )
    sequences = settings.batch_tokens // context
    data_seed = stream_seed(settings.seeds[0], "data")
    batches = Batches(corpus.train, context, sequences, data_seed)
    validation = EvaluationBatches(corpus.val, context, sequences)
    generator = torch.Generator().manual_seed(stream_seed(seed, "init"))
    model = GPT(config, attention, generator=generator).to(options.device)
    optimizer = build_optimizer(model, replace(OptimizerConfig(), lr=settings.lr))
    scaler = torch.amp.GradScaler(options.device.type, enabled=dtype is torch.float16)
    autocast = partial(torch.autocast, options.device.type, dtype, enabled=dtype is not torch.float32)

    began = time.perf_counter()
    losses, evaluations = [], []
    with closing(prefetch(batches, 0, steps)) as loaded:
        for step, (inputs, targets) in enumerate(loaded):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(ScheduleConfig(), settings.lr, step, steps)
            with autocast():
                loss = model(inputs.to(options.device), targets.to(options.device))
            scaler.scale(loss).backward()
            update(model, optimizer, scaler)
            losses.append(loss.detach())
            if (step + 1) * 4 // steps > step * 4 // steps:
                evaluation = evaluate(
                    model, _on_device(validation, options.device), corpus.val.utf8_bytes, ranks, autocast
                )
                evaluations.append((step + 1, evaluation.loss, evaluation.bits_per_byte))
    return {
        "resolved": resolved,
        "parameters": model.num_parameters(),
        "losses": torch.stack(losses).tolist(),
        "validation": evaluations,
        "seconds": round(time.perf_counter() - began, 2),
        "model": asdict(config),
    }


def _on_device(batches: EvaluationBatches, device: torch.device):
    for n in range(len(batches)):
        yield tuple(torch.from_numpy(array).to(device) for array in batches.batch(n))
