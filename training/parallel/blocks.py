"""Wraps each block of the model: activation checkpointing, torch.compile of a block at a time, timing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kernels import AttentionError
from model.gpt import GPT

from ..config import ConfigError
from ..precision import compiled
from .config import Recompute

# Attentions that are one operator, whose result can be kept.
_ONE_OPERATOR = ("flash", "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
# How those operators' names begin; _varlen_attn is torch's for packed documents.
_OPERATORS = ("flash_forward", "ring_forward", "_scaled_dot_product_", "_varlen_attn")


def check_recompute(how: Recompute, attention: str, resolve: Callable[[str], object]) -> None:
    """Raise ConfigError where the attention has no result to keep.

    resolve: takes an attention's name; raises AttentionError if that cannot be used either.
    """
    if how is not Recompute.attention_kept or attention in _ONE_OPERATOR:
        return
    able = []
    for name in _ONE_OPERATOR:
        with suppress(AttentionError):
            resolve(name)
            able.append(name)
    others = f"attention={' or '.join(able)}, or " if able else ""
    raise ConfigError(
        f"parallel.recompute=attention_kept needs an attention that is one operator, not {attention}; "
        f"use {others}parallel.recompute=block."
    )


def recompute(model: GPT, how: Recompute) -> None:
    """Have each block keep only its input, or also its attention's result, and recompute the rest in the backward.

    Chen et al. 2016, arXiv 1604.06174. Names of modules and parameters stay as they are.
    """
    if how is Recompute.none:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how is Recompute.attention_kept:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    for block in model.h:
        block.forward = partial(checkpoint, block.forward, **options)


def _keep_attention(_context: Any, operator: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    attends = str(operator.name()).partition("::")[2].startswith(_OPERATORS)
    return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE


def time_blocks(model: GPT, begins: Callable[[str], None]) -> None:
    """Time a sharded model's blocks as the phase `blocks`, and what is between them as `exchange`, in both passes.

    FSDP gathers and reduces in hooks around a block's `forward`, outside of what it computes. So in `blocks` a rank
    waits for no other. `exchange` is communication that no computation hides, the copies into whole parameters, the
    host's time for both, the embeddings before the first block, and their gradients after it. A micro-step begins
    with it. Between blocks that are gathered at once it takes no time.
    """
    for block in model.h:
        block.forward = partial(_timed, begins, block is model.h[-1], block.forward)


def _timed(
    begins: Callable[[str], None],
    last: bool,
    forward: Callable[..., Any],
    stream: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    if not torch.is_grad_enabled():  # an evaluation, whose time nobody asks for
        return forward(stream, *rest, **named)
    stream = _begun_by_gradient(stream, partial(begins, "exchange"))  # the block's backward is done
    begins("blocks")
    result = _begun_by_gradient(forward(stream, *rest, **named), partial(begins, "forward_backward"))
    begins("forward_backward" if last else "exchange")
    if last:  # the loss's backward is done
        for each in (result,) if isinstance(result, Tensor) else result:
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda _: begins("exchange"))  # before FSDP's hook, which waits for parts
    return result


def _begun_by_gradient(stream: Any, begin: Callable[[], None]) -> Any:
    """Pass on what is between two blocks (a tensor, or a Stream). begin: called once all its gradients are there."""
    if isinstance(stream, Tensor):
        return _Begins.apply(begin, stream)[0]
    of = [place for place, each in enumerate(stream) if isinstance(each, Tensor) and each.requires_grad]
    found = dict(zip(of, _Begins.apply(begin, *(stream[place] for place in of)), strict=True))
    return type(stream)(*(found.get(place, each) for place, each in enumerate(stream)))


class _Begins(torch.autograd.Function):  # the identity; its backward calls `begin`
    @staticmethod
    def forward(ctx: Any, begin: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.begin = begin
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in tensors)  # FSDP warns of views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.begin()
        return None, *gradients


def compile_blocks(model: GPT, dtype: torch.dtype) -> None:
    """`precision.compiled`, of each block and the loss by itself: between them FSDP gathers, and DDP sends."""
    for block in model.h:
        block.forward = compiled(block.forward, dtype)
    model.loss = compiled(model.loss, dtype)
