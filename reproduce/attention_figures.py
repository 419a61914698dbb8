"""The attention experiment's table, picture and verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

from . import paper, plots
from .experiment import Results, Sample, Verdict, Verdicts, pick, text_table

OURS, BASELINE = "flash", "standard"
PORTABLE = "flash, portable"  # the Triton kernels, also on a Hopper GPU
MASK_NAMES = {"plain": "plain", "padding": "key padding", "padding+dropout": "key padding and dropout"}


def milliseconds(sample: Sample, backend: str, phase: str) -> float | None:
    """The median over rounds of phase "forward", "backward" or "both"; None if the sample has no such backend."""
    phases = sample["ms"].get(backend)
    if phases is None:
        return None
    rounds = [sum(pair) for pair in zip(*phases.values(), strict=True)] if phase == "both" else phases[phase]
    return statistics.median(rounds)


def flops(sample: Sample, phase: str) -> float:
    """Forward 4 * batch * heads * length^2 * head_dim, half if causal; backward 2.5 times that (FA2, section 4.1)."""
    forward = 4 * sample["batch"] * sample["heads"] * sample["length"] ** 2 * sample["head_dim"]
    forward /= 2 if sample["causal"] else 1
    return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[phase]


def tflops(sample: Sample, backend: str, phase: str) -> float | None:
    took = milliseconds(sample, backend, phase)
    return took and flops(sample, phase) / took / 1e9


def speedup(sample: Sample) -> float | None:
    """Time of standard attention over ours, forward and backward."""
    standard, ours = milliseconds(sample, BASELINE, "both"), milliseconds(sample, OURS, "both")
    return standard / ours if standard and ours else None


def _timed(results: Results, **where: object) -> list[Sample]:
    return sorted(pick(results, kind="time", **where), key=lambda sample: sample["length"])


def _backends(results: Results, kind: str) -> list[str]:
    names = {name for sample in pick(results, kind="time") for name in sample["ms"]}
    if kind == "memory":
        names = {sample["backend"] for sample in pick(results, kind="memory")}
    first = [name for name in (BASELINE, "naive", OURS) if name in names]
    return first + sorted(names - set(first))


def table(results: Results) -> str:
    """Forward+backward ms of every workload and backend; flash also in TFLOP/s and as a share of the matrix rate."""
    backends = _backends(results, "time")
    rate = next((sample["flops"] for sample in pick(results, kind="matrix_rate")), None)
    rows = []
    groups = sorted(
        _timed(results), key=lambda s: (s["figure"], s["mask"], s["head_dim"], s["causal"], s["length"])
    )
    for sample in groups:
        shape = f"{sample['figure']} b{sample['batch']} h{sample['heads']} n{sample['length']} d{sample['head_dim']}"
        shape += (" causal" if sample["causal"] else "") + (
            f" {sample['mask']}" if sample["mask"] != "plain" else ""
        )
        times = [milliseconds(sample, backend, "both") for backend in backends]
        ours, gain = tflops(sample, OURS, "both"), speedup(sample)
        rows.append(
            [
                shape,
                *(f"{t:.3g}" if t else "-" for t in times),
                f"{gain:.2f}" if gain else "-",
                f"{ours:.0f}" if ours else "-",
                f"{1e12 * ours / rate:.0%}" if ours and rate else "-",
            ]
        )
    header = ["forward+backward, ms", *backends, f"{BASELINE}/{OURS}", "TFLOP/s", "of matmul"]
    lines = [text_table(header, rows), ""] if rows else []
    lines.append(_memory_table(results))
    if rate:
        lines.append(f"matrix rate of this run: {rate / 1e12:.1f} TFLOP/s; TFLOP/s are {OURS}'s")
    reasons = {(s["backend"], s["mask"]): s["refused"] for s in results["samples"] if "refused" in s}
    lines += [f"refused on {MASK_NAMES[mask]}: {reason}" for (_, mask), reason in sorted(reasons.items())]
    return "\n".join(lines)


def _peaks(results: Results) -> dict[tuple[str, int], float]:
    """(backend, length) -> peak bytes on Table 21's workload, without masks."""
    samples = pick(results, kind="memory", figure="fa1", mask="plain")
    return {(s["backend"], s["length"]): s["peak_bytes"] for s in samples}


