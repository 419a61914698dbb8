"""Whether a training run has diverged, and where it shows."""

from __future__ import annotations

import math

import torch


def fault(
    loss: float, norm: float, grad_norms: torch.Tensor, model: torch.nn.Module, scaler: torch.amp.GradScaler
) -> str | None:
    """What is wrong with a step, None if nothing.

    loss: its mean over all ranks. norm: of all gradients; grad_norms: of each parameter's that is trained, in order.
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
