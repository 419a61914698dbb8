"""AdamW, or Muon together with it, and which parameters weight decay touches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class OptimizerName(Enum):
    adamw = "adamw"  # Loshchilov & Hutter 2019, arXiv 1711.05101
    muon = "muon"  # Jordan 2024, for the matrices of the blocks; AdamW for all else


@dataclass
class OptimizerConfig:
    """AdamW, or Muon together with it (training/muon.py); both take the same learning rate and weight decay."""

    # Which one; `optimizer=muon` sets it too.
    name: OptimizerName = OptimizerName.adamw
    # Peak learning rate; the schedule scales it.
    lr: float = 6e-4
    # Decay of AdamW's moments: of the mean, and of the mean square.
    betas: tuple[float, float] = (0.9, 0.95)
    # Decay of Muon's mean of the gradients; AdamW has none.
    momentum: float = 0.95
    # Added to the root of the mean square.
    eps: float = 1e-8
    # Decoupled from the gradient: a weight shrinks by lr * weight_decay a step. Biases and norms do not.
    weight_decay: float = 0.1
    # Decay the token and position embeddings as well (nanoGPT does; the FlashAttention recipe does not).
    decay_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"optimizer.{name} is {getattr(self, name)}; it must be a finite number above 0."
                )
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"optimizer.weight_decay is {self.weight_decay}; it must be a finite number, 0 or more."
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.momentum is {self.momentum}; it must be in [0, 1).")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {list(self.betas)}; it must be two numbers in [0, 1).")


def parameter_groups(
    model: torch.nn.Module, weight_decay: float, decay_embeddings: bool = False
) -> list[dict]:
    """Split the parameters into decayed (matrices) and not decayed (biases, norms, sinks, by default embeddings).

    A tied output head is the embedding's own parameter, so it follows the embedding.
    """
    from torch import nn

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    undecayed = set() if decay_embeddings else embeddings
    undecayed |= {id(parameter) for parameter in model.parameters() if parameter.dim() < 2}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if id(p) not in undecayed], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in undecayed], "weight_decay": 0.0},
    ]


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that `config` names, with its moments.

    The moments are allocated here, not in the first step: a run that has no room for them ends before it compiles,
    and the peak memory seen while CUDA graphs are recorded includes them. The allocator does not see what a replay
    uses: for GPT-2 small it reported 7.9 GiB, where it reports 8.8 without graphs.
    """
    groups = parameter_groups(model, config.weight_decay, config.decay_embeddings)
    if config.name is OptimizerName.adamw:
        return adamw(groups, config)
    from .muon import MuonAdamW, matrices

    rows = matrices(model)
    others = [{**group, "params": [p for p in group["params"] if p not in rows]} for group in groups]
    return MuonAdamW(rows, adamw(others, config), config.lr, config.weight_decay, config.momentum)


def adamw(groups: list[dict], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW in torch's fused form, which CPU and CUDA both have."""
    import torch

    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas), eps=config.eps, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


def update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    clip: float = 1.0,
    keep_gradients: bool = False,
) -> torch.Tensor:
    """Clip the gradients to a norm, take the optimizer's step, and drop the gradients, or zero them if they are kept.

    If they are kept, the cast copies of weights that `kernels.layers.linear` multiplies by are updated, and all of
    this but the norms is one pass of our own where possible (kernels/layers/adamw.py).

    Returns the norm of each parameter's gradient before clipping, float32 (parameters,), still on the device: after
    clipping by a norm that is not finite, the gradients no longer tell where it came from. With an enabled scaler,
    such a norm makes it skip the step.
    """
    import torch

    from kernels.versions import kernels_lack

    ours = keep_gradients and kernels_lack() is None
    scaler.unscale_(optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = torch.stack(torch._foreach_norm([parameter.grad for parameter in parameters]))
    if ours:
        from kernels.layers.adamw import adamw_step, takes
        from kernels.layers.sums import next_sums

        if takes(optimizer) and not scaler.is_enabled():
            adamw_step(optimizer, norms.norm(), clip)
            next_sums(parameters, cast=False)
            return norms
    torch.nn.utils.clip_grads_with_norm_(parameters, clip, norms.norm())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=not keep_gradients)
    if ours:
        next_sums(parameters)
    return norms