def _memory_table(results: Results) -> str:
    peaks, names = _peaks(results), _backends(results, "memory")
    rows = []
    for n in sorted({n for _, n in peaks}):
        mib = [f"{peaks[name, n] / 2**20:.4g}" if (name, n) in peaks else "-" for name in names]
        both = (BASELINE, n) in peaks and (OURS, n) in peaks
        rows.append([f"n{n}", *mib, f"{peaks[BASELINE, n] / peaks[OURS, n]:.1f}" if both else "-"])
    return text_table(["peak MiB, forward+backward", *names, f"{BASELINE}/{OURS}"], rows)


def draw(results: Results, path: Path) -> None:
    """Time with each of the three masks, peak memory, TFLOP/s on FA2's workload; a panel for each one measured."""
    shapes = sorted({(s["head_dim"], s["causal"]) for s in _timed(results, figure="fa2")})
    masks = [mask for mask in MASK_NAMES if _timed(results, figure="fa1", mask=mask)]
    panels = len(masks) + bool(_peaks(results)) + len(shapes)
    with plots.picture(path, max(1, panels), title=f"Attention on {results['device']}") as axes:
        free = iter(axes)
        for mask in masks:
            _draw_times(next(free), results, mask)
        if _peaks(results):
            _draw_memory(next(free), results)
        for head_dim, causal in shapes:
            _draw_rates(next(free), results, head_dim, causal)
        plots.legend_below(axes)


def _draw_lines(
    axis: plots.Axes, names: list[str], lengths: list[int], value: Callable[[str, int], float | None]
) -> None:
    """A line for each backend through its values against length; ours is drawn last, so that it lies on top."""
    for name in sorted(names, key=lambda name: name == OURS):
        points = [(n, found) for n in lengths if (found := value(name, n)) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=plots.colour(name, tuple(names)), label=name)
    plots.length_axis(axis, lengths)


def _draw_times(axis: plots.Axes, results: Results, mask: str) -> None:
    samples = {s["length"]: s for s in _timed(results, figure="fa1", mask=mask)}
    names = _backends(results, "time")
    _draw_lines(axis, names, list(samples), lambda name, n: milliseconds(samples[n], name, "both"))
    axis.set_yscale("log")
    axis.set_ylabel("ms, forward and backward")
    axis.set_title(f"Time, {MASK_NAMES[mask]}")


def _draw_memory(axis: plots.Axes, results: Results) -> None:
    mib = {where: peak / 2**20 for where, peak in _peaks(results).items()}
    lengths = sorted({n for _, n in mib})
    _draw_lines(axis, _backends(results, "memory"), lengths, lambda name, n: mib.get((name, n)))
    # A CPU counts one head of one sequence, so the paper's memory, of 128 heads, is drawn divided by 128.
    heads = 1 if _on_cpu(results) else 128
    for name, series in paper.FA1_MIB.items():
        points = [(n, theirs * heads / 128) for n, theirs in series.items() if n in lengths]
        if points:
            label = f"FA1's {name}, Table 21"
            axis.plot(*zip(*points, strict=True), ":", color=plots.colour(name), label=label)
    axis.set_yscale("log", base=2)
    axis.set_ylabel("peak MiB" + (", one head" if heads == 1 else ""))
    axis.set_title("Peak memory, forward and backward")


def _on_cpu(results: Results) -> bool:
    return results["device"].startswith("CPU")


def _draw_rates(axis: plots.Axes, results: Results, head_dim: int, causal: bool) -> None:
    samples = {s["length"]: s for s in _timed(results, figure="fa2", head_dim=head_dim, causal=causal)}
    names = _backends(results, "time")
    _draw_lines(axis, names, list(samples), lambda name, n: tflops(samples[n], name, "both"))
    if theirs := paper.FA2_H100.get((head_dim, causal)):
        axis.plot(*zip(*theirs["fa2"].items(), strict=True), ":", color="black", label="FA2 on an H100")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("TFLOP/s, forward and backward")
    axis.set_title(f"head_dim {head_dim}{', causal' if causal else ''}, 16k tokens")


def judge(results: Results) -> list[Verdict]:
    """C7, C8, C17, C20, C24 and C32."""
    found = Verdicts(results["device"])
    _judge_speed(results, found)
    _judge_growth(results, found)
    _judge_memory(results, found)
    _judge_head_dim(results, found)
    _judge_causal(results, found)
    _judge_rates(results, found)
    _judge_chunks(results, found)
    return found


