"""The attention experiment's verdicts; C24's are in `attention_rates.py`."""

import itertools
import math
import re
import statistics
from collections.abc import Callable

from . import paper
from .attention_figures import EAGER, FASTEST, is_hopper, on_cpu, over, peaks, speedup, without_cut
from .attention_rates import judge_rates
from .experiment import NOT_STATED, Results, Sample, Verdict, Verdicts
from .peers import (
    APPROXIMATE,
    BASELINE,
    COMPILED,
    CUDNN_MASK,
    EFFICIENT_MASK,
    FLEX_MASK,
    LINFORMER,
    MASK_NAMES,
    OURS,
    STORED_P,
)
from .timing import FASTER, SLOWER, Times, fastest, gain, gains, timed, took, versus, waited

MIDDLE = (1024, 2048, 4096)  # the lengths at which the first paper's figures are compared


def judge(results: Results) -> list[Verdict]:
    """C7, C8, C9, C17, C20, C24, C30 and C32."""
    # A CPU has only memory, of one head; ratios and slopes hold for any batch and heads.
    found = Verdicts("allocations counted on a CPU, one head" if on_cpu(results) else results["device"])
    for part in (
        *(_judge_speed, _judge_first_paper, _judge_growth, _judge_memory, _judge_approximate),
        *(_judge_head_dim, _judge_causal, judge_rates, _judge_chunks, _judge_stored),
    ):
        part(results, found)
    return found


def _judge_speed(results: Results, found: Verdicts) -> None:
    for mask, words in MASK_NAMES.items():
        for sample, faster in _speedups(results, figure="fa1", mask=mask):
            if (n := sample["length"]) in MIDDLE:
                theirs = paper.FA1_MS[mask, BASELINE][n] / paper.FA1_MS[mask, OURS][n]
                passed, why = round(faster.low, 2) >= round(theirs, 2), "at least the paper's speed-up"
                what = f"{BASELINE}/{OURS} time, {words}, {n} tokens"
                why += f"; {over(sample)}{_untimed_libraries(results, sample)}"
                found.times("C7", what, theirs, faster, passed, why)
    for sample, faster in _speedups(results, figure="fa2", head_dim=256):
        if (n := sample["length"]) in MIDDLE:
            causal = "causal" if sample["causal"] else "full"
            what = f"{BASELINE}/{OURS} time, head_dim 256, {causal}, {n} tokens"
            why = f"{_versus_eager(sample)}; the paper has no head_dim 256, so it does not count; {over(sample)}"
            found.add("C7", what, NOT_STATED, faster.shown(), None, why)
    if speedups := _speedups(results, figure="fa1"):
        behind = [s for s, x in speedups if _versus_eager(s) == SLOWER or (x.alone and x.median < 1)]
        slower = [f"{s['length']} {s['mask']}" for s in behind]
        what = "lengths where ours is slower than standard attention"
        lacks = without_cut([sample for sample, _ in speedups])
        why = f"over {len(speedups)} workloads; against {FASTEST}{lacks}"
        found.add("C7", what, "none", ", ".join(slower) or "none", not slower, why)


def _untimed_libraries(results: Results, sample: Sample) -> str:
    """Which library's attention was not timed with a mask, and what its check says against it."""
    if sample["mask"] == "plain":
        return ""
    where = {key: sample[key] for key in ("head_dim", "causal", "mask", "length")}
    # FlexAttention with a mask is not even checked with dropout, as without one it refuses that.
    names = (EFFICIENT_MASK, CUDNN_MASK, "flex" if "dropout" in sample["mask"] else FLEX_MASK)
    found = []
    for name in names:
        if name not in sample["ms"] and (why := _why_untimed(results, name, **where)):
            # Of "attention=... cannot run here: No available kernel. Aborting execution." the reason.
            found.append(f"{name} ({re.split('; |[.] ', why.rpartition('here: ')[2])[0]})")
    return f"; not timed: {', '.join(found)}" if found else ""


