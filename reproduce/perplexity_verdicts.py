"""What the perplexity experiment says of C12 and C14, and the bounds it says it by."""

import math
import statistics
from itertools import combinations, pairwise

from .experiment import NOT_STATED, Results, Sample, Verdict, Verdicts, pick
from .perplexity_figures import (
    CONTROL,
    NAIVE,
    NAMES,
    WEIGHTS,
    diverged_from,
    final_loss,
    gap,
    runs,
    seed_gaps,
)

# Set down before the first run: as close as the same mathematics rounded in another order, with a factor for chance.
CONTROL_FACTOR = 2.0
# What one run has in common on any device.
ONE_RUN = ("parameters", "steps", "batch_tokens", "micro_batch", "init_seed")
COINCIDE, BY_CONTEXT = "the curves coincide", "18.2 at 1k, 17.6 at 2k, 17.5 at 4k (perplexity)"  # the paper's


def judge(results: Results) -> list[Verdict]:
    """C12 and C14, but for what takes several devices: `judge_between_devices` and `judge_extended`."""
    found = Verdicts(results["device"])
    _judge_runs(results, found)
    _judge_recipe(results, found)
    _judge_numerics(results, found)
    what = "validation perplexity of GPT-2 small on OpenWebText after 400k steps"
    why = "takes 210 B tokens: experiment=paper/gpt2_small, then `python -m reproduce milestones RUN`"
    found.append(Verdict("C12", what, "18.2 with FlashAttention and without", why=why))
    _judge_context(results, found)
    return found


def _whole(results: Results, part: str) -> dict[str, Sample]:
    return {name: run for name, run in runs(results, part).items() if "partial" not in run}


def _why_left(results: Results, part: str) -> str:
    """Why a part is not whole."""
    cut = [
        f"its time was over at step {run['partial']} of {run['steps']} of {run['name']}"
        for run in pick(results, kind="run", part=part)
        if "partial" in run
    ]
    why = cut[0] if cut else "the GPU's time went to other parts"
    return f"part `{part}` was not run to its end: {why}"


def _judge_runs(results: Results, found: Verdicts) -> None:
    compared = _whole(results, "gpt2")
    seeds = next(iter(seed_gaps(compared)), None)
    if NAIVE not in compared or CONTROL not in compared or seeds is None:
        why = "needs runs of naive with two micro-batches, and of one attention with two seeds"
        found.append(Verdict("C12", "loss curves of the backends", "the same", why=why))
        return
    base, control = compared[NAIVE], gap(compared[CONTROL], compared[NAIVE])
    tokens = base["steps"] * base["batch_tokens"] / 1e6
    bound = (
        f"the bound, set before the run: at most {CONTROL_FACTOR:g} times naive against itself with half the "
        f"micro-batch ({control[0]:.4f}, {control[1]:.4f}), and less than other initial weights "
        f"({seeds[0]:.4f}, {seeds[1]:.4f})"
    )
    if any(its > seed for its, seed in zip(control, seeds, strict=True)):
        bound += ", which naive against itself exceeds too"
    for name in ("flash", "flash_triton", "sdpa", "sdpa_math"):
        if name not in compared:
            continue
        apart, ours, theirs = gap(compared[name], base), final_loss(compared[name]), final_loss(base)
        each = zip(apart, control, seeds, strict=True)
        passed = all(ours <= CONTROL_FACTOR * control and ours < seed for ours, control, seed in each)
        sizes = f"{base['parameters'] / 1e6:.0f} M parameters, {tokens:.0f} M tokens"
        what = f"validation curve of {NAMES[name]} against naive, {sizes}"
        shown = (
            f"{math.exp(ours):.2f} and {math.exp(theirs):.2f} perplexity: {apart[0]:.4f} nats "
            f"{'lower' if ours < theirs else 'higher'} at the end, {apart[1]:.4f} apart over the second half"
        )
        why = bound + ("" if passed else _whose_rounding(results, name))
        found.add("C12", what, COINCIDE, shown, passed, why)


