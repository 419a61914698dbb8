"""The attention experiment's picture and verdicts."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from . import paper, plots
from .experiment import NOT_STATED, Results, Sample, Verdict, Verdicts, pick
from .peers import APPROXIMATE, COMPILED
from .timing import FASTER, SLOWER, Times, beside, fastest, timed, took

OURS, BASELINE = "flash", "standard"
PORTABLE = "flash, portable"  # the Triton kernels, also on a Hopper GPU
# Standard attention in eager PyTorch; speed-ups are over the fastest of them.
EAGER = (BASELINE, "naive", "sdpa_math")
MASK_NAMES = {"plain": "plain", "padding": "key padding", "padding+dropout": "key padding and dropout"}
MIDDLE = (1024, 2048, 4096)  # the lengths at which the first paper's figures are compared


def flops(sample: Sample, phase: str) -> float:
    """Forward 4 * batch * heads * length^2 * head_dim, half if causal; backward 2.5 times that (FA2, section 4.1)."""
    forward = 4 * sample["batch"] * sample["heads"] * sample["length"] ** 2 * sample["head_dim"]
    forward /= 2 if sample["causal"] else 1
    return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[phase]


def tflops(sample: Sample, backend: str, phase: str) -> Times | None:
    times = took(sample, backend, phase)
    return times and times.inverse(flops(sample, phase) / 1e9)


def speedup(sample: Sample, phase: str = "both") -> Times | None:
    """Time of the fastest standard attention of eager PyTorch over ours."""
    standard, ours = fastest(sample, EAGER, phase), took(sample, OURS, phase)
    return standard[1] / ours if standard and ours else None


def over(sample: Sample) -> str:
    """What a speed-up is over, and what torch.compile makes of standard attention."""
    words = f"over {fastest(sample, EAGER)[0]}, the fastest of eager PyTorch"
    if compiled := took(sample, COMPILED):
        words += f"; compiled, standard attention takes {(compiled / took(sample, OURS)).shown()} our time"
    return words


def _backends(samples: list[Sample]) -> list[str]:
    """Every contender, ours last, so that it lies on top."""
    names = dict.fromkeys(name for sample in samples for name in sample["ms"])
    return sorted(names, key=lambda name: (name == OURS, name != BASELINE, name))


def _peaks(results: Results) -> dict[tuple[str, int], float]:
    """(backend, length) -> peak bytes on Table 21's workload, without masks."""
    samples = pick(results, kind="memory", figure="fa1", mask="plain")
    return {(s["backend"], s["length"]): s["peak_bytes"] for s in samples}


def draw(results: Results, path: Path) -> None:
    """Time with each of the three masks, peak memory, TFLOP/s on FA2's workload; a panel for each one measured."""
    plots.draw(path, f"Attention on {results['device']}", _panels(results))


def _panels(results: Results) -> Iterator[plots.Panel]:
    for mask, words in MASK_NAMES.items():
        if samples := timed(results, kind="time", figure="fa1", mask=mask):
            series = {
                name: {s["length"]: t.median for s in samples if (t := took(s, name))}
                for name in _backends(samples)
            }
            yield plots.lines(f"Time, {words}", series, up="ms, forward and backward", log="y")
    if peaks := _peaks(results):
        # A CPU counts one head of one sequence, so the paper's memory, of 128 heads, is drawn divided by 128.
        heads = 1 if _on_cpu(results) else 128
        lengths = {n for _, n in peaks}
        names = sorted({name for name, _ in peaks}, key=lambda name: (name == OURS, name))
        series = {name: {n: b / 2**20 for (each, n), b in peaks.items() if each == name} for name in names}
        theirs = {
            f"{name} of FA1, Table 21": {n: mib * heads / 128 for n, mib in table.items() if n in lengths}
            for name, table in paper.FA1_MIB.items()
        }
        up = "peak MiB" + ", one head" * (heads == 1)
        yield plots.lines("Peak memory, forward and backward", series, up=up, log="y", paper=theirs)
    shapes = {(s["head_dim"], s["causal"]) for s in timed(results, kind="time", figure="fa2")}
    for head_dim, causal in sorted(shapes):
        samples = timed(results, kind="time", figure="fa2", head_dim=head_dim, causal=causal)
        series = {
            name: {s["length"]: t.median for s in samples if (t := tflops(s, name, "both"))}
            for name in _backends(samples)
        }
        theirs = {"paper, FA2 on an H100": paper.FA2_H100.get((head_dim, causal), {}).get("fa2", {})}
        title = f"head_dim {head_dim}{', causal' if causal else ''}, 16k tokens"
        yield plots.lines(title, series, up="TFLOP/s, forward and backward", paper=theirs)


