"""This project's own aims for attention across GPUs, which `python -m reproduce ring` measures."""

from __future__ import annotations

from reproduce.experiment import Results, pick
from reproduce.ring import RING, TORCH, median, not_hidden

from .aims import Aim


def aims(results: Results) -> list[Aim]:
    """No slower than PyTorch's context parallelism with its FlashAttention-2."""
    found = []
    for sample in pick(results, kind="time"):
        if not {RING, TORCH} <= set(sample["ms"]):
            continue
        ratio = median(sample, RING) / median(sample, TORCH)
        what = (
            f"ring, {sample['length']} tokens on {sample['ranks']} GPUs: time over PyTorch's context_parallel"
        )
        why = f"{not_hidden(sample):.0%} of the exchange is not hidden"
        found.append(Aim(what, f"{ratio:.2f}x", "1x at most", ratio <= 1, why))
    return found
