"""The settings of several ranks. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Shard(Enum):
    none = "none"  # every rank holds all: data parallel
    optimizer = (
        "optimizer"  # each keeps its part of gradients and optimizer state; parameters are whole for a step
    )
    full = "full"  # and of the parameters, gathered a few blocks at a time


class Recompute(Enum):
    none = "none"  # all activations are kept for the backward
    attention_kept = "attention_kept"  # a block keeps its input and what its attention returned
    block = "block"  # a block keeps its input alone


class GradientDtype(Enum):
    fp32 = "fp32"  # the sum of the ranks as one rank would compute it, to rounding
    bf16 = "bf16"  # half the bytes: the gradients' dtype under precision=bf16, rounded again in the sum over ranks


@dataclass
class ParallelConfig:
    """What each of several ranks holds and exchanges (docs/many-gpus.md)."""

    # What is split over the ranks, so that a model which one GPU cannot hold fits on several.
    shard: Shard = Shard.none
    # Blocks of a model in parts that are gathered at once, and whose gradients are reduced at once. null: as many as
    # an H200 computes in 12 ms, so that it seldom waits for its host (training/parallel/shard.py).
    blocks_at_once: int | None = None
    # How many adjacent ranks share each sequence, so that it may be longer than one GPU holds: keys and values travel
    # between them (kernels/ring).
    context: int = 1
    # Have these ranks gather a layer's keys and values at once instead. null: if a sequence is so short that a ring
    # would wait for the host, keys and values fit (kernels/ring/gathered.py), and no documents are packed.
    gather_keys: bool | None = None
    # Activations that the backward recomputes instead of keeping them; useful on one GPU, too.
    recompute: Recompute = Recompute.none
    # The dtype in which ranks exchange gradients.
    gradient_dtype: GradientDtype = GradientDtype.fp32
    # Seconds after which a rank that does nothing, while others wait for it, is taken for dead: the run is saved and
    # ends. Such a rank is named long before, and a dead one within half a minute. Saving may take as long, no longer.
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.blocks_at_once is not None and self.blocks_at_once < 1:
            raise ValueError(f"parallel.blocks_at_once is {self.blocks_at_once}; it must be at least 1.")
        if self.context < 1:
            raise ValueError(f"parallel.context is {self.context}; it must be at least 1.")
        if not self.timeout > 0:
            raise ValueError(f"parallel.timeout is {self.timeout}; it must be above 0 seconds.")
