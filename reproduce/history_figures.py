"""The history experiment's table, picture and verdicts."""

from __future__ import annotations

import statistics
from pathlib import Path

from . import paper, plots
from .attention_figures import PORTABLE, milliseconds
from .experiment import Results, Sample, Verdict, Verdicts, pick, text_table

COUNTED = "counted on one head"


def table(results: Results) -> str:
    """What was counted, followed by what was timed."""
    parts = []
    rows = [[s["softmax"], f"{s['accesses']:.2f}"] for s in pick(results, kind="softmax count")]
    if rows:
        parts.append(text_table(["softmax", "memory accesses an element, counted"], rows))
    rows = [
        [f"{s['keys']} keys", f"{s['bytes'] / 1e6:.3f}", f"{_formula(s) / 1e6:.3f}"]
        for s in pick(results, kind="tile count")
    ]
    if rows:
        parts.append(text_table(["flash1 forward, tiles of", "MB, one head, counted", "formula"], rows))
    rows = [
        [s["backend"], f"{s['products']:.2f}", f"{s['saved']:.0f}"]
        for s in pick(results, kind="backward count")
    ]
    if rows:
        parts.append(text_table(["backward", "matrix products, counted", "bytes saved a query"], rows))
    for sample in pick(results, kind="order"):
        shape = f"n{sample['length']} d{sample['head_dim']}" + (" causal" if sample["causal"] else "")
        times = ", ".join(
            f"{name} {milliseconds(sample, name, 'forward'):.3g} + {milliseconds(sample, name, 'backward'):.3g}"
            for name in sample["ms"]
        )
        parts.append(f"forward + backward ms, {shape}: {times}")
    for kind, what in (
        ("tiles", "flash1 forward ms by keys"),
        ("programs", "two_pass forward ms by programs"),
    ):
        for sample in pick(results, kind=kind):
            times = ", ".join(f"{name} {ms:.3g}" for name, ms in _medians(sample).items())
            parts.append(f"{what}, n{sample['length']} b{sample['batch']} h{sample['heads']}: {times}")
    for sample in pick(results, kind="softmax"):
        times = ", ".join(f"{name} {ms:.3g}" for name, ms in _medians(sample).items())
        parts.append(f"softmax ms, {sample['rows']} x {sample['length']}, k {sample['k']}: {times}")
    return "\n".join(parts)


def _medians(sample: Sample) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in sample["ms"].items()}


