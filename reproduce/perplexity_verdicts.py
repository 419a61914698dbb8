"""What the perplexity experiment says of C12 and C14, and the bounds it says it by."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

from .experiment import Results, Sample, Verdict, judged, pick
from .perplexity_figures import (
    BASELINE,
    CONTROL,
    NAMES,
    WEIGHTS,
    diverged_from,
    final_loss,
    gap,
    runs,
    seed_gap,
)

# Set down before the first run: as close as the same mathematics rounded in another order, with a factor for chance.
CONTROL_FACTOR = 2.0


def judge(results: Results) -> list[Verdict]:
    """C12 and C14."""
    long_run = Verdict(
        "C12",
        "validation perplexity of GPT-2 small on OpenWebText after 400k steps",
        "18.2 with FlashAttention and without",
        why="takes 210 B tokens: experiment=paper/gpt2_small, then `python -m reproduce milestones RUN`",
    )
    return [
        *_judge_runs(results),
        *_judge_recipe(results),
        *_judge_numerics(results),
        long_run,
        *_judge_context(results),
        *_judge_extended(results),
    ]


def _whole(compared: dict[str, Sample]) -> dict[str, Sample]:
    return {name: run for name, run in compared.items() if "partial" not in run}


def _judge_runs(results: Results) -> list[Verdict]:
    compared = _whole(runs(results, "gpt2"))
    seeds = seed_gap(compared)
    if BASELINE not in compared or CONTROL not in compared or seeds is None:
        why = "needs runs of naive with two micro-batches, and of one attention with two seeds"
        return [Verdict("C12", "loss curves of the backends", "the same", why=why)]
    base, control = compared[BASELINE], gap(compared[CONTROL], compared[BASELINE])
    found = []
    for name in ("flash", "flash_triton", "sdpa", "sdpa_math"):
        if name not in compared:
            continue
        end, later = gap(compared[name], base)
        passed = all(
            ours <= CONTROL_FACTOR * c and ours < s
            for ours, c, s in zip((end, later), control, seeds, strict=True)
        )
        why = (
            f"the bound, set before the run: at most {CONTROL_FACTOR:g} times naive against itself with half the "
            f"micro-batch ({control[0]:.4f}, {control[1]:.4f}), and less than other initial weights "
            f"({seeds[0]:.4f}, {seeds[1]:.4f})"
        )
        if not passed:
            why += _whose_rounding(results, name)
        side = "lower" if final_loss(compared[name]) < final_loss(base) else "higher"
        tokens = base["steps"] * base["batch_tokens"] / 1e6
        found.append(
            judged(
                "C12",
                f"validation curve of {NAMES[name]} against naive, {base['parameters'] / 1e6:.0f} M parameters, "
                f"{tokens:.0f} M tokens",
                "the curves coincide",
                f"{math.exp(final_loss(compared[name])):.2f} and {math.exp(final_loss(base)):.2f} perplexity: "
                f"{end:.4f} nats {side} at the end, {later:.4f} apart over the second half",
                None,
                passed,
                why,
                results["device"],
            )
        )
    return found


def _whose_rounding(results: Results, name: str) -> str:
    """Which of naive and the backend `name` has the larger gradient error at the end of training, in bfloat16."""
    errors = {
        row["backend"]: statistics.median(row["gradient_errors"].values())
        for sample in pick(results, kind="numerics", when="end")
        for row in sample["rows"]
        if row["dtype"] == "bfloat16" and "refused" not in row
    }
    backend = {"flash_triton": "flash, portable"}.get(name, name)
    if not {BASELINE, backend} <= errors.keys():
        return ""
    return (
        f". Gradients of the trained model in bfloat16 are {errors[BASELINE]:.1%} from float64's with naive, which "
        f"rounds its scores to bfloat16, and {errors[backend]:.1%} with {NAMES[name]}"
    )


def _judge_recipe(results: Results) -> list[Verdict]:
    compared = _whole(runs(results, "recipe"))
    what = "validation curve of flash against naive in the paper's recipe (dropout 0.1, float16, one dropout mask)"
    seeds = seed_gap(_whole(runs(results, "gpt2")))
    if len(compared) < 2 or seeds is None:
        return [Verdict("C12", what, "the curves coincide", why="part `recipe` was not run to its end")]
    end, later = gap(compared["recipe_flash"], compared["recipe_naive"])
    ours = f"{end:.4f} nats apart at the end, {later:.4f} over the second half"
    why = f"less than other initial weights ({seeds[0]:.4f}, {seeds[1]:.4f})"
    passed = end < seeds[0] and later < seeds[1]
    return [judged("C12", what, "the curves coincide", ours, None, passed, why, results["device"])]


def _judge_numerics(results: Results) -> list[Verdict]:
    """16-bit flash against 16-bit naive: the same loss, and no gradient further from exact than by a factor."""
    found = []
    for sample in pick(results, kind="numerics"):
        rows = {(row["backend"], row["dtype"]): row for row in sample["rows"] if "refused" not in row}
        for dtype in ("bfloat16", "float16"):
            if ("flash", dtype) not in rows or (BASELINE, dtype) not in rows:
                continue
            ours, theirs = rows["flash", dtype]["gradient_errors"], rows[BASELINE, dtype]["gradient_errors"]
            worst = max(ours, key=lambda name: ours[name] / theirs[name])
            ratio = ours[worst] / theirs[worst]
            apart = rows["flash", dtype]["loss"] - rows[BASELINE, dtype]["loss"]
            found.append(
                judged(
                    "C12",
                    f"loss and gradients {WEIGHTS[sample['when']]}, flash against naive, {dtype}",
                    "exact attention: the same",
                    f"loss {apart:+.1e} nats apart; gradient errors against float64 at most {ratio:.2f} times "
                    f"naive's ({worst})",
                    None,
                    ratio <= CONTROL_FACTOR and abs(apart) < 1e-3,
                    f"at most {CONTROL_FACTOR:g} times naive's error in every tensor, and 0.001 nats",
                    results["device"],
                )
            )
    return found


def _judge_extended(results: Results) -> list[Verdict]:
    extended = _whole(runs(results, "extend"))
    what = "GPT-2 small from one checkpoint, its context extended, on equal further tokens"
    paper = "18.2 at 1k, 17.6 at 2k, 17.5 at 4k (perplexity)"
    if len(extended) < 2:
        return [Verdict("C14", what, paper, why="part `extend` was not run to its end")]
    ordered = sorted(extended.values(), key=lambda run: run["context"])
    ours = ", ".join(f"{math.exp(final_loss(run)):.2f} at {run['context']}" for run in ordered)
    passed = all(final_loss(long) < final_loss(short) for short, long in pairwise(ordered))
    why = (
        "every step to a longer context lowers it"
        if passed
        else "not every step to a longer context lowers it"
    )
    return [judged("C14", what, paper, ours, None, passed, why, results["device"])]


def _judge_context(results: Results) -> list[Verdict]:
    paper = "18.2 at 1k, 17.6 at 2k, 17.5 at 4k (perplexity)"
    trained = _whole(runs(results, "context"))
    lost = {run["context"]: step for run in trained.values() if (step := diverged_from(run)) is not None}
    trained = {name: run for name, run in trained.items() if run["context"] not in lost}
    by_length = {run["context"]: run for name, run in trained.items() if not name.endswith("_seed")}
    if len(by_length) < 2:
        return [
            Verdict(
                "C14",
                "validation loss against context",
                paper,
                why="fewer than two contexts learned to the end",
            )
        ]
    shortest, longest = by_length[min(by_length)], by_length[max(by_length)]
    fall = final_loss(shortest) - final_loss(longest)
    gaps = [abs(final_loss(trained[f"context_{c}_seed"]) - final_loss(run)) for c, run in by_length.items()
            if f"context_{c}_seed" in trained]  # fmt: skip
    spread = f"two seeds differ by {max(gaps):.3f}" if gaps else "no second seed was run"
    losses = ", ".join(f"{c}: {final_loss(by_length[c]):.3f}" for c in sorted(by_length))
    cut, positions = longest["cut"], longest["positions"]
    cut_fall, late_fall = cut[0][1] - cut[-1][1], positions[-2][2] - positions[-1][2]
    shown = [name for name, value in (("trained contexts", fall - max(gaps, default=0.0)), ("cut windows", cut_fall),
                                      ("position", late_fall)) if value > 0]  # fmt: skip
    why = (
        f"validation loss by context: {losses}; {spread}. The {longest['context']} model with windows cut from "
        f"{cut[-1][0]} to {cut[0][0]} loses {cut_fall:.3f}; from the last octave of positions to the one before, "
        f"{late_fall:+.3f}. It shows in: {', '.join(shown) or 'none of them'}"
    )
    what = f"validation loss, context {longest['context']} minus context {shortest['context']}"
    passed = fall > max(gaps, default=0.0)
    found = [judged("C14", what, paper, f"{-fall:+.3f} nats", None, passed, why, results["device"])]
    for context, step in lost.items():
        what, ours = f"validation loss at context {context}", f"diverged from step {step:,} on"
        why = "part `stability` asks why: the rate, or the rounding of the output"
        found.append(judged("C14", what, paper, ours, None, False, why, results["device"]))
    return found
