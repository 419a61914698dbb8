"""Copies a model's state to the CPU while its training stream may wait for ever for a rank that is lost."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def aside(device: torch.device) -> AbstractContextManager:
    """Context: a stream other than the training's, which may wait for ever for the gradients of the lost rank.

    It has another priority, since streams of one priority share eight queues of the device, and the exchange of each
    bucket leaves one of them waiting. Not measured on a GPU yet.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device, priority=-1))


def snapshot(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, updates: Tensor
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(updates, the model's state dict, the optimizer's), all on the CPU and from between two updates.

    To be called within `aside`. An update that is queued on the training's stream may run meanwhile; then everything
    is copied again.

    updates: int64 (2,), how many have begun and how many have ended, counted on the training's stream.
    """
    while True:
        ended = int(updates[1])
        copies = tree_map_only(
            Tensor, lambda each: each.detach().cpu().clone(), (model.state_dict(), optimizer.state_dict())
        )
        if int(updates[0]) == ended:
            return ended, *copies
