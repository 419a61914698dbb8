"""This project's own aims for attention across GPUs, which `python -m reproduce ring` measures."""

from __future__ import annotations

from reproduce.experiment import Results
from reproduce.ring import RING, TORCH, default, not_hidden, samples
from reproduce.timing import took

from .aims import Aim, held, shown


def aims(results: Results) -> list[Aim]:
    """No slower than PyTorch's context parallelism with its FlashAttention-2."""
    found = []
    for sample in samples(results):
        if {RING, TORCH} <= sample["ms"].keys():
            ours = default(sample, results["settings"])
            where = f"{sample['length']} tokens on {sample['ranks']} GPUs"
            times, theirs = took(sample, ours), took(sample, TORCH)
            what = f"{ours}, {where}: time over PyTorch's context_parallel"
            why = f"{not_hidden(sample):.0%} of the ring's exchange is not hidden"
            met, level = held(over := times / theirs)
            found.append(Aim(what, shown(over, 1), "1x at most", met, why, level))
    return found
