"""The state of a model whose device may wait for a rank that is lost."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def snapshot(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, updates: Tensor
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(updates, the model's state dict, the optimizer's), all on the CPU and from between two updates.

    The stream of the training may wait for ever for the other rank's gradients, so it is copied on another one. An
    update that is queued before that wait may run meanwhile; then it is copied again.

    updates: int64 (2,), how many have begun and how many have ended, counted on the stream of the training.
    """
    on_gpu = updates.is_cuda
    with torch.cuda.stream(torch.cuda.Stream(updates.device)) if on_gpu else nullcontext():
        while True:
            ended = int(updates[1])
            copies = tree_map_only(
                Tensor, lambda each: each.detach().cpu().clone(), (model.state_dict(), optimizer.state_dict())
            )
            if int(updates[0]) == ended:
                return ended, *copies