def _why_untimed(results: Results, backend: str, **where: object) -> str:
    """What a check of the backend at these coordinates, or its memory, says against it; "" if nothing. A check that
    lacks a coordinate is of all its values."""
    for sample in results["samples"]:
        if sample.get("backend") == backend and all(
            sample.get(key, its) == its for key, its in where.items()
        ):
            if reason := sample.get("refused") or sample.get("failed"):
                return reason
            if sample.get("out_of_memory"):
                return "memory ran out"
            if False in (sample.get("passed"), sample.get("finite")):
                return "its results were wrong"
    return ""


def _speedups(results: Results, **where: object) -> list[tuple[Sample, Times]]:
    return [(s, found) for s in timed(results, kind="time", **where) if (found := speedup(s))]


def _versus_eager(sample: Sample, name: str = OURS) -> str:
    return versus(took(sample, name), fastest(sample, EAGER)[1])


def _judge_first_paper(results: Results, found: Verdicts) -> None:
    """FlashAttention's own algorithm against the attention that it was compared with."""
    for sample in timed(results, kind="time", figure="fa1", mask="plain"):
        faster, n = speedup(sample, "flash1"), sample["length"]
        if n in MIDDLE and faster:
            theirs = paper.FA1_MS["plain", BASELINE][n] / paper.FA1_MS["plain", OURS][n]
            why = (
                f"at least the paper's speed-up; it is {_versus_eager(sample, 'flash1')}; the algorithm as the first "
                "paper prints it, in Triton with one program a head: it writes out, maximum and sum to memory for "
                "every tile of keys, which the paper's CUDA kernel avoided"
            )
            passed = round(faster.low, 2) >= round(theirs, 2)
            found.times("C7", f"{BASELINE}/flash1 time, plain, {n} tokens", theirs, faster, passed, why)


def _judge_growth(results: Results, found: Verdicts) -> None:
    samples = timed(results, kind="time", figure="fa1", mask="plain")
    times = {sample["length"]: ours for sample in samples if (ours := took(sample, OURS))}
    growth = [times[2 * n] / times[n] for n in times if n >= 4096 and 2 * n in times]
    if growth:
        ours, flash = Times.mean(growth), paper.FA1_MS["plain", OURS]
        theirs = (flash[65536] / flash[4096]) ** (1 / 4)  # four doublings
        what, why = "growth of time when the length doubles, from 4096", "quadratic is 4; within 10 % of it"
        found.times("C7", what, theirs, ours, 3.6 <= ours.low <= ours.high <= 4.4, why)


def _judge_memory(results: Results, found: Verdicts) -> None:
    measured = peaks(results)
    ours, standard = measured.get(OURS, {}), measured.get(BASELINE, {})
    for n in MIDDLE:
        if n in ours and n in standard:
            ratio, theirs = standard[n] / ours[n], paper.FA1_MIB[BASELINE][n] / paper.FA1_MIB[OURS][n]
            what, why = f"{BASELINE}/{OURS} peak memory at {n} tokens", "within a third either way"
            if ratio > 1.05 * theirs and not on_cpu(results):  # a CPU counts one head, the paper 128
                mib = ours[n] / 2**20
                why += f"; above it because {OURS} takes {mib:.0f} MiB, the paper's {paper.FA1_MIB[OURS][n]}"
            shown, passed = f"{ratio:.1f}x", abs(ratio / theirs - 1) <= 1 / 3
            if compiled := measured.get(COMPILED, {}).get(n):
                shown += f" (standard compiled: {compiled / ours[n]:.1f}x)"
            found.add("C8", what, f"{theirs:.1f}x", shown, passed, why, ratio=ratio / theirs)
    for name in (OURS, BASELINE):
        theirs = {n: mib for n, mib in paper.FA1_MIB[name].items() if n in measured.get(name, {})}
        slopes = log_slope(theirs), log_slope(measured.get(name, {}))
        if None not in slopes:
            expected, slope = slopes
            what, passed = f"slope of log memory against log length, {name}", abs(slope - expected) <= 0.05
            why = "within 0.05 of Table 21's at the same lengths, from 1024 tokens on"
            found.times("C8", what, expected, slope, passed, why, form="{:.2f}")
    if 65536 in ours:
        gib, limit = ours[65536] / 2**30, paper.FA1_MIB[OURS][65536] / 1024
        what, why = "peak memory at 65536 tokens", "at most the paper's and 5 %"
        found.times("C8", what, limit, gib, gib <= 1.05 * limit, why, form="{:.1f} GiB")


