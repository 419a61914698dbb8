"""The rows of text that a run prints: its plan before the first step, its result after the last."""

from __future__ import annotations

import os
import shlex
from enum import Enum
from pathlib import Path
from typing import Any

from . import checkpoint
from .config import Config, Layers, ModelConfig, TrainerConfig
from .console import SPREAD, changes, count, plural, speed_range
from .environment import device_name
from .parallel.config import ParallelConfig, Recompute, Shard
from .plan import Plan

Rows = list[tuple[str, str]]


def banner(plan: Plan) -> Rows:
    """The plan as (name, value) rows: what really runs, next to what was asked for where they differ."""
    config, model, ranks = plan.config, plan.config.model, plan.world
    computation, corpus = plan.computation, plan.corpus
    runs = f"{computation.facts()['dtype']}, {'torch.compile' if computation.compiled else 'eager'}"
    if computation.graphs:
        runs += ", CUDA graphs"
    if os.environ.get("TRITON_INTERPRET") == "1":
        runs += ", Triton kernels interpreted"
    asked = "" if config.attention.name == computation.attention else f" (requested: {config.attention.name})"
    tier = f", {computation.attention_tier} kernels" if computation.attention_tier else ""
    tier += f" ({computation.why_portable})" if computation.why_portable else ""
    tier += ", precise delta" if computation.precise_delta else ""
    tokens = config.trainer.steps * config.trainer.batch_tokens
    batch = sequences = f"{plural(computation.micro_batch, 'sequence')} of {model.seq_len}"
    length = "no steps: evaluation only"
    if config.trainer.steps:
        batch = f"{config.trainer.batch_tokens:,} tokens a step: {sequences}"
        batch += f" x {computation.accumulation} accumulated" if computation.accumulation > 1 else ""
        length = (
            f"{plural(config.trainer.steps, 'step')}, {count(tokens)} tokens, "
            f"{_epochs(corpus.train.epochs(tokens))} epochs"
        )
    within = ", within documents" if config.data.document_mask else ""
    rows = [
        ("device", f"{device_name(ranks.device)}{f' x {ranks.size}' if ranks.size > 1 else ''}, {runs}"),
        ("attention", computation.attention + tier + asked + within),
        ("layers", f"{computation.block.value} blocks{_why(model)}, {computation.loss.value} loss"),
        ("model", f"{count(plan.shape.num_parameters())} parameters: {_sizes(model)}"),
        (
            "data",
            f"{corpus.name}, {config.data.tokenizer}: {count(corpus.train.tokens)} training and "
            f"{count(corpus.val.tokens)} validation tokens",
        ),
        ("batch", batch + (f" x {plan.layout.data_size} ranks" if plan.layout.data_size > 1 else "")),
        ("length", length),
    ]
    if config.trainer.steps:
        rows += [("optimizer", _optimizer(config)), ("schedule", _schedule(config))]
        initial = "" if config.init_seed is None else f", of the initial weights {config.init_seed}"
        rows.append(("seed", f"{config.seed}{initial}"))
    if said := _parallel(config.parallel, ranks.size, computation.gather_keys, plan.blocks_at_once):
        rows.append(("parallel", said))
    if config.trainer.eval_tokens:
        rows.append(
            ("evaluation", f"{config.trainer.eval_tokens:,} tokens each time, at the end all of them")
        )
    if config.trainer.init_from:
        rows.append(
            ("weights", "; ".join(filter(None, [f"from {config.trainer.init_from}", plan.positions])))
        )
    if plan.start.step:
        rows.append(("resumed", f"{plan.start.path}, at step {plan.start.step:,}"))
    if plan.start.changed:
        rows.append(("changed", changes(plan.start.changed)))
    if plan.start.warm_up:
        rows.append(("warm-up", plan.start.warm_up))
    return rows


def unsaved(config: Config) -> str:
    """The warning for a run whose steps a lost rank would take along: sharded, with no checkpoint before its end."""
    trainer = config.trainer
    intervals = trainer.save_every, trainer.eval_every * trainer.keep_best
    saves = any(0 < steps < trainer.steps for steps in intervals)
    if config.parallel.shard is Shard.none or saves or not trainer.steps:
        return ""
    return (
        f"with trainer.save_every={trainer.save_every} nothing is saved before the last step: a rank that is lost "
        "takes its part of the model along, and with it all steps; set it to save at intervals"
    )


def result(summary: dict[str, Any], run_dir: Path, speeds: list[float], trainer: TrainerConfig) -> Rows:
    """The result as rows: quality, speed, memory, and the files. `speeds`: tokens/s from log point to log point."""
    saved = checkpoint.saved(run_dir)  # empty after an evaluation alone
    speed = f"not measured: no step ran{' after the warm-up' if summary['steps'] else ''}"
    if "perf/step_ms" in summary:
        speed = f"{summary['perf/tokens_per_second']:,.0f} tokens/s, {summary['perf/step_ms']:.1f} ms a step"
    if "perf/mfu" in summary:
        speed += f", MFU {summary['perf/mfu']:.1%}"
    peaks = {"allocated": "perf/peak_allocated_gib", "reserved": "perf/peak_reserved_gib"}
    if "perf/peak_resident_gib" in summary:
        peaks = {"resident": "perf/peak_resident_gib"}
    rows = [
        (
            "validation",
            f"loss {summary['val/loss']:.4f}, perplexity {summary['val/perplexity']:.2f}, "
            f"bits per byte {summary['val/bits_per_byte']:.3f} (whole split, {summary['val/tokens']:,} tokens)",
        ),
        *_best(run_dir, trainer, summary["val/tokens"]),
        ("speed", speed),
        *([("", said)] if (said := noise(speeds, "perf/peak_resident_gib" in summary)) else []),
        ("peak memory", ", ".join(f"{summary[key]:.2f} GiB {name}" for name, key in peaks.items())),
        ("time", f"{summary['seconds']:.0f} s"),
        ("metrics", str(run_dir / "metrics.csv")),
        *([("sample more", f'python sample.py {shlex.quote(str(run_dir))} "def "')] if saved else []),
        ("run", str(run_dir)),
    ]
    if in_sweep(run_dir):
        rows.append(("compare", f"python -m reproduce compare {shlex.quote(str(run_dir.parent))}"))
    return rows


