"""Muon for the matrices of the blocks and AdamW for all other parameters, as one optimizer.

Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon) moves a matrix by its momentum with every singular value
made about 1, by five Newton-Schulz steps in bfloat16. torch.optim.Muon computes it, here with Nesterov momentum and
adjust_lr_fn="match_rms_adamw": a step is 0.2 sqrt(max(rows, columns)) times the learning rate (Liu et al. 2025, arXiv
2502.16982, section 2.2), which is as long as AdamW's. So one learning rate and one weight decay serve both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

Rows = dict[nn.Parameter, list[int]]


def matrices(model: nn.Module) -> Rows:
    """The matrices of the blocks, each with the number of rows of every map that is in it.

    c_attn holds three, for q, k and v, which Jordan orthogonalises separately; the others hold one.
    """
    rows = {}
    for name, parameter in model.h.named_parameters():
        if parameter.dim() == 2 and parameter.requires_grad:
            rows[parameter] = model.config.qkv_rows if "c_attn" in name else [parameter.size(0)]
    return rows


class MuonAdamW(Optimizer):
    """A torch Muon and a torch AdamW behind one optimizer. The first group is Muon's, the others are AdamW's.

    Both share this one's state. Muon steps views of the parameters and momenta, of c_attn three.
    """

    def __init__(self, rows: Rows, adamw: AdamW, lr: float, weight_decay: float, momentum: float) -> None:
        self.rows, self.adamw = rows, adamw
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        parts = [part for parameter in rows for part in parameter.detach().split(rows[parameter])]
        self.muon = Muon(parts, **options, adjust_lr_fn="match_rms_adamw")
        super().__init__([{"params": [*rows], **options}, *adamw.param_groups], {})
        self.state.update(adamw.state)
        for parameter in rows:
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        self._share()

    def _share(self) -> None:
        """Give both this optimizer's state and groups, which loading a state dict replaces."""
        self.adamw.state, self.adamw.param_groups = self.state, self.param_groups[1:]
        momenta = [
            self.state[parameter]["momentum_buffer"].split(self.rows[parameter]) for parameter in self.rows
        ]
        parts = self.muon.param_groups[0]["params"]
        for part, momentum in zip(parts, sum(momenta, ()), strict=True):
            self.muon.state[part] = {"momentum_buffer": momentum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        (own,) = self.muon.param_groups
        own.update({name: value for name, value in self.param_groups[0].items() if name != "params"})
        gradients = [parameter.grad.split(self.rows[parameter]) for parameter in self.rows]
        for part, gradient in zip(own["params"], sum(gradients, ()), strict=True):
            part.grad = gradient
        self.muon.step()
        for part in own["params"]:  # or the gradients' memory would be held until the next step
            part.grad = None
        self.adamw.step()