def log_slope(bytes_at: dict[int, float]) -> float | None:
    """The exponent of a power law, fitted on logarithms from 1024 tokens on; None below three lengths."""
    logs = [(math.log(length), math.log(bytes_)) for length, bytes_ in bytes_at.items() if length >= 1024]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope if len(logs) >= 3 else None


def _judge_approximate(results: Results, found: Verdicts) -> None:
    """C9: the shortest length from which on an approximation is faster than exact attention."""
    for name in APPROXIMATE:
        ratios = gains(results, OURS, name, kind="time", figure="fa1", mask="plain")
        if len(ratios) < 2:
            continue
        slower = [versus(took(sample, OURS), took(sample, name)) == SLOWER for sample, _ in ratios]
        from_there_on = [sample["length"] for place, (sample, _) in enumerate(ratios) if all(slower[place:])]
        overtakes, longest, last = min(from_there_on, default=0), ratios[-1][0]["length"], ratios[-1][1]
        ours = f"from {overtakes} tokens on" if overtakes else f"nowhere up to {longest}"
        what = f"where {name} overtakes flash"
        how = (
            "in eager PyTorch, as the paper timed it, and nothing is said of its quality; at "
            f"{longest} tokens flash takes {last.shown()} its time"
        )
        if name != LINFORMER:
            why = f"the paper does not time it, so it does not count; {how}"
            found.add("C9", what, NOT_STATED, ours, None, why)
            continue
        first, second = paper.LINFORMER_OVERTAKES
        why = f"from {first} or {second} tokens on; a faster exact attention moves it to longer rows; {how}"
        found.add("C9", what, f"between {first} and {second} tokens", ours, first <= overtakes <= second, why)
        why = f"of those up to {longest}"
        what = f"a length from which on {name} is faster"
        found.add("C9", what, "there is one", ours, overtakes > 0, why)


def _judge_head_dim(results: Results, found: Verdicts) -> None:
    """C17, over eager standard attention; compiled, it is shown. A mean is of lengths that all four shapes have, up
    to 4096, where the figures of its source end."""
    shapes = {}
    for d, causal in itertools.product((64, 128), (False, True)):
        samples = timed(results, kind="time", figure="fa2", head_dim=d, causal=causal)
        shapes[f"d{d}{' causal' if causal else ''}"] = [s for s in samples if s["length"] in MIDDLE]
    lengths, means = _means(shapes, speedup)
    if not lengths:
        return
    smaller = (("d128", "d64"), ("d128 causal", "d64 causal"), ("d64", "d64 causal"), ("d128", "d128 causal"))
    passed = all(means[one].below(means[other]) for one, other in smaller)
    where = f"{'mean of ' * (len(lengths) > 1)}{_spaced(lengths)} tokens"
    what, theirs = f"{BASELINE}/{OURS} time, {where}", "lower at d128 than d64, larger when causal"
    timed_here = [s for samples in shapes.values() for s in samples if s["length"] in lengths]
    lacks = without_cut(timed_here)
    why = f"the claim is the order, by ranges that do not overlap; over {FASTEST}{lacks}"
    of_compiled, compiled = _means(shapes, lambda sample: gain(sample, COMPILED, OURS))
    if compiled:
        at = f", at {_spaced(of_compiled)} tokens," * (of_compiled != lengths)
        why += f"; over compiled standard attention{at} {_listed(compiled)}"
    found.add("C17", what, theirs, _listed(means), None if lacks else passed, why)


def _means(
    shapes: dict[str, list[Sample]], ratio: Callable[[Sample], Times | None]
) -> tuple[list[int], dict[str, Times]]:
    """The lengths that every shape has a ratio for, and each one's mean over these; none, and {}, without any."""
    found = {
        name: {sample["length"]: its for sample in samples if (its := ratio(sample))}
        for name, samples in shapes.items()
    }
    lengths = sorted(set.intersection(*map(set, found.values())))
    return lengths, {name: Times.mean(its[n] for n in lengths) for name, its in found.items() if lengths}


def _spaced(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths))