def _on_cpu(results: Results) -> bool:
    return results["device"].startswith("CPU")


def judge(results: Results) -> list[Verdict]:
    """C7, C8, C9, C17, C20, C24, C30 and C32."""
    found = Verdicts(results["device"])
    for part in (
        _judge_speed,
        _judge_first_paper,
        _judge_growth,
        _judge_memory,
        _judge_approximate,
        _judge_head_dim,
        _judge_causal,
        _judge_rates,
        _judge_chunks,
        _judge_stored,
    ):
        part(results, found)
    return found


def _judge_speed(results: Results, found: Verdicts) -> None:
    for mask, words in MASK_NAMES.items():
        for sample in timed(results, kind="time", figure="fa1", mask=mask):
            n, gain = sample["length"], speedup(sample)
            if n in MIDDLE and gain:
                theirs = paper.FA1_MS[mask, BASELINE][n] / paper.FA1_MS[mask, OURS][n]
                passed, why = (
                    round(gain.low, 2) >= round(theirs, 2),
                    f"at least the paper's speed-up; {over(sample)}",
                )
                found.times("C7", f"{BASELINE}/{OURS} time, {words}, {n} tokens", theirs, gain, passed, why)
    for sample in timed(results, kind="time", figure="fa2", head_dim=256):
        if sample["length"] in MIDDLE and (gain := speedup(sample)):
            causal = "causal" if sample["causal"] else "full"
            what = f"{BASELINE}/{OURS} time, head_dim 256, {causal}, {sample['length']} tokens"
            passed, why = _beside_eager(sample) == FASTER, f"faster; {over(sample)}"
            found.add("C7", what, NOT_STATED, gain.shown(), passed, why)
    if samples := [s for s in timed(results, kind="time", figure="fa1") if speedup(s)]:
        slower = [f"{s['length']} {s['mask']}" for s in samples if _beside_eager(s) == SLOWER]
        what, why = "lengths where ours is slower than standard attention", f"over {len(samples)} workloads"
        found.add("C7", what, "none", ", ".join(slower) or "none", not slower, why)


def _beside_eager(sample: Sample) -> str:
    return beside(took(sample, OURS), fastest(sample, EAGER)[1])


def _judge_first_paper(results: Results, found: Verdicts) -> None:
    """FlashAttention's own algorithm beside the attention that it was compared with."""
    for sample in timed(results, kind="time", figure="fa1", mask="plain"):
        standard, flash1, n = fastest(sample, EAGER), took(sample, "flash1"), sample["length"]
        if n in MIDDLE and standard and flash1:
            what, gain = f"{BASELINE}/flash1 time, plain, {n} tokens", standard[1] / flash1
            theirs = paper.FA1_MS["plain", BASELINE][n] / paper.FA1_MS["plain", OURS][n]
            why = (
                "faster; the algorithm as the first paper prints it, in Triton with one program a head: it writes "
                "out, maximum and sum to memory for every tile of keys, which the paper's CUDA kernel avoided"
            )
            found.times("C7", what, theirs, gain, beside(flash1, standard[1]) == FASTER, why)


def _judge_growth(results: Results, found: Verdicts) -> None:
    samples = timed(results, kind="time", figure="fa1", mask="plain")
    times = {s["length"]: t.median for s in samples if (t := took(s, OURS))}
    growth = [times[2 * n] / times[n] for n in times if n >= 4096 and 2 * n in times]
    if growth:
        ours, flash = statistics.geometric_mean(growth), paper.FA1_MS["plain", "flash"]
        theirs = (flash[65536] / flash[4096]) ** (1 / 4)  # four doublings
        what, why = "growth of time when the length doubles, from 4096", "quadratic is 4; within 10 % of it"
        found.times("C7", what, theirs, ours, 3.6 <= ours <= 4.4, why)


