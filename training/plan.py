"""The Plan of a run: what every `auto` and null of its config became, its corpus, and the step that it begins at."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from data.loader import Corpus
from data.tokenizer import findable, load_tokenizer
from kernels import attention_tier, bind, breaks_graph, why_portable
from model.gpt import GPT, AttentionFn
from model.modern import build_gpt
from model.part import compute_part

from . import checkpoint
from .config import DRIFTS_FROM, Config, ConfigError, Layers, ModelConfig
from .corpus import named_corpus, prepare_corpus
from .cuda_graphs import resolve_graphs
from .distributed import World
from .init_from import InitialWeights, initial_weights
from .layers import make_gpt, resolve_layers
from .parallel.blocks import check_recompute
from .parallel.config import Shard
from .parallel.context import attention_of, check_context, in_ring, part_of, resolve_gather_keys
from .parallel.mesh import Layout, check_shard, layout_of
from .parallel.shard import blocks_at_once
from .precision import resolve_precision
from .resume import AUTO, FROM_THE_START, Start, resume_path, start_at


@dataclass(frozen=True)
class Computation:
    """How a run computes its steps: attention, layers, precision, compilation and micro-batches, as resolved."""

    attention: str
    attention_fn: AttentionFn  # of whole sequences; ranks that share sequences train with `in_ring` instead
    attention_tier: str | None  # which of the backend's sets of kernels runs; None: it has only one
    why_portable: str | None  # why attention on a Hopper GPU runs the portable kernels; for the banner
    precise_delta: bool
    dtype: torch.dtype  # of activations and matrix products, by autocast
    loss: Layers  # torch or fused, as the next
    block: Layers
    compiled: bool
    gather_keys: bool  # ranks that share a sequence gather all its keys and values, and form no ring
    graphs: bool  # micro-steps are replayed as CUDA graphs
    whole: bool  # the attention causes no graph break: torch.compile makes the model one graph
    accumulation: int  # micro-steps per optimizer step
    micro_batch: int  # sequences per micro-step and rank

    def facts(self) -> dict[str, Any]:
        return {
            "attention": self.attention,
            "attention_tier": self.attention_tier,
            "precise_delta": self.precise_delta,
            "loss": self.loss.value,
            "block": self.block.value,
            "dtype": str(self.dtype).removeprefix("torch."),
            "compiled": self.compiled,
            "gather_keys": self.gather_keys,
            "cuda_graphs": self.graphs,
        }


@dataclass(frozen=True)
class Plan:
    """What is decided before a run's first step. Nothing changes it later; what reports on the run reads it."""

    config: Config  # with the settings that the tokenizer and the starting point decide filled in
    run_dir: Path
    world: World
    computation: Computation
    corpus: Corpus
    layout: Layout
    positions: str  # what became of trainer.init_from's position embeddings, for the banner
    start: Start

    @cached_property
    def shape(self) -> GPT:
        """The model on the meta device, without memory: to count its parameters and FLOPs."""
        with torch.device("meta"):
            return build_gpt(self.config.model, self.computation.attention_fn)

    @cached_property
    def blocks_at_once(self) -> int | None:
        """How many blocks of a sharded model are gathered at once; None: the model is not sharded."""
        parallel, tokens = self.config.parallel, self.computation.micro_batch * self.config.model.seq_len
        if parallel.shard is Shard.none:
            return None
        return parallel.blocks_at_once or blocks_at_once(self.shape, tokens // self.layout.context_size)

    def facts(self) -> dict[str, Any]:
        """The content of facts.json: what was resolved, and sizes."""
        return {
            **self.computation.facts(),
            "blocks_at_once": self.blocks_at_once,
            "parameters": self.shape.num_parameters(),
            "flops_per_token": self.shape.flops_per_token(self.config.model.seq_len),
            "world_size": self.world.size,
            "corpus": self.corpus.directory.name,
            "resumed": self.start.history,
        }

    def model(self, generator: torch.Generator) -> GPT:
        """A new model, its weights drawn on the CPU: the same for any device and with any attention."""
        computation = self.computation
        layers = {"loss": computation.loss, "block": computation.block}
        attention, part = computation.attention_fn, part_of(self.layout)
        if part:
            attention = in_ring(computation.attention, self.config, self.layout, computation.gather_keys)
        model = make_gpt(self.config.model, attention, **layers, generator=generator)
        if part:
            compute_part(model, part)
        return model

    def autocast(self) -> AbstractContextManager:
        dtype = self.computation.dtype
        return torch.autocast(self.world.device.type, dtype, enabled=dtype is not torch.float32)


def resolve(config: Config, run_dir: Path, ranks: World) -> tuple[Plan, InitialWeights | None]:
    """The plan of a run, and the weights that trainer.init_from names.

    What cannot work is refused here, first by checks that take no time, then by steps that do, such as tokenising.
    Raises ConfigError, data.DataError or kernels.AttentionError.
    """
    # Before the tokenizer is downloaded, whose error would hide these.
    layout, computation = checked(config, ranks)
    resume = ranks.share(resume_path(config, run_dir))  # rank 0 decides
    if resume and config.trainer.resume == AUTO:  # the run in run_dir began with those weights
        config = _with_trainer(config, init_from=None)
    initial = initial_weights(config) if config.trainer.init_from else None
    start = start_at(resume) if resume else FROM_THE_START
    model = _with_vocabulary(config)
    corpus = prepare_corpus(config.data, quiet=not ranks.is_main)
    config = dataclasses.replace(
        config,
        model=model,
        # An absolute path: sampling may run in another folder.
        data=dataclasses.replace(config.data, tokenizer=findable(config.data.tokenizer)),
    )
    # The checkpoint's own path: which one is the newest of its run may change.
    config = _with_trainer(config, init_from=initial.source if initial else start.init_from)
    positions = initial.positions if initial else ""
    plan = Plan(config, run_dir, ranks, computation, corpus, layout, positions, FROM_THE_START)
    if resume:
        plan = dataclasses.replace(plan, start=start.checked(config, corpus, plan.facts(), run_dir))
        _check_best(plan)
    return plan, initial


def checked(config: Config, ranks: World) -> tuple[Layout, Computation]:
    """The parts of a plan that take no time to resolve; raises as `resolve` does."""
    _check_whole(config)
    named_corpus(config.data)
    check_context(config, ranks)
    layout = layout_of(config.parallel, ranks)
    return layout, _computation(config, ranks, layout)


def _check_best(plan: Plan) -> None:
    """Raise ConfigError where the best checkpoint so far was chosen by a loss over other tokens than this run's."""
    best = plan.world.share(checkpoint.best(plan.run_dir)) if plan.config.trainer.keep_best else None
    if best is None or best.path > checkpoint.at(plan.run_dir, plan.start.step):
        return
    whole = plan.corpus.val.tokens - 1
    tokens = min(plan.config.trainer.eval_tokens or whole, whole)
    if best.tokens != tokens:
        kept = plan.run_dir / checkpoint.FOLDER / checkpoint.BEST
        before = "null" if best.tokens == whole else best.tokens
        raise ConfigError(
            f"trainer.keep_best: {kept} is the best by its loss over {best.tokens:,} tokens, to which one over "
            f"{tokens:,} does not compare: use trainer.eval_tokens={before}, or remove it to begin anew."
        )


def _check_whole(config: Config) -> None:
    """Raise ConfigError for settings that need whole models or sequences, where ranks have parts of them."""
    parallel = config.parallel
    splits = {"parallel.shard": parallel.shard is not Shard.none, "parallel.context": parallel.context > 1}
    instead = {
        "hellaswag": "evaluate its checkpoints on one GPU, with trainer.init_from=CHECKPOINT trainer.steps=0",
        "sample_every": "sample from its checkpoints with sample.py",
    }
    for name, remedy in instead.items():
        if getattr(config.trainer, name) and (why := [each for each, on in splits.items() if on]):
            raise ConfigError(
                f"trainer.{name} needs a rank with the whole model and whole sequences, which {why[0]} leaves none; "
                f"leave it out, and {remedy}."
            )


def _with_trainer(config: Config, **settings: Any) -> Config:
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **settings))