def _listed(means: dict[str, Times]) -> str:
    return ", ".join(f"{name} {each.shown('{:.1f}x')}" for name, each in means.items())


def _judge_causal(results: Results, found: Verdicts) -> None:
    """C20, a row for each length."""
    why = "1.7x at least, at every length; in short rows a larger share of the blocks is on the diagonal"
    ours = {}
    for sample in timed(results, kind="time", figure="fa2"):
        if times := took(sample, OURS):
            ours[sample["head_dim"], sample["length"], sample["causal"]] = times
    for d, n, causal in sorted(ours):
        if causal and (d, n, False) in ours:
            ratio = ours[d, n, False] / ours[d, n, True]
            what = f"full over causal time, head_dim {d}, {n} tokens"
            if (d, causal) in paper.FA2_H100:
                found.times("C20", what, 1.75, ratio, ratio.low >= 1.7, why, theirs="1.7 to 1.8x")
            else:
                uncounted = f"the paper has no head_dim {d}, so it does not count"
                found.add("C20", what, NOT_STATED, ratio.shown(), None, uncounted)


def _judge_chunks(results: Results, found: Verdicts) -> None:
    """C32: attention in chunks with checkpointing; it saves memory, and no time over standard attention."""
    if (slope := log_slope(peaks(results).get("chunked", {}))) is not None:
        what, why = "slope of log memory against log length, chunked", "1.15 at most, from 1024 tokens on"
        found.add("C32", what, "1", f"{slope:.2f}", slope <= 1.15, why, ratio=slope)
    for sample, slower in gains(results, "chunked", OURS, kind="time", figure="fa1", mask="plain"):
        if sample["length"] in MIDDLE:
            passed = 2 <= slower.low <= slower.high <= 4
            why = "2x to 4x; ours is of eager PyTorch operations, and its backward computes each chunk twice more"
            what = f"time of chunked attention over flash, {sample['length']} tokens"
            ratio = slower.median / min(max(slower.median, 2), 4)
            found.add("C32", what, "2x to 4x", slower.shown("{:.1f}x"), passed, why, ratio=ratio)
    for sample in timed(results, kind="time", figure="fa1", mask="plain"):
        standard = fastest(sample, EAGER)
        if sample["length"] in MIDDLE and standard and (chunked := took(sample, "chunked")):
            what = f"time of chunked attention over standard, {sample['length']} tokens"
            why = f"chunked takes longer: ranges apart; over {standard[0]}, {FASTEST}"
            passed = versus(chunked, standard[1]) == SLOWER
            if waited(sample, "chunked"):
                passed, why = None, f"chunked waited for its host; {why}"
            found.add("C32", what, "no time saved", (chunked / standard[1]).shown(), passed, why)


def _judge_stored(results: Results, found: Verdicts) -> None:
    """C30: a kernel stores the probabilities for the backward, as the paper's did, ours computes them again."""
    bounds = {"forward": FASTER, "backward": SLOWER, "both": "as fast, 0.9x to 1.1x"}
    # What dispatch.choose takes at head_dim 64 with padding and dropout.
    kernels = ", forward by the portable kernel, backward by Hopper's," if is_hopper(results) else ""
    for phase, bound in bounds.items():
        for sample in timed(results, kind="time", figure="stored"):
            ratio, length = gain(sample, STORED_P, OURS, phase), sample["length"]
            if not ratio or length not in paper.STORED_OVER_FLASH:
                continue
            if phase == "both":
                words, passed = "forward and backward", ratio.low >= 0.9 and ratio.high <= 1.1
            else:
                words = phase
                passed = versus(took(sample, OURS, phase), took(sample, STORED_P, phase)) == bound
            how = f"{STORED_P}, one kernel, as the paper's, above 128 tokens with a product more in each pass"
            if compiled := gain(sample, COMPILED, OURS, phase):
                how += f"; by torch.compile in two matrix products and a fused softmax {compiled.shown()}"
            what = f"{words}, time with stored probabilities over ours, {length} tokens"
            theirs, why = paper.STORED_OVER_FLASH[length][phase], f"ours{kernels} is {bound}; stored by {how}"
            found.times("C30", what, theirs, ratio, passed, why)