def _judge_speed(results: Results, found: Verdicts) -> None:
    for mask, words in MASK_NAMES.items():
        for sample in _timed(results, figure="fa1", mask=mask):
            n, ours = sample["length"], speedup(sample)
            if n not in (1024, 2048, 4096) or ours is None:
                continue
            standard, flash = (paper.FA1_MS[mask, name][n] for name in (BASELINE, OURS))
            theirs = standard / flash
            what, passed = f"{BASELINE}/{OURS} time, {words}, {n} tokens", round(ours, 2) >= round(theirs, 2)
            why = "at least the paper's speed-up; milliseconds of an A100 are not compared"
            found.compare("C7", what, "{:.2f}x", theirs, ours, passed, why)
    if timed := [s for s in _timed(results, figure="fa1") if speedup(s)]:
        slower = ", ".join(f"{s['length']} {s['mask']}" for s in timed if speedup(s) < 1.0) or "none"
        what = "lengths where ours is slower than standard attention"
        found.add("C7", what, "none", slower, slower == "none", f"over {len(timed)} workloads")


def _judge_growth(results: Results, found: Verdicts) -> None:
    samples = _timed(results, figure="fa1", mask="plain")
    times = {s["length"]: t for s in samples if (t := milliseconds(s, OURS, "both"))}
    growth = [times[2 * n] / times[n] for n in times if n >= 4096 and 2 * n in times]
    if growth:
        ours, flash = statistics.geometric_mean(growth), paper.FA1_MS["plain", "flash"]
        theirs = (flash[65536] / flash[4096]) ** (1 / 4)  # four doublings
        what, why = "growth of time when the length doubles, from 4096", "quadratic is 4; within 10 % of it"
        found.compare("C7", what, "{:.2f}x", theirs, ours, 3.6 <= ours <= 4.4, why)


def _judge_memory(results: Results, found: Verdicts) -> None:
    peaks, basis = _peaks(results), _memory_basis(results)
    for n in (1024, 2048, 4096):
        if (BASELINE, n) in peaks and (OURS, n) in peaks:
            ours = peaks[BASELINE, n] / peaks[OURS, n]
            theirs = paper.FA1_MIB[BASELINE][n] / paper.FA1_MIB[OURS][n]
            why = "within a third either way"
            if ours > 1.05 * theirs and not _on_cpu(results):  # a CPU counts one head, the paper 128
                mib = peaks[OURS, n] / 2**20
                why += f"; above it because {OURS} takes {mib:.0f} MiB, the paper's {paper.FA1_MIB[OURS][n]}"
            what, passed = f"{BASELINE}/{OURS} peak memory at {n} tokens", abs(ours / theirs - 1) <= 1 / 3
            found.compare("C8", what, "{:.1f}x", theirs, ours, passed, why, basis=basis)
    for name in (OURS, BASELINE):
        measured = {n: peak for (backend, n), peak in peaks.items() if backend == name and n >= 1024}
        theirs = log_slope({n: mib for n, mib in paper.FA1_MIB[name].items() if n in measured})
        ours = log_slope(measured)
        if ours is not None and theirs is not None:
            what, passed = f"slope of log memory against log length, {name}", abs(ours - theirs) <= 0.05
            why = "within 0.05 of Table 21's at the same lengths, from 1024 tokens on"
            found.compare("C8", what, "{:.2f}", theirs, ours, passed, why, basis=basis)
    if (OURS, 65536) in peaks:
        gib, limit = peaks[OURS, 65536] / 2**30, paper.FA1_MIB[OURS][65536] / 1024
        what, why = "peak memory at 65536 tokens", "at most the paper's and 5 %"
        found.compare("C8", what, "{:.1f} GiB", limit, gib, gib <= 1.05 * limit, why, basis=basis)


def _memory_basis(results: Results) -> str:
    """Where the memory figures come from. A CPU counts one head; ratios and slopes hold for any batch and heads."""
    return "allocations counted on a CPU, one head" if _on_cpu(results) else results["device"]


def log_slope(values: dict[int, float]) -> float | None:
    """The exponent of a power law fitted to `values` by least squares on logarithms; None below three points."""
    if len(values) < 3:
        return None
    x, y = [math.log(n) for n in values], [math.log(v) for v in values.values()]
    return statistics.linear_regression(x, y).slope


