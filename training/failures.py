"""Detects that a run diverges, and words the errors for divergence and full memory, with what to do."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from . import checkpoint
from .config import Config
from .distributed import World
from .parallel.config import Recompute


def fault(
    loss: float, norm: float, grad_norms: torch.Tensor, model: torch.nn.Module, scaler: torch.amp.GradScaler
) -> str | None:
    """Why a run has to give up after a step, in words; None if it need not.

    loss: the mean over all ranks. norm: of all gradients; grad_norms: of each trained parameter's, in order.
    """
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    # In fp16 an infinite gradient skips the step and halves the scale, which is how the scale is found; a scale below
    # 1 means that none will be found.
    if scaler.get_scale() < 1:
        return "fp16 gradients overflow at every gradient scale down to 1, so step after step is skipped; gave up"
    if math.isfinite(norm) or scaler.is_enabled():
        return None
    finite = grad_norms.isfinite().tolist()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    broken = [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
    if not broken:
        return f"the gradient norm is {norm}"
    # The backward begins at the end of the model, so the last of these is nearest to the cause.
    return (
        f"the gradient norm is {norm} (not finite in {len(broken)} of {len(names)} parameters, the last of them "
        f"{broken[-1]})"
    )


def diverged(why: str, done: int, broken: int, run_dir: Path, dtype: torch.dtype, rounded: bool) -> str:
    """The message for a run that ends at step `done`, as it has diverged.

    broken: the step whose weights failed; only an older checkpoint is named. rounded: whether attention's backward
    uses an output that was rounded to 16 bits, from which runs diverge (kernels/log/hopper_backward.md), and which
    precise_delta would avoid.
    """
    kept = [path for path in checkpoint.saved(run_dir) if path < checkpoint.at(run_dir, broken)]
    left = f"the newest checkpoint from before is {kept[-1]}" if kept else "no checkpoint was saved before"
    exact = "attention.precise_delta=true or " if rounded else ""
    wider = "" if dtype is torch.float32 else f", or try {exact}trainer.precision=fp32"
    return f"{why} at step {done}: lower optimizer.lr or raise schedule.warmup_fraction{wider}; {left}."


def out_of_memory(config: Config, ranks: World) -> str:
    """The message for full memory. It names the largest divisor of the micro-batch up to half of it."""
    _, micro_batch = config.accumulation_steps(ranks.size // config.parallel.context)
    full = f"{ranks.device} is out of memory with trainer.micro_batch={micro_batch}"
    if micro_batch == 1:
        again = "" if config.parallel.recompute is Recompute.block else "use parallel.recompute=block, "
        return f"{full}: one sequence at a time is too much; {again}lower model.seq_len or choose a smaller model."
    half = max(n for n in range(1, micro_batch // 2 + 1) if micro_batch % n == 0)
    return (
        f"{full}: use trainer.micro_batch={half}; gradients accumulate, so the global batch stays "
        f"trainer.batch_tokens={config.trainer.batch_tokens}."
    )
