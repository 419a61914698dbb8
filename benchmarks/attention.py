"""This project's own aims for attention, which `python -m reproduce attention` measures."""

from __future__ import annotations

import itertools

from kernels import history
from reproduce.experiment import Results, Sample
from reproduce.peers import APPROXIMATE, MASK_NAMES, OURS, STORED_P

from .aims import Aim, judged, over_fastest
from .features import REPEATABLE

NO_LIBRARY = (OURS, "naive", *history.NAMES, STORED_P, *APPROXIMATE)
PASSES = {"forward": "forward", "backward": "backward", "both": "both passes"}
FIGURES = {"fa1": "16 x 8 heads", "fa2": "16k tokens", "gpt2": "GPT-2 small", "stored": "64 x 16 heads"}
FIGURES |= {"beyond": "16k tokens and above"}


def libraries(sample: Sample) -> list[str]:
    """The contenders that are another library's attention, and exact."""
    return [name for name in sample["ms"] if name not in NO_LIBRARY]


def aims(results: Results) -> list[Aim]:
    """No library ahead (`aims.held`) in any pass; in a backward none that repeats bit for bit, as ours does.

    An aim for each point, as an earlier run's is dropped by its name; those met are counted by figure.
    """
    found: list[Aim] = []
    for sample in judged(results):
        shape = " x ".join(str(sample[key]) for key in ("batch", "heads", "length", "head_dim"))
        mask, figure = MASK_NAMES[sample["mask"]], FIGURES[sample["figure"]]
        others = libraries(sample)
        rivals = {"library": others, "repeatable library": [name for name in others if name in REPEATABLE]}
        for (phase, words), (which, names) in itertools.product(PASSES.items(), rivals.items()):
            if phase == "forward" and names is not others:
                continue  # every forward repeats
            where = f"{shape}, {mask} ({'causal' if sample['causal'] else 'full'}), {words}"
            among = f"{figure}, {mask}: every pass, over the fastest {which}'s time"
            found += over_fastest(where, sample, OURS, names, which, phase, among)
    return found