def device_gaps(one: Results, other: Results) -> dict[str, float]:
    """Name -> nats at the end that two devices, which round in other orders, change in a run that both have."""
    theirs = _whole(other, "gpt2")
    both = [(run, theirs[name]) for name, run in _whole(one, "gpt2").items() if name in theirs]
    same = ((run, its) for run, its in both if all(run.get(each) == its.get(each) for each in ONE_RUN))
    return {run["name"]: gap(run, its)[0] for run, its in same}


def judge_between_devices(one: Results, other: Results) -> list[Verdict]:
    """C12: what a run differs by between two devices: a control that the bound lacks."""
    found = Verdicts("several devices")
    if gaps := device_gaps(one, other):
        ends = [f"{NAMES[name]} {each:.4f}" for name, each in gaps.items()]
        what = f"one run on {one['device']} and on {other['device']}: |difference| in nats at the end"
        why = "weights, batches and mathematics are equal: a run of this length is known to no more than this"
        found.add("C12", what, NOT_STATED, "; ".join(ends), None, why)
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
    if not {NAIVE, backend} <= errors.keys():
        return ""
    return (
        f". Gradients of the trained model in bfloat16 are {errors[NAIVE]:.1%} from float64's with naive, which "
        f"rounds its scores to bfloat16, and {errors[backend]:.1%} with {NAMES[name]}"
    )


def _judge_recipe(results: Results, found: Verdicts) -> None:
    compared = _whole(results, "recipe")
    what = "validation curve of flash against naive in the paper's recipe (dropout 0.1, float16, one dropout mask)"
    if len(compared) < 2:
        found.append(Verdict("C12", what, COINCIDE, why=_why_left(results, "recipe")))
        return
    end, later = gap(compared["recipe_flash"], compared["recipe_naive"])
    ours = f"{end:.4f} nats apart at the end, {later:.4f} over the second half"
    steps = compared["recipe_flash"]["steps"]
    why = f"no bound: what other weights or roundings change in these {steps:,} steps was not run"
    if base := _whole(results, "gpt2").get(NAIVE):
        why += f"; the bounds above are of {base['steps']:,} steps in bfloat16 without dropout"
    found.add("C12", what, COINCIDE, ours, None, why)


def _judge_numerics(results: Results, found: Verdicts) -> None:
    """16-bit flash against 16-bit naive: the same loss, and no gradient further from exact than by a factor."""
    for sample in pick(results, kind="numerics"):
        rows = {(row["backend"], row["dtype"]): row for row in sample["rows"] if "refused" not in row}
        for dtype in ("bfloat16", "float16"):
            if ("flash", dtype) not in rows or (NAIVE, dtype) not in rows:
                continue
            flash, naive = rows["flash", dtype], rows[NAIVE, dtype]
            ratios = {
                name: each / naive["gradient_errors"][name] for name, each in flash["gradient_errors"].items()
            }
            worst, apart = max(ratios, key=ratios.__getitem__), flash["loss"] - naive["loss"]
            what = f"loss and gradients {WEIGHTS[sample['when']]}, flash against naive, {dtype}"
            ours = (
                f"loss {apart:+.1e} nats apart; gradient errors against float64 at most {ratios[worst]:.2f} times "
                f"naive's ({worst})"
            )
            passed = ratios[worst] <= CONTROL_FACTOR and abs(apart) < 1e-3
            why = f"at most {CONTROL_FACTOR:g} times naive's error in every tensor, and 0.001 nats"
            found.add("C12", what, "exact attention: the same", ours, passed, why)