def _computation(config: Config, ranks: World, layout: Layout) -> Computation:
    accumulation, micro_batch = config.accumulation_steps(layout.data_size)
    dtype = resolve_precision(config.trainer.precision, ranks.device)
    check_shard(config, ranks, dtype)
    request = {
        "device": ranks.device,
        "dtype": dtype,
        "head_dim": config.model.head_dim,
        "tier": config.attention.tier,
        "dropout_p": config.model.dropout,
        **config.model.attention_features,
        "cu_seqlens": config.data.document_mask or None,
        "precise_delta": bool(config.attention.precise_delta),
    }
    resolve = partial(attention_of, config, **request)
    name, attention = resolve(config.attention.name)
    check_recompute(config.parallel.recompute, name, resolve)
    if config.attention.precise_delta is None:
        request["precise_delta"] = _drifts(config, name, dtype)
    shape = {
        "length": config.model.seq_len // layout.context_size,
        "heads": micro_batch * config.model.n_head,
    }
    tier, why = (ask(name, **request, **shape) for ask in (attention_tier, why_portable))
    if request["precise_delta"]:
        attention = bind(attention, precise_delta=True)
    loss = resolve_layers(config.model.loss, "model.loss", ranks.device)
    lacking, unmeasured = config.model.fused_lacks, config.model.rmsnorm
    block = resolve_layers(config.model.block, "model.block", ranks.device, lacking, unmeasured)
    wanted = config.trainer.compile
    compiled = ranks.device.type == "cuda" if wanted is None else wanted
    gather_keys = resolve_gather_keys(config, layout, micro_batch)
    whole = not breaks_graph(name, **request)
    graphs = resolve_graphs(
        config.trainer.cuda_graphs, compiled, ranks, config.parallel, gather_keys=gather_keys,
        documents=config.data.document_mask, whole=whole,
    )  # fmt: skip
    return Computation(
        name, attention, tier, why, request["precise_delta"], dtype, loss, block, compiled,
        gather_keys, graphs, whole, accumulation, micro_batch,
    )  # fmt: skip