def _sizes(model: ModelConfig) -> str:
    dropout = f", dropout {model.dropout:g}" if model.dropout else ""
    sizes = f"{plural(model.n_layer, 'layer')}, {plural(model.n_head, 'head')}, {model.n_embd} wide"
    return f"{sizes}, vocabulary {model.vocab_size:,}{_switches(model)}{dropout}"


def _optimizer(config: Config) -> str:
    optimizer, clip = config.optimizer, config.trainer.grad_clip
    said = [
        optimizer.name.value,
        f"learning rate {optimizer.lr:g}",
        f"weight decay {optimizer.weight_decay:g}{' of embeddings too' if optimizer.decay_embeddings else ''}",
        f"gradients clipped to {clip:g}" if clip else "",
    ]
    return ", ".join(filter(None, said))


def _schedule(config: Config) -> str:
    schedule = config.schedule
    said = schedule.decay.value
    if schedule.final_fraction is not None:
        said += f" to {schedule.final_fraction:g}{' of the learning rate' * (schedule.final_fraction > 0)}"
    if schedule.decay_fraction is not None:
        said += f", over the last {schedule.decay_fraction:.4g} of the steps"
    warm_up = round(schedule.warmup_fraction * config.trainer.steps)
    return said + (f", after {plural(warm_up, 'step')} of warm-up" if warm_up else "")


def _parallel(parallel: ParallelConfig, ranks: int, gather_keys: bool, at_once: int | None) -> str:
    """In words, what each rank holds, exchanges and recomputes; empty where one rank recomputes nothing."""
    holds = {
        Shard.none: "each rank holds all",
        Shard.optimizer: "gradients and optimizer state in parts",
        Shard.full: "parameters, gradients and optimizer state in parts",
    }
    blocks = f", {plural(at_once, 'block')} at once" if at_once else ""
    said = (
        [holds[parallel.shard] + blocks, f"gradients exchanged in {parallel.gradient_dtype.value}"]
        if ranks > 1
        else []
    )
    if parallel.context > 1:
        how = "all keys gathered" if gather_keys else "in a ring"
        said.insert(0, f"{parallel.context} ranks share each sequence, {how}")
    again = {
        Recompute.block: "blocks are computed again",
        Recompute.attention_kept: "blocks but for attention are computed again",
    }
    return ", ".join([*said, *filter(None, [again.get(parallel.recompute)])])


def in_sweep(run_dir: Path) -> bool:
    """Whether -m made the directory: Hydra leaves multirun.yaml in the sweep's folder."""
    return (run_dir.parent / "multirun.yaml").is_file()


def _why(model: ModelConfig) -> str:
    """If block=auto and the model is why it does not take the fused blocks: the reason, in brackets. Else empty."""
    if model.block is not Layers.auto:
        return ""
    if lacking := model.fused_lacks:
        return f" (the fused ones have no {lacking})"
    return " (the fused ones are not measured with rmsnorm)" if model.rmsnorm else ""


def _switches(model: ModelConfig) -> str:
    """The parts that GPT-2 does not have: ", rope, mlp swiglu"."""
    details = {name: getattr(model, name) for name in ("window_pattern", "rope_theta")}
    details = {name: value for name, value in details.items() if value != getattr(ModelConfig, name)}
    values = (
        (name, value.value if isinstance(value, Enum) else value)
        for name, value in (model.switches | details).items()
    )
    return "".join(f", {name}" if value is True else f", {name} {value}" for name, value in values)


def _epochs(number: float) -> str:
    if number < 0.001:
        return "less than 0.001"
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _best(run_dir: Path, trainer: TrainerConfig, tokens: int) -> Rows:
    """The row about the best checkpoint, if one is kept. tokens: of the whole validation split."""
    if not (best := checkpoint.best(run_dir)):
        return []
    ended = "" if trainer.keep_best else ", the best while trainer.keep_best was on"
    where = f"{run_dir / checkpoint.FOLDER / checkpoint.BEST}: {best.path.name}{ended}"
    part = f" (first {best.tokens:,} tokens)" if best.tokens != tokens else ""
    return [("best", f"loss {best.loss:.4f}{part}, {where}")]


def noise(speeds: list[float], on_cpu: bool) -> str:
    """The remark that other programs slowed the run, if its speed varied by more than SPREAD; else empty."""
    slow, fast = speed_range(speeds) or (1, 1)
    if fast <= SPREAD * slow:
        return ""
    spins = os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
    remedy = "; with OMP_WAIT_POLICY=passive a run suffers less" if on_cpu and spins else ""
    return f"varied from {slow:,.0f} to {fast:,.0f} tokens/s: other programs used the machine{remedy}"
