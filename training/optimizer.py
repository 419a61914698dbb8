"""AdamW, and which parameters weight decay touches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    # Peak learning rate; the schedule scales it.
    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    # Decay the token and position embeddings as well (nanoGPT does; the FlashAttention recipe does not).
    decay_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}; it must be above 0.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay is {self.weight_decay}; it must be 0 or more.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {list(self.betas)}; it must be two numbers in [0, 1).")


def parameter_groups(
    model: torch.nn.Module, weight_decay: float, decay_embeddings: bool = False
) -> list[dict]:
    """Split the parameters into decayed (matrices) and not decayed (biases, norms, by default embeddings).

    A tied output head is the embedding's own parameter, so it follows the embedding.
    """
    from torch import nn

    kept = (nn.LayerNorm,) if decay_embeddings else (nn.LayerNorm, nn.Embedding)
    undecayed = {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(module, kept) or name.endswith("bias")
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if id(p) not in undecayed], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in undecayed], "weight_decay": 0.0},
    ]


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW in torch's fused form, which both CPU and CUDA have."""
    import torch

    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay, config.decay_embeddings),
        lr=config.lr,
        betas=tuple(config.betas),
        eps=config.eps,
        fused=True,
    )