def judge_extended(results: Results, measured: list[Results]) -> list[Verdict]:
    """C14 of `results`: each step to a longer context has to gain more than a run of the same model is known to.

    measured: of every device, `results` among them: what other weights and another device change at most.
    """
    found = Verdicts(results["device"])
    extended = sorted(_whole(results, "extend").values(), key=lambda run: run["context"])
    what = "GPT-2 small from one checkpoint, its context extended, on equal further tokens"
    if len(extended) < 2:
        elsewhere = [each["device"] for each in measured if len(_whole(each, "extend")) > 1]
        why = _why_left(results, "extend") + "".join(f"; it was on {device}" for device in elsewhere)
        return [Verdict("C14", what, BY_CONTEXT, why=why)]
    gaps = [end for each in measured for end, _ in seed_gaps(_whole(each, "gpt2"))]
    gaps += [end for pair in combinations(measured, 2) for end in device_gaps(*pair).values()]
    known = max(gaps, default=math.inf)
    falls = {
        f"{short['context']} to {long['context']}": final_loss(short) - final_loss(long)
        for short, long in pairwise(extended)
    }
    listed = ", ".join(f"{step} by {fall:.4f} nats" for step, fall in falls.items())
    most = f"{known:.4f} at most" if gaps else "which is not known"
    why = f"by more than other weights or another card change in one run of this model, {most}: {listed}"
    if unknown := [step for step, fall in falls.items() if abs(fall) <= known]:
        why = f"too few runs to tell {', '.join(unknown)}; {why}"
    ours = ", ".join(f"{math.exp(final_loss(run)):.2f} at {run['context']}" for run in extended)
    found.add("C14", what, BY_CONTEXT, ours, min(falls.values()) > known, why)
    return found


def _judge_context(results: Results, found: Verdicts) -> None:
    trained = _whole(results, "context")
    lost = {run["context"]: run for run in trained.values() if diverged_from(run) is not None}
    trained = {name: run for name, run in trained.items() if run["context"] not in lost}
    by_length = {run["context"]: run for name, run in trained.items() if not name.endswith("_seed")}
    if len(by_length) < 2:
        what, why = "validation loss against context", "fewer than two contexts learned to the end"
        found.append(Verdict("C14", what, BY_CONTEXT, why=why))
        return
    shortest, longest = by_length[min(by_length)], by_length[max(by_length)]
    fall = final_loss(shortest) - final_loss(longest)
    seeds = {c: trained[name] for c in by_length if (name := f"context_{c}_seed") in trained}
    spread = max((abs(final_loss(run) - final_loss(by_length[c])) for c, run in seeds.items()), default=0.0)
    losses = ", ".join(f"{c}: {final_loss(by_length[c]):.3f}" for c in sorted(by_length))
    cut, positions = longest["cut"], longest["positions"]
    cut_fall, late_fall = cut[0][1] - cut[-1][1], positions[-2][2] - positions[-1][2]
    falls = {"trained contexts": fall - spread, "cut windows": cut_fall, "position": late_fall}
    why = (
        f"on whole files of source code, in results/ Linux's C; validation loss by context: {losses}; "
        f"{f'two seeds differ by {spread:.3f}' if seeds else 'no second seed was run'}. "
        f"The {longest['context']} model with windows cut from "
        f"{cut[-1][0]} to {cut[0][0]} loses {cut_fall:.3f}; from the last octave of positions to the one before, "
        f"{late_fall:+.3f}. It shows in: {', '.join(name for name in falls if falls[name] > 0) or 'none of them'}"
    )
    what = f"validation loss, context {longest['context']} minus context {shortest['context']}"
    found.add("C14", what, BY_CONTEXT, f"{-fall:+.3f} nats", fall > spread, why)
    for context, run in lost.items():
        what, ours = f"validation loss at context {context}", f"diverged from step {diverged_from(run):,} on"
        without = "without precise_delta, which keeps what bfloat16 takes from attention's output"
        why = "" if run.get("precise_delta") else f"{without} (kernels/log/hopper_backward.md)"
        found.add("C14", what, BY_CONTEXT, ours, False, why)