def _judge_head_dim(results: Results, found: Verdicts) -> None:
    means = {}
    for d in (64, 128):
        for causal in (False, True):
            samples = _timed(results, figure="fa2", head_dim=d, causal=causal)
            gains = [gain for s in samples if 1024 <= s["length"] <= 8192 and (gain := speedup(s))]
            if not gains:
                return
            means[d, causal] = statistics.geometric_mean(gains)
    ours = ", ".join(f"d{d}{' causal' if causal else ''} {gain:.1f}x" for (d, causal), gain in means.items())
    passed = means[128, False] < means[64, False] and means[128, True] > means[128, False]
    what, theirs = f"{BASELINE}/{OURS} time, mean over 1k to 8k", "lower at d128 than d64, larger when causal"
    found.add("C17", what, theirs, ours, passed, "the claim is the order")


def _judge_causal(results: Results, found: Verdicts) -> None:
    for d in (64, 128, 256):
        times = {
            (s["length"], s["causal"]): t
            for s in _timed(results, figure="fa2", head_dim=d)
            if (t := milliseconds(s, OURS, "both"))
        }
        ratios = {
            n: t / times[n, True] for (n, causal), t in times.items() if not causal and (n, True) in times
        }
        if long := [ratio for n, ratio in ratios.items() if n >= 4096]:
            what = f"full over causal time, head_dim {d}, {min(ratios)} to {max(ratios)} tokens"
            why = "1.7x at least, at each length from 4096 on: the paper's figure is of long sequences"
            shown = ", ".join(f"{ratio:.2f}x" for ratio in ratios.values())
            ratio = statistics.geometric_mean(long) / 1.75
            found.add("C20", what, "1.7 to 1.8x", shown, min(long) >= 1.7, why, ratio=ratio)


def _judge_rates(results: Results, found: Verdicts) -> None:
    """C24: absolute TFLOP/s, compared on an H100 or H200 only; the two have the same compute."""
    same_chip = any(name in results["device"] for name in ("H100", "H200"))
    for phase, figure in (("forward", paper.FA3_FORWARD), ("backward", paper.FA3_BACKWARD)):
        for (d, causal), series in figure.items():
            for sample in _timed(results, figure="fa2", head_dim=d, causal=causal, length=8192):
                ours, theirs = tflops(sample, OURS, phase), series["fa3"][8192]
                if ours is None:
                    continue
                beside = ", ".join(f"{n} {tflops(sample, n, phase):.0f}" for n in sample["ms"] if n != OURS)
                what = f"{phase}, head_dim {d}{', causal' if causal else ''}, 8192 tokens"
                why = (
                    "95 % at least; FA3 ran on an H100 locked at 1830 MHz, ours is not locked; FA2 had "
                    f"{series['fa2'][8192]:.0f}. In this run: {beside}"
                )
                passed = ours >= 0.95 * theirs if same_chip else None
                found.compare("C24", what, "{:.0f} TFLOP/s", theirs, ours, passed, why)


def _judge_chunks(results: Results, found: Verdicts) -> None:
    """C32: attention in chunks with checkpointing."""
    peaks = {n: peak for (backend, n), peak in _peaks(results).items() if backend == "chunked" and n >= 1024}
    if (slope := log_slope(peaks)) is not None:
        what, why = "slope of log memory against log length, chunked", "1.15 at most, from 1024 tokens on"
        basis = _memory_basis(results)
        found.add("C32", what, "1", f"{slope:.2f}", slope <= 1.15, why, ratio=slope, basis=basis)
    for sample in _timed(results, figure="fa1", mask="plain"):
        chunked, ours = (milliseconds(sample, name, "both") for name in ("chunked", OURS))
        if chunked and ours and sample["length"] in (1024, 2048, 4096):
            gain, passed, why = chunked / ours, chunked >= 2 * ours, "at least 2x"
            if gain > 8:  # twice the paper's most
                passed = None
                why = "chunked attention is eager PyTorch operations, and its backward computes each chunk twice more"
            what, ratio = (
                f"time of chunked attention over flash, {sample['length']} tokens",
                gain / min(max(gain, 2), 4),
            )
            found.add("C32", what, "2x to 4x", f"{gain:.1f}x", passed, why, ratio=ratio)