def _judge_memory(results: Results, found: Verdicts) -> None:
    peaks, basis = _peaks(results), _memory_basis(results)
    for n in MIDDLE:
        if (BASELINE, n) in peaks and (OURS, n) in peaks:
            ours = peaks[BASELINE, n] / peaks[OURS, n]
            theirs = paper.FA1_MIB[BASELINE][n] / paper.FA1_MIB[OURS][n]
            what, why = f"{BASELINE}/{OURS} peak memory at {n} tokens", "within a third either way"
            if ours > 1.05 * theirs and not _on_cpu(results):  # a CPU counts one head, the paper 128
                mib = peaks[OURS, n] / 2**20
                why += f"; above it because {OURS} takes {mib:.0f} MiB, the paper's {paper.FA1_MIB[OURS][n]}"
            passed = abs(ours / theirs - 1) <= 1 / 3
            found.times("C8", what, theirs, ours, passed, why, basis=basis, form="{:.1f}x")
    for name in (OURS, BASELINE):
        measured = {n: peak for (backend, n), peak in peaks.items() if backend == name and n >= 1024}
        theirs = log_slope({n: mib for n, mib in paper.FA1_MIB[name].items() if n in measured})
        ours = log_slope(measured)
        if ours is not None and theirs is not None:
            what, passed = f"slope of log memory against log length, {name}", abs(ours - theirs) <= 0.05
            why = "within 0.05 of Table 21's at the same lengths, from 1024 tokens on"
            found.times("C8", what, theirs, ours, passed, why, basis=basis, form="{:.2f}")
    if (OURS, 65536) in peaks:
        gib, limit = peaks[OURS, 65536] / 2**30, paper.FA1_MIB[OURS][65536] / 1024
        what, why = "peak memory at 65536 tokens", "at most the paper's and 5 %"
        found.times("C8", what, limit, gib, gib <= 1.05 * limit, why, basis=basis, form="{:.1f} GiB")


def _memory_basis(results: Results) -> str:
    """Where the memory figures come from. A CPU counts one head; ratios and slopes hold for any batch and heads."""
    return "allocations counted on a CPU, one head" if _on_cpu(results) else results["device"]


def log_slope(values: dict[int, float]) -> float | None:
    """The exponent of a power law fitted to `values` by least squares on logarithms; None below three points."""
    if len(values) < 3:
        return None
    x, y = [math.log(n) for n in values], [math.log(v) for v in values.values()]
    return statistics.linear_regression(x, y).slope


def _judge_approximate(results: Results, found: Verdicts) -> None:
    """C9: the shortest length from which on an approximation is faster than exact attention."""
    for name in APPROXIMATE:
        every = timed(results, kind="time", figure="fa1", mask="plain")
        samples = [sample for sample in every if {name, OURS} <= {*sample["ms"]}]
        if len(samples) < 2:
            continue
        faster = [s["length"] for s in samples if beside(took(s, OURS), took(s, name)) == SLOWER]
        slower = [s["length"] for s in samples if s["length"] not in faster]
        overtakes = min((n for n in faster if n > max(slower, default=0)), default=None)
        longest, last = samples[-1]["length"], took(samples[-1], OURS) / took(samples[-1], name)
        shown = f"from {overtakes} tokens on" if overtakes else f"nowhere up to {longest}"
        why = (
            "a length exists; in eager PyTorch, as the paper timed it, and nothing is said of its quality; at "
            f"{longest} tokens flash takes {last.shown()} its time"
        )
        theirs = "between 512 and 1024 tokens" if name == APPROXIMATE[0] else NOT_STATED
        found.add("C9", f"where {name} overtakes flash", theirs, shown, overtakes is not None, why)


def _judge_head_dim(results: Results, found: Verdicts) -> None:
    means = {}
    for d, causal in itertools.product((64, 128), (False, True)):
        samples = timed(results, kind="time", figure="fa2", head_dim=d, causal=causal)
        gains = [gain for s in samples if 1024 <= s["length"] <= 8192 and (gain := speedup(s))]
        if not gains:
            return
        means[d, causal] = Times(map(statistics.geometric_mean, zip(*gains, strict=False)))
    shown = {key: gain.shown("{:.1f}x") for key, gain in means.items()}
    ours = ", ".join(f"d{d}{' causal' if causal else ''} {gain}" for (d, causal), gain in shown.items())
    passed = means[128, False].high < means[64, False].low and means[128, True].low > means[128, False].high
    what, theirs = f"{BASELINE}/{OURS} time, mean over 1k to 8k", "lower at d128 than d64, larger when causal"
    why = "the claim is the order, by ranges that do not overlap; over the fastest of eager PyTorch"
    found.add("C17", what, theirs, ours, passed, why)


