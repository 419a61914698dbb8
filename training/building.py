"""Builds from a Plan the callables that train and evaluate the model, its optimizer and its gradient scaler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from model.gpt import GPT

from .config import ConfigError
from .cuda_graphs import Local, compiled_to_graphs, recorded, replayed, with_sums
from .init_from import InitialWeights
from .optimizer import build_optimizer
from .parallel.blocks import compile_blocks, recompute, time_blocks
from .parallel.config import Recompute, Shard
from .parallel.replicate import replicated
from .parallel.shard import shard
from .plan import Plan
from .precision import cast_together, compiled
from .resume import load_state
from .seeds import stream_seed


@dataclass
class Built:
    """One set of weights in four forms, and what updates it. Exchange: ranks reduce gradients during the backward."""

    model: GPT  # the module itself: for state dicts, generation and checks
    train_model: Callable[..., Tensor]  # (tokens, targets, dropout_seed=) -> loss: a step's last micro-step
    local_model: Callable[..., Tensor]  # the same without an exchange, for the micro-steps before it
    eval_model: nn.Module  # (tokens, targets) -> loss; compiled if training is, never replayed
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    together: bool  # local_model's gradients are taken by `cuda_graphs.add_gradients`, not by loss.backward()


def build(plan: Plan, initial: InitialWeights | None, begins: Callable[[str], None]) -> Built:
    """Build the model with its first or its checkpoint's weights. begins: `Throughput.begins`, to time phases."""
    config, computation, parallel = plan.config, plan.computation, plan.config.parallel
    init_seed = config.seed if config.init_seed is None else config.init_seed
    model = plan.model(torch.Generator().manual_seed(stream_seed(init_seed, "init")))
    if initial:
        model.load_state_dict(initial.state)
    recompute(model, parallel.recompute)
    # torch.compile splits a DDP model at its gradient buckets, but not where blocks are recomputed, and an FSDP model
    # nowhere: those two are compiled a block at a time.
    in_blocks = parallel.shard is not Shard.none or parallel.recompute is not Recompute.none
    if computation.compiled and in_blocks:
        compile_blocks(model, computation.dtype)
    if parallel.shard is Shard.none:
        model.to(plan.world.device)
    else:
        shard(model, plan.layout.mesh, parallel, computation.dtype, plan.blocks_at_once)
        time_blocks(model, begins)
    optimizer = build_optimizer(model, config.optimizer)
    scaler = torch.amp.GradScaler(plan.world.device.type, enabled=computation.dtype is torch.float16)
    if plan.start.checkpoint:
        load_state(plan.start, model, optimizer, scaler)

    train_model: nn.Module = model
    if parallel.shard is Shard.none and plan.world.size > 1:
        ended = partial(begins, "exchange")
        train_model = replicated(model, plan.layout.mesh, parallel.gradient_dtype, ended)
    if computation.graphs and not computation.compiled:
        local = _recorded(model, plan)
        return Built(model, local, local, model, optimizer, scaler, together=True)
    if not computation.compiled and not in_blocks and plan.world.size == 1:
        local = cast_together(model, computation.dtype)
        return Built(model, local, local, model, optimizer, scaler, together=True)
    if not computation.compiled or in_blocks:
        return Built(model, train_model, model, model, optimizer, scaler, together=False)
    dtype, graphs = computation.dtype, partial(compiled_to_graphs, whole=computation.whole)
    trained = local = graphs(model, dtype) if computation.graphs else compiled(Local(model), dtype)
    if train_model is not model:
        # torch.compile around DDP, not inside it: there gradients would be exchanged only after the whole backward.
        trained = (replayed if computation.graphs else compiled)(train_model, dtype)
    return Built(model, trained, local, compiled(model, dtype), optimizer, scaler, computation.graphs)


def _recorded(model: GPT, plan: Plan) -> Callable[..., Tensor]:
    """The uncompiled model's loss, forward and backward as CUDA graphs, without exchange. Called like the model."""
    local, device = with_sums(model, plan.computation.dtype), plan.world.device
    shape = (plan.computation.micro_batch, plan.config.model.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    seeds = [torch.zeros((), dtype=torch.int64, device=device)] if plan.config.model.dropout else []

    def loss(tokens: Tensor, targets: Tensor, dropout_seed: Tensor | None = None) -> Tensor:
        with plan.autocast():
            return local(tokens, targets, dropout_seed=dropout_seed)

    try:
        replay = recorded(model, loss, [tokens, tokens.clone(), *seeds])
    except RuntimeError as error:  # such as torch's attention with dropout, whose seed the host reads
        if "captur" not in str(error):
            raise
        raise ConfigError(
            f"trainer.cuda_graphs=true: attention={plan.computation.attention} in this model cannot be recorded "
            f"({str(error).splitlines()[0]}); leave out trainer.cuda_graphs, or use trainer.compile=true."
        ) from error

    def trained(tokens: Tensor, targets: Tensor, dropout_seed: Tensor | None = None) -> Tensor:
        return replay(tokens, targets, *([] if dropout_seed is None else [dropout_seed]))

    return trained