def _formula(sample: Sample) -> int:
    """Bytes of (3 T_c + 1) N d 16-bit elements: K and V are read once; for each of the T_c tiles of keys, Q is read,
    O is written and, for all tiles but the first, O is read back."""
    passes = -(-sample["length"] // sample["tile"][1])
    return (3 * passes + 1) * sample["length"] * sample["head_dim"] * 2


def draw(results: Results, path: Path) -> None:
    """Softmax accesses, FlashAttention's tiles, products of the backward, loop order; a panel for each measured."""
    softmax, tiles = pick(results, kind="softmax count"), pick(results, kind="tile count")
    products, order = pick(results, kind="backward count"), pick(results, kind="order", head_dim=64)
    timed, rows = pick(results, kind="tiles"), pick(results, kind="softmax", k=5)
    panels = sum(map(bool, (softmax, tiles, products, order, timed, rows)))
    with plots.picture(
        path, max(1, panels), title=f"The algorithms that led to flash, {results['device']}"
    ) as axes:
        free = iter(axes)
        if softmax:
            bars = {s["softmax"]: s["accesses"] for s in softmax}
            _draw_bars(next(free), bars, "Softmax of a long row", "memory accesses an element, counted")
        if tiles:
            _draw_tiles(next(free), tiles)
        if products:
            bars = {s["backend"]: s["products"] for s in products}
            _draw_bars(next(free), bars, "Backward", "matrix products, counted")
        if timed:
            axis = next(free)
            for sample in timed:
                axis.plot(
                    *zip(*_medians(sample).items(), strict=True), "o-", label=f"{sample['length']} tokens"
                )
            _label(axis, "FlashAttention's forward", "keys of a tile", "ms")
        if order:
            _draw_order(next(free), order)
        if rows:
            _draw_softmax(next(free), rows)


def _label(axis: plots.Axes, title: str, across: str, up: str) -> None:
    axis.set_title(title)
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    plots.legend(axis)


def _draw_bars(axis: plots.Axes, values: dict[str, float], title: str, unit: str) -> None:
    names = list(values)[::-1]
    bars = axis.barh(names, [values[name] for name in names])
    axis.bar_label(bars, fmt="%.3g", padding=3)
    axis.grid(visible=False, axis="y")
    axis.set_xlim(0, 1.15 * max(values.values()))
    _label(axis, title, unit, "")


def _draw_tiles(axis: plots.Axes, samples: list[Sample]) -> None:
    keys = [s["keys"] for s in samples]
    axis.plot(keys, [s["bytes"] * paper.FIGURE_2_HEADS / 1e9 for s in samples], "o-", label="flash1, counted")
    theirs = [(n, paper.FIGURE_2_TILES[n]["gb"]) for n in keys if n in paper.FIGURE_2_TILES]
    if theirs:
        axis.plot(*zip(*theirs, strict=True), "x", color=plots.colour("paper"), label="the paper")
    axis.set_xscale("log", base=2)
    axis.set_xticks(keys, [str(n) for n in keys])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    _label(axis, "FlashAttention's forward", "keys of a tile", "GB, GPT-2 medium, batch 64")


def _draw_order(axis: plots.Axes, samples: list[Sample]) -> None:
    samples = sorted(samples, key=lambda s: s["length"])
    for causal, line in ((False, "o-"), (True, "o--")):
        alike = [s for s in samples if s["causal"] is causal]
        for name in ("two_pass", "flash1", PORTABLE):
            points = [(s["length"], milliseconds(s, name, "both")) for s in alike]
            if points:
                label = None if causal else name
                colour = plots.colour(name.split(",")[0])
                axis.plot(*zip(*points, strict=True), line, color=colour, label=label)
    plots.length_axis(axis, sorted({s["length"] for s in samples}))
    axis.set_yscale("log")
    _label(axis, "16k tokens, head_dim 64 (dashed: causal)", "sequence length", "ms, forward and backward")


def _draw_softmax(axis: plots.Axes, samples: list[Sample]) -> None:
    for rows in sorted({s["rows"] for s in samples}):
        alike = sorted((s for s in samples if s["rows"] == rows), key=lambda s: s["length"])
        for name in ("online", "online with top-k"):
            safe = "safe" if name == "online" else "safe, top-k"
            gains = [(s["length"], _medians(s)[safe] / _medians(s)[name]) for s in alike]
            axis.plot(*zip(*gains, strict=True), "o-", label=f"{name}, {rows} rows")
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    _label(axis, "Softmax, safe over online", "elements of a row", "times as fast")


def judge(results: Results) -> list[Verdict]:
    """C4, C18, C19, C21, C22, C27 and C28."""
    found = Verdicts(results["device"])
    _judge_tiles(results, found)
    _judge_order(results, found)
    _judge_programs(results, found)
    _judge_backward(results, found)
    _judge_softmax(results, found)
    return found


def _judge_tiles(results: Results, found: Verdicts) -> None:
    theirs = paper.FIGURE_2_TILES
    for sample in pick(results, kind="tile count", length=1024):
        keys = sample["keys"]
        if keys not in theirs:
            continue
        gb = sample["bytes"] * paper.FIGURE_2_HEADS / 1e9
        exact = sample["bytes"] - sample["statistics"] == _formula(sample)
        passed = exact and abs(gb / theirs[keys]["gb"] - 1) < 0.05
        what = f"bytes of FlashAttention's forward, {keys} keys a tile"
        why = "(3 T_c + 1) N d elements to the byte, and the softmax's statistics, which the paper leaves out"
        basis = f"{COUNTED}, times {paper.FIGURE_2_HEADS}"
        found.compare("C4", what, "{:.2f} GB", theirs[keys]["gb"], gb, passed, why, basis=basis)
    for sample in pick(results, kind="tiles", length=1024):
        ms = _medians(sample)
        if not {"64", "256", "512"} <= ms.keys():
            continue
        fall, expected = ms["64"] / ms["256"], theirs[64]["ms"] / theirs[256]["ms"]
        what, why = "time, tiles of 64 over 256 keys", "1.3x at least: fewer bytes take less time"
        found.compare("C4", what, "{:.2f}x", expected, fall, fall >= 1.3, why)
        rest, expected = ms["256"] / ms["512"], theirs[256]["ms"] / theirs[512]["ms"]
        what, passed = "time, tiles of 256 over 512 keys", abs(rest / expected - 1) <= 0.1
        why = "within 10 % of the paper's: beyond 256 arithmetic decides; ours holds 32 queries a tile at either"
        found.compare("C4", what, "{:.2f}x", expected, rest, passed, why)


def _judge_order(results: Results, found: Verdicts) -> None:
    """C18, at the shapes of FlashAttention-2's Figure 7, which is measured on an H100."""
    for (head_dim, causal), theirs in paper.FA2_H100.items():
        samples = pick(results, kind="order", head_dim=head_dim, causal=causal)
        samples = [s for s in samples if s["length"] in theirs["fa1"]]
        if not samples:
            continue
        expected = [theirs["fa2"][s["length"]] / theirs["fa1"][s["length"]] for s in samples]
        gains = [milliseconds(s, "flash1", "both") / milliseconds(s, PORTABLE, "both") for s in samples]
        what = f"time of flash1 over flash, both in Triton, head_dim {head_dim}, {'causal' if causal else 'full'}"
        ratio = statistics.geometric_mean(gains) / statistics.geometric_mean(expected)
        passed = min(gains) >= 1.3
        why = f"1.3x at least, at each of {len(samples)} lengths; the paper compares two CUDA kernels"
        if ratio > 2:  # more than the loop order can explain
            passed = None
            why = "flash1 is the algorithm as printed, one program per head; the paper measured tuned CUDA"
        found.add("C18", what, _span(expected), _span(gains), passed, why, ratio=ratio)


def _span(gains: list[float]) -> str:
    return f"{min(gains):.2f}x to {max(gains):.2f}x"


def _judge_programs(results: Results, found: Verdicts) -> None:
    for sample in sorted(pick(results, kind="programs"), key=lambda s: s["heads"]):
        ms, heads = _medians(sample), sample["heads"]
        bound = max(1.0, min(sample["processors"], heads * sample["length"] / 64) / heads)
        gain = ms["one"] / ms["many"]
        what = (
            f"one program a head over one a tile of queries, batch * heads {heads}, {sample['length']} tokens"
        )
        passed = gain >= 0.5 * bound
        why = (
            "at least half the bound; several programs on a processor can exceed it; of the two-pass forward"
        )
        if bound < 1.1:
            passed = 0.9 <= gain <= 1.15
            why = "0.9x to 1.15x: by the bound, heads alone fill the GPU; it leaves out shared processors"
        found.add("C19", what, f"up to {bound:.3g}x", f"{gain:.3g}x", passed, why, ratio=gain / bound)


def _judge_backward(results: Results, found: Verdicts) -> None:
    counted = {s["backend"]: s for s in pick(results, kind="backward count")}
    checks = {s["backend"]: s for s in pick(results, kind="check")}

    def agreement(*backends: str) -> tuple[bool, str]:
        right = all(checks[backend]["passed"] for backend in backends)
        return (
            right,
            f"gradients of both {'within' if right else 'not within'} twice naive's error of float64",
        )

    if {"flash1", "flash"} <= counted.keys() & checks.keys():
        saved = [counted[name]["saved"] for name in ("flash1", "flash")]
        right, why = agreement("flash1", "flash")
        what = "bytes per query saved for the backward: maximum and sum, log-sum-exp alone"
        ours, passed = "{:.0f} and {:.0f}".format(*saved), saved == [8, 4] and right
        found.add("C21", what, "8 and 4", ours, passed, why, basis=COUNTED)
        why = "no two kernels here differ in this alone"
        found.append(Verdict("C21", "time that either saves", "log-sum-exp a little faster", why=why))
    if {"flash1", "two_pass"} <= counted.keys() & checks.keys():
        products = [counted[name]["products"] for name in ("flash1", "two_pass")]
        right, why = agreement("flash1", "two_pass")
        what = "matrix products of the backward: delta from dO * O, delta in a pass of its own"
        passed = [round(each, 2) for each in products] == [5, 7] and right
        found.add("C22", what, "5 and 7", "{:.3g} and {:.3g}".format(*products), passed, why, basis=COUNTED)
    samples = [
        s for s in pick(results, kind="order", causal=False) if {"flash1", "two_pass"} <= s["ms"].keys()
    ]
    for head_dim in sorted({s["head_dim"] for s in samples}):
        alike = [s for s in samples if s["head_dim"] == head_dim]
        gain = statistics.geometric_mean(
            milliseconds(s, "two_pass", "backward") / milliseconds(s, "flash1", "backward") for s in alike
        )
        why = (
            f"at least 1.1x, geometric mean over {len(alike)} lengths: fewer products must take less time, not in "
            "proportion; the paper states no time; both with one program per head"
        )
        what = f"time of the backward in two passes over one, head_dim {head_dim}"
        found.add("C22", what, "1.4x by the products", f"{gain:.2f}x", gain >= 1.1, why, ratio=gain / 1.4)


def _judge_softmax(results: Results, found: Verdicts) -> None:
    accesses = {s["softmax"]: s["accesses"] for s in pick(results, kind="softmax count")}
    if {"safe", "online"} <= accesses.keys():
        counts = (accesses["safe"], accesses["online"])
        what, why = (
            "memory accesses per element: safe, online softmax",
            "for a row that does not stay on the chip",
        )
        ours = "{:.3g} and {:.3g}".format(*counts)
        found.add("C27", what, "4 and 3", ours, counts == (4, 3), why, basis=COUNTED)
    names = ("safe, top-k", "online, top-k", "online with top-k")
    if set(names) <= accesses.keys():
        counts = [accesses[name] for name in names]
        passed = all(abs(a - b) < 0.05 for a, b in zip(counts, (5, 4, 1), strict=True))
        what = "memory accesses per element: safe softmax then top-k, online then top-k, both in one pass"
        why = "ours includes writing the k results, which the paper leaves out"
        ours = ", ".join(f"{each:.2f}" for each in counts)
        found.add("C28", what, "5, 4 and 1", ours, passed, why, basis=COUNTED)
    timed = sorted(pick(results, kind="softmax", rows=4000), key=lambda s: (s["length"], s["k"]))
    for sample in {s["length"]: s for s in timed if s["length"] >= 4000}.values():
        gain = _medians(sample)["safe"] / _medians(sample)["online"]
        what = f"time of safe over online softmax, 4000 rows of {sample['length']}"
        why = "at least 1.2x; the paper has it from 4000 on, on a V100; our L2 cache holds 4000 rows of 4000"
        found.add("C27", what, "1.3x", f"{gain:.2f}x", gain >= 1.2, why, ratio=gain / 1.3)
    for sample in timed:
        if sample["length"] != paper.TOPK_LENGTH or sample["k"] not in paper.TOPK_SPEEDUP:
            continue
        ms, theirs = _medians(sample), paper.TOPK_SPEEDUP[sample["k"]]
        gain = ms["safe, top-k"] / ms["online with top-k"]
        what = (
            f"time of safe softmax then top-k over one pass, k {sample['k']}, 4000 rows of {sample['length']}"
        )
        why = "at least the paper's; the top-k after safe softmax is torch's"
        found.add("C28", what, f"{theirs:g}x", f"{gain:.2f}x", gain >= theirs, why, ratio=gain / theirs)
