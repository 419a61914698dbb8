"""The runs of the perplexity experiment: what each one is trained with, and the Settings they follow from."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from training.config import (
    AttentionConfig,
    Config,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    OptimizerConfig,
    Precision,
    ScheduleConfig,
    TrainerConfig,
    to_yaml,
)
from training.schedule import Decay

from .experiment import Options

PARTS = ("gpt2", "recipe", "numerics", "context", "stability", "extend")


@dataclass(frozen=True)
class Settings:
    parts: tuple[str, ...] = PARTS
    # Globs of English text (.jsonl, .txt, .parquet) for `gpt2`, `recipe` and `numerics`, and of source code in whole
    # files for `context` and `stability`; if empty, Python's standard library: enough to try it, not to judge by.
    text: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    tokenizer: str = "gpt2"
    # GPT-2's first 8,192 tokens are a valid smaller vocabulary: with 50,257 a small model is mostly its embedding.
    code_tokenizer: str = "gpt2"
    cache_dir: str = "data/cache"
    runs: str = "runs/perplexity"
    # Names of the runs to make, such as flash,naive; if empty, all of the chosen parts.
    only: tuple[str, ...] = ()
    # Of the initial weights: every run has the first; one of `seed_backend` and of naive, and `context_seeds`, the
    # second too.
    seeds: tuple[int, ...] = (1337, 1)
    seed_backend: str = "flash"
    dtype: str = "bfloat16"
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    context: int = 1024
    batch_tokens: int = 65536
    micro_batch: int = 16
    steps: int = 3052  # 200 M tokens
    recipe_steps: int = 400
    lr: float = 6e-4
    eval_every: int = 200
    contexts: tuple[int, ...] = (512, 1024, 2048, 4096)
    context_seeds: tuple[int, ...] = (1024, 4096)  # the contexts that are trained with the second seed too
    context_layers: int = 6
    context_heads: int = 8
    context_width: int = 512
    context_steps: int = 6000  # 393 M tokens, each of kernel C's once
    context_lr: float = 1e-3
    context_micro_tokens: int = 65536
    # The run whose last checkpoint `numerics` and `extend` take; trained first where its run directory is not there.
    extend_from: str = "flash"
    extended: tuple[int, ...] = (1024, 2048, 4096)
    extend_steps: int = 800
    numerics_tokens: int = 131072
    numerics_batch: int = 4


TINY = Settings(
    only=("naive", "naive_half", "sdpa", "naive_seed", "numerics_end", "context_8", "context_32",
          "numerics_context", "stability_sdpa", "extend_16", "extend_32"),
    seed_backend="naive", dtype="float32", n_layer=1, n_head=2, n_embd=32, context=16, batch_tokens=128,
    micro_batch=8, steps=12, recipe_steps=12, eval_every=3, contexts=(8, 32), context_seeds=(), context_layers=1,
    context_heads=2, context_width=32, context_steps=12, context_micro_tokens=128, extend_from="naive",
    extended=(16, 32), extend_steps=4, numerics_tokens=256, numerics_batch=2,
)  # fmt: skip


@dataclass(frozen=True)
class TrainingRun:
    """One run: its part, its name, and what it is trained with."""

    part: str
    name: str
    config: Config

    def directory(self, settings: Settings) -> Path:
        """Named after all its settings, so that a run of others is never continued."""
        digest = hashlib.sha256(to_yaml(self.config).encode()).hexdigest()[:8]
        return Path(settings.runs) / f"{self.name}_{digest}"


def training_runs(settings: Settings, options: Options) -> list[TrainingRun]:
    """Every run of every part, longest first: two GPUs then end at nearly the same time."""
    first, second = settings.seeds
    base = base_config(settings, options)
    naive, flash, sdpa = map(_attention, ("naive", "flash", "sdpa"))
    half = replace(base.trainer, micro_batch=max(1, settings.micro_batch // 2))
    fp16 = Precision.fp16 if options.device.type == "cuda" else Precision.fp32
    paper = replace(
        base,
        model=replace(base.model, dropout=0.1, scale_attn_by_inverse_layer_idx=True),
        trainer=replace(base.trainer, steps=settings.recipe_steps, precision=fp16),
    )
    reseeded = [_attention(name) for name in dict.fromkeys((settings.seed_backend, "naive"))]
    runs = [
        TrainingRun("gpt2", "naive_half", replace(base, attention=naive, trainer=half)),
        TrainingRun("gpt2", "flash", replace(base, attention=flash)),
        TrainingRun("gpt2", "naive", replace(base, attention=naive)),
        *(
            TrainingRun("gpt2", f"{each.name}_seed", replace(base, attention=each, init_seed=second))
            for each in reseeded
        ),
        TrainingRun("gpt2", "sdpa", replace(base, attention=sdpa)),
        TrainingRun("gpt2", "flash_triton", replace(base, attention=replace(flash, tier="triton"))),
        TrainingRun("gpt2", "sdpa_math", replace(base, attention=_attention("sdpa_math"))),
        TrainingRun("recipe", "recipe_naive", replace(paper, attention=naive)),
        TrainingRun("recipe", "recipe_flash", replace(paper, attention=flash)),
    ]
    for context in sorted(settings.contexts, reverse=True):
        for seed in (first, second) if context in settings.context_seeds else (first,):
            name = f"context_{context}" + "_seed" * (seed != first)
            runs.append(TrainingRun("context", name, _context_config(settings, options, context, seed)))
    longest = longest_of(runs, settings).config
    for name, attention, rate in (
        ("plain", flash, settings.context_lr),
        ("sdpa", sdpa, settings.context_lr),
        ("half_lr", flash, settings.context_lr / 2),
    ):
        config = replace(longest, attention=attention, optimizer=replace(longest.optimizer, lr=rate))
        runs.append(TrainingRun("stability", f"stability_{name}", config))
    source = source_of(runs, settings)
    for context in settings.extended:
        runs.append(TrainingRun("extend", f"extend_{context}", _extended(source, context, settings)))
    return runs


def longest_of(runs: list[TrainingRun], settings: Settings) -> TrainingRun:
    """The run of the longest context, with the first seed."""
    return next(each for each in runs if each.name == f"context_{max(settings.contexts)}")


def source_of(runs: list[TrainingRun], settings: Settings) -> TrainingRun:
    return next(each for each in runs if each.name == settings.extend_from)


def _extended(source: TrainingRun, context: int, settings: Settings) -> Config:
    """A tenth of the peak rate, as when the source's schedule had a tenth to go; every run sees the same tokens."""
    config = source.config
    return replace(
        config,
        model=replace(config.model, seq_len=context),
        data=replace(config.data, block_len=max(settings.extended)),
        optimizer=replace(config.optimizer, lr=settings.lr / 10),
        trainer=replace(
            config.trainer,
            steps=settings.extend_steps,
            micro_batch=max(1, settings.micro_batch * settings.context // context),
            eval_every=max(1, settings.extend_steps // 4),
            init_from=str(source.directory(settings)),
        ),
    )


def base_config(settings: Settings, options: Options) -> Config:
    """GPT-2 small as `python train.py model=gpt2_small` trains it, with a shorter schedule."""
    return Config(
        model=ModelConfig(None, settings.context, settings.n_layer, settings.n_head, settings.n_embd),
        data=data_config(settings.text, settings.tokenizer, settings, options),
        optimizer=OptimizerConfig(lr=settings.lr),
        schedule=ScheduleConfig(Decay.linear, warmup_fraction=0.01),
        trainer=TrainerConfig(
            steps=settings.steps,
            batch_tokens=settings.batch_tokens,
            micro_batch=settings.micro_batch,
            precision={"bfloat16": Precision.bf16, "float16": Precision.fp16}.get(
                settings.dtype, Precision.fp32
            ),
            device=options.device.type,
            log_every=1 if options.tiny else 10,
            eval_every=settings.eval_every,
            keep_checkpoints=1,
            sample_tokens=10 if options.tiny else 200,
        ),
        logger=LoggerConfig(wandb=False),
        seed=settings.seeds[0],
    )


def _attention(name: str) -> AttentionConfig:
    """Without precise_delta at any length: attention alone differs, and so were they run before it had a default."""
    return AttentionConfig(name, precise_delta=False)


def _stable(options: Options) -> AttentionConfig:
    """Without precise_delta the model of 4096 diverges after 1,800 steps (kernels/log/hopper_backward.md)."""
    on_gpu = options.device.type == "cuda"
    return AttentionConfig("flash", precise_delta=True) if on_gpu else _attention("auto")


def _context_config(settings: Settings, options: Options, context: int, seed: int) -> Config:
    base = base_config(settings, options)
    block = max(settings.contexts)
    return replace(
        base,
        model=ModelConfig(
            None, context, settings.context_layers, settings.context_heads, settings.context_width
        ),
        data=replace(data_config(settings.code, settings.code_tokenizer, settings, options), block_len=block),
        attention=_stable(options),
        optimizer=replace(base.optimizer, lr=settings.context_lr),
        trainer=replace(
            base.trainer,
            steps=settings.context_steps,
            micro_batch=max(1, settings.context_micro_tokens // context),
            eval_every=max(1, settings.context_steps // 16),
            keep_best=True,
        ),
        init_seed=seed,
    )


def data_config(globs: tuple[str, ...], tokenizer: str, settings: Settings, options: Options) -> DataConfig:
    workers = 1 if options.tiny else None
    if globs:
        return DataConfig("text_files", tokenizer, settings.cache_dir, files=list(globs), workers=workers)
    roots = [str(Path(json.__file__).parent)] if options.tiny else []
    return DataConfig("python_source", "bytes", settings.cache_dir, roots=roots, workers=workers)


def wanted(part: str, name: str, settings: Settings) -> bool:
    return part in settings.parts and (not settings.only or name in settings.only)