def _drifts(config: Config, attention: str, dtype: torch.dtype) -> bool:
    """What attention.precise_delta is where the config leaves it null: keep the rounding error of attention's output?

    Without it, in bf16, a model of 25 M parameters diverged at context 4096, and did not at 2048
    (kernels/log/hopper_backward.md). On the Hopper kernels it costs 1 to 2 % of attention's time there. A ring does
    not have it; nor does tier=hopper with every feature.
    """
    asked = config.attention
    can = attention == "flash" and config.parallel.context == 1 and asked.tier != "hopper"
    return can and dtype is torch.bfloat16 and config.model.seq_len >= DRIFTS_FROM


def _with_vocabulary(config: Config) -> ModelConfig:
    """The model's config with vocab_size and document_end, which the tokenizer decides."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    if config.model.vocab_size not in (None, tokenizer.n_vocab):
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}, but the tokenizer {config.data.tokenizer} has "
            f"{tokenizer.n_vocab} tokens; leave model.vocab_size out."
        )
    if config.model.document_end is not None:
        raise ConfigError(
            "model.document_end is set from the tokenizer; to keep attention within documents, use "
            "data.document_mask=true."
        )
    document_end = tokenizer.eot_token if config.data.document_mask else None
    return dataclasses.replace(config.model, vocab_size=tokenizer.n_vocab, document_end=document_end)