def _judge_causal(results: Results, found: Verdicts) -> None:
    """C20, a row for each length."""
    why = "1.7x at least, at every length; in short rows a larger share of the blocks is on the diagonal"
    for d in (64, 128, 256):
        full, causal = (
            {s["length"]: t for s in timed(results, kind="time", figure="fa2", head_dim=d, causal=causal)
             if (t := took(s, OURS))}
            for causal in (False, True)
        )  # fmt: skip
        for n in sorted(full.keys() & causal.keys()):
            gain, what = full[n] / causal[n], f"full over causal time, head_dim {d}, {n} tokens"
            found.times("C20", what, 1.75, gain, gain.low >= 1.7, why, theirs="1.7 to 1.8x")


def _judge_rates(results: Results, found: Verdicts) -> None:
    """C24: absolute TFLOP/s, compared on an H100 or H200 only; the two have the same compute."""
    same_chip = any(name in results["device"] for name in ("H100", "H200"))
    for phase, figure in (("forward", paper.FA3_FORWARD), ("backward", paper.FA3_BACKWARD)):
        for (d, causal), series in figure.items():
            for sample in timed(results, kind="time", figure="fa2", head_dim=d, causal=causal, length=8192):
                ours, theirs = tflops(sample, OURS, phase), series["fa3"][8192]
                if ours is None:
                    continue
                rates = {name: tflops(sample, name, phase).median for name in sample["ms"] if name != OURS}
                others = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
                what = f"{phase}, head_dim {d}{', causal' if causal else ''}, 8192 tokens"
                why = (
                    "95 % at least; FA3 ran on an H100 locked at 1830 MHz, ours is not locked; FA2 had "
                    f"{series['fa2'][8192]:.0f}. In this run: {others}"
                )
                passed = ours.low >= 0.95 * theirs if same_chip else None
                found.times("C24", what, theirs, ours, passed, why, form="{:.0f} TFLOP/s")


def _judge_chunks(results: Results, found: Verdicts) -> None:
    """C32: attention in chunks with checkpointing."""
    peaks = {n: peak for (backend, n), peak in _peaks(results).items() if backend == "chunked" and n >= 1024}
    if (slope := log_slope(peaks)) is not None:
        what, why = "slope of log memory against log length, chunked", "1.15 at most, from 1024 tokens on"
        basis = _memory_basis(results)
        found.add("C32", what, "1", f"{slope:.2f}", slope <= 1.15, why, ratio=slope, basis=basis)
    for sample in timed(results, kind="time", figure="fa1", mask="plain"):
        chunked, ours = took(sample, "chunked"), took(sample, OURS)
        if chunked and ours and sample["length"] in MIDDLE:
            gain = chunked / ours
            passed, why = gain.low >= 2, "at least 2x"
            if gain.median > 8:  # twice the paper's most
                passed = None
                why = "chunked attention is eager PyTorch operations, and its backward computes each chunk twice more"
            what = f"time of chunked attention over flash, {sample['length']} tokens"
            ratio = gain.median / min(max(gain.median, 2), 4)
            found.add("C32", what, "2x to 4x", gain.shown("{:.1f}x"), passed, why, ratio=ratio)


def _judge_stored(results: Results, found: Verdicts) -> None:
    """C30: torch.compile's standard attention stores the probabilities for the backward, ours computes them again."""
    for sample in timed(results, kind="time", figure="stored"):
        length, phases = sample["length"], ("forward", "backward", "both")
        if not {COMPILED, OURS} <= {*sample["ms"]} or length not in paper.STORED_OVER_FLASH:
            continue
        gains = {phase: took(sample, COMPILED, phase) / took(sample, OURS, phase) for phase in phases}
        faster = beside(took(sample, OURS, "forward"), took(sample, COMPILED, "forward")) == FASTER
        shown = ", ".join(f"{gain.shown()} {phase}" for phase, gain in gains.items())
        theirs = "{:.2f}x forward, {:.2f}x both".format(*paper.STORED_OVER_FLASH[length])
        why = (
            "faster forward, and both together 0.9x at least; stored by torch.compile in two matrix products and a "
            "fused softmax, where the paper's was one kernel, which would take a kernel of its own here"
        )
        what, passed = f"time with stored probabilities over ours, {length} tokens", gains["both"].low >= 0.9
        found.add("C30", what, theirs, shown, faster and passed, why)
