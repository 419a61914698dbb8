"""This project's own aims for the training experiment's figures: nanoGPT's speed, and the share of the GPU's peak."""

from __future__ import annotations

from reproduce.contenders import FUSED, NANOGPT, NANOGPT_BIASES
from reproduce.experiment import Results
from reproduce.timing import timed
from reproduce.training_figures import after, mfu, rate

from .aims import Aim, shown

# The aims: share of the GPU's peak at least, by model and sequences a forward; speed over nanoGPT's model.
MFU = {("gpt2_small", 64): 0.55, ("gpt2_small", 16): 0.51, ("gpt2_medium", 64): 0.57}
OVER_NANOGPT = 1.15
NANOGPTS = ((NANOGPT, "without biases, as it trains"), (NANOGPT_BIASES, "with GPT-2's biases"))


def aims(results: Results) -> list[Aim]:
    """OVER_NANOGPT times nanoGPT's speed at least, both compiled, and the MFU of the table."""
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
                ours_shown, met = shown(gain, OVER_NANOGPT, "{:.3f}x"), gain.low >= OVER_NANOGPT
                why = after(sample, best, name).strip()
                found.append(Aim(what, ours_shown, f"{OVER_NANOGPT}x at least", met, why))
        if share := mfu(results, sample, best):
            why = "counts 6 N + 12 L H Q T FLOPs a token: attention in full, no recomputation"
            what = f"{where}: MFU of ours, compiled"
            if least := MFU.get((sample["model"], sample["micro_batch"])):
                aim = f"{100 * least:.0f} % at least"
                found.append(Aim(what, shown(share, least, "{:.1%}"), aim, share.low >= least, why))
            else:
                found.append(Aim(what, share.shown("{:.1%}"), why=why))
    return found
