"""This project's own aims for the training experiment's figures: nanoGPT's speed, and the share of the GPU's peak."""

from __future__ import annotations

from reproduce.contenders import FUSED, NANOGPT, NANOGPT_BIASES
from reproduce.experiment import Results
from reproduce.timing import timed
from reproduce.training_figures import mfu, rate

from .aims import Aim

NANOGPTS = ((NANOGPT, "without biases, as it trains"), (NANOGPT_BIASES, "with GPT-2's biases"))


def aims(results: Results) -> list[Aim]:
    """1.1 times nanoGPT's speed at least, both compiled, and an MFU of 50 %."""
    found = []
    for sample in timed(results, kind="speed", part="compiled") + timed(results, kind="speed", part="whole"):
        ours = [name for name in ("flash", "flash" + FUSED) if rate(sample, name)]
        if not ours:
            continue
        best = max(ours, key=lambda name: rate(sample, name).median)
        where = f"{sample['model']}, {sample['micro_batch']} sequences a forward"
        for name, model in NANOGPTS:
            if theirs := rate(sample, name):
                gain = rate(sample, best) / theirs
                what = f"{where}: ours with flash over nanoGPT's model {model}, both compiled, tokens/s"
                found.append(Aim(what, gain.shown("{:.3f}x"), "1.1x at least", gain.low >= 1.1))
        if share := mfu(results, sample, best):
            why = "counts 6 N + 12 L H Q T FLOPs a token: attention in full, no recomputation"
            what = f"{where}: MFU of ours, compiled"
            found.append(Aim(what, share.shown("{:.1%}"), "50 % at least", share.low >= 0.5, why))
    return found
