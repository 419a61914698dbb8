"""What is done to each block of the model: activation checkpointing, torch.compile one at a time, its time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model.gpt import GPT

from ..config import ConfigError
from ..precision import compiled
from .config import Recompute

# Attentions that are one operator, whose result can be kept.
_ONE_OPERATOR = ("flash", "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
# How those operators' names begin; _varlen_attn is torch's for packed documents.
_OPERATORS = ("flash_forward", "ring_forward", "_scaled_dot_product_", "_varlen_attn")


def check_recompute(how: Recompute, attention: str) -> None:
    """Raise ConfigError where the attention has no result to keep."""
    if how is Recompute.attention_kept and attention not in _ONE_OPERATOR:
        raise ConfigError(
            f"parallel.recompute=attention_kept needs an attention that is one operator, not {attention}: "
            f"{', '.join(_ONE_OPERATOR)}; or use parallel.recompute=block."
        )


def recompute(model: GPT, how: Recompute) -> None:
    """Have each block keep its input alone, or with its attention's result, and compute the rest in the backward.

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
    """Have each block's forward be a phase of its own: in parts, it is where a rank waits for no other."""
    for block in model.h:
        block.forward = partial(_timed, begins, block.forward)


def _timed(begins: Callable[[str], None], forward: Callable[..., Any], *tensors: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():  # an evaluation, whose time nobody asks for
        return forward(*tensors, **named)
    begins("blocks")
    result = forward(*tensors, **named)
    begins("forward_backward")
    return result


def compile_blocks(model: GPT, dtype: torch.dtype) -> None:
    """As `precision.compiled`, in pieces between which FSDP gathers parameters, and DDP sends gradients."""
    for block in model.h:
        block.forward = compiled(block.forward, dtype)
    model.loss = compiled(model.loss, dtype)
