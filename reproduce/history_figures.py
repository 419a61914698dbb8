"""The history experiment's picture and verdicts."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from . import paper, plots
from .attention_figures import flops, is_hopper
from .experiment import Results, Sample, Verdict, Verdicts, pick
from .peers import OURS, PORTABLE
from .timing import Times, gain, gains, medians, timed, took

COUNTED = "counted on one head"
ACCESSES = 4 / 3  # safe softmax's over online's
BY_PRODUCTS = "not stated; 1.4x by the products"
IN_TURN, UNSPECIALISED = "flash3, in turn", "flash3, unspecialised"
# FlashAttention-3's Table 2, where both are 661 TFLOP/s: form -> what it is, TFLOP/s
UNDONE = {
    IN_TURN: ("that is specialised, not pipelined", 582),
    UNSPECIALISED: ("that is pipelined, not specialised", 570),
}
NEITHER = {PORTABLE: ("in which only Triton pipelines", 570)}
# Of an H100 and H200: processors, and the most programs of the softmaxes' 8 warps on one of them.
PROCESSORS, ROWS_AT_ONCE = 132, 8


def _formula(sample: Sample) -> int:
    """Bytes of (3 T_c + 1) N d 16-bit elements: K and V are read once; for each of the T_c tiles of keys, Q is read,
    O is written and, for all tiles but the first, O is read back."""
    passes = -(-sample["length"] // sample["tile"][1])
    return (3 * passes + 1) * sample["length"] * sample["head_dim"] * 2


def draw(results: Results, path: Path, claim: str = "") -> bool:
    """Softmax accesses, FlashAttention's tiles, products of the backward, loop order; a panel for each measured."""
    title = f"The algorithms that led to flash, {results['device']}"
    return plots.draw(path, title, _panels(results), claim=claim)


def _panels(results: Results) -> Iterator[plots.Panel]:
    if accesses := {s["softmax"]: {"": s["accesses"]} for s in pick(results, kind="softmax count")}:
        panel = plots.bars("Softmax of a long row", accesses, across="memory accesses an element, counted")
        yield plots.of("C27", panel)
    if products := {s["backend"]: {"": s["products"]} for s in pick(results, kind="backward count")}:
        yield plots.of("C22", plots.bars("Backward", products, across="matrix products, counted"))
    title, tile = "FlashAttention's forward", {"across": "keys of a tile", "log": "x"}
    if tiles := pick(results, kind="tile count"):
        gb = {s["keys"]: s["bytes"] * paper.FIGURE_2_HEADS / 1e9 for s in tiles}
        theirs = {n: at["gb"] for n, at in paper.FIGURE_2_TILES.items() if n in gb}
        up = "GB, GPT-2 medium, batch 64"
        panel = plots.lines(title, {"flash1, counted": gb}, up=up, paper={"paper": theirs}, **tile)
        yield plots.of("C4", panel)
    if tiles := timed(results, kind="tiles"):
        series = {f"{s['length']} tokens": {int(n): took(s, n).median for n in s["ms"]} for s in tiles}
        yield plots.of("C4", plots.lines(title, series, up="ms", **tile))
    for causal in (False, True):
        if order := timed(results, kind="order", head_dim=64, causal=causal):
            series = {name: medians(order, name) for name in ("two_pass", "flash1", PORTABLE)}
            title = f"16k tokens, head_dim 64, {'causal' if causal else 'full'}"
            yield plots.of("C18", plots.lines(title, series, up="ms, forward and backward", log="y"))
    if softmax := timed(results, kind="softmax", k=5):
        series = {}
        for rows in sorted({s["rows"] for s in softmax}):
            for name, safe in (("online", "safe"), ("online with top-k", "safe, top-k")):
                ratios = gains(results, safe, name, kind="softmax", k=5, rows=rows)
                series[f"{name}, {rows} rows"] = {s["length"]: ratio.median for s, ratio in ratios}
        across = "elements of a row"
        how = {"across": across, "up": "times as fast", "log": "x"}
        yield plots.of("C27", plots.lines("Softmax, safe over online", series, **how))


def judge(results: Results) -> list[Verdict]:
    """C4, C18, C19, C21, C22, C25, C27 and C28."""
    found = Verdicts(results["device"])
    first = (_judge_tiles, _judge_order, _judge_forms, _judge_programs)
    for part in (*first, _judge_backward, _judge_changes, _judge_softmax):
        part(results, found)
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
        found.times("C4", what, theirs[keys]["gb"], gb, passed, why, basis=basis, form="{:.2f} GB")
    for _, fall in gains(results, "64", "256", kind="tiles", length=1024):
        expected, why = theirs[64]["ms"] / theirs[256]["ms"], "1.3x at least: fewer bytes take less time"
        found.times("C4", "time, tiles of 64 over 256 keys", expected, fall, fall.low >= 1.3, why)
    for _, rest in gains(results, "256", "512", kind="tiles", length=1024):
        expected = theirs[256]["ms"] / theirs[512]["ms"]
        passed = 0.9 * expected <= rest.low <= rest.high <= 1.1 * expected
        why = "within 10 % of the paper's: beyond 256 arithmetic decides; ours holds 32 queries a tile at either"
        found.times("C4", "time, tiles of 256 over 512 keys", expected, rest, passed, why)


def _judge_order(results: Results, found: Verdicts) -> None:
    """C18, at the shapes of FlashAttention-2's Figure 7, which is measured on an H100."""
    for (head_dim, causal), theirs in paper.FA2_H100.items():
        order = gains(results, "flash1", PORTABLE, kind="order", head_dim=head_dim, causal=causal)
        ours = {s["length"]: ratio for s, ratio in order if s["length"] in theirs["fa1"]}
        if not ours:
            continue
        expected = Times(theirs["fa2"][length] / theirs["fa1"][length] for length in ours)
        found_here = Times(ratio.median for ratio in ours.values())
        what = f"time of flash1 over flash, both in Triton, head_dim {head_dim}, {'causal' if causal else 'full'}"
        ratio = statistics.geometric_mean(found_here) / statistics.geometric_mean(expected)
        least, most = min(each.low for each in ours.values()), max(each.high for each in ours.values())
        passed = least >= 1.3 and most <= 2 * expected.high
        why = (
            f"1.3x at least, at each of {len(ours)} lengths, and twice the paper's most at most; flash1 is the "
            f"algorithm as printed, {_tiles(results, head_dim)}one program a head, its output in memory; the paper "
            "compares two CUDA kernels, of which FlashAttention's kept a head's output on the chip"
        )
        if unraced := _unraced(results, head_dim):
            passed, why = None, f"{unraced}; {why}"
        found.add("C18", what, _span(expected), _span(found_here), passed, why, ratio=ratio)


def _unraced(results: Results, head_dim: int) -> str:
    """Which kernel of flash1 ran with the first of its tiles, since another of them failed; "" if none."""
    races = (sample for sample in results["samples"] if sample["kind"] == "flash1 tiles")
    kernels = [each["kernel"] for each in races if each["head_dim"] == head_dim and "ms" not in each]
    names = " and ".join(kernels)
    return f"flash1's {names} not with its fastest tile: one broke their race" if names else ""


def _span(gains: Times) -> str:
    return f"{gains.low:.2f}x to {gains.high:.2f}x"


def _judge_forms(results: Results, found: Verdicts) -> None:
    """C25, on the chip that the paper measured. What was timed before flash3.py was there has a form with neither."""
    if not is_hopper(results):
        return
    apart = any(gains(results, form, OURS, kind="ablation") for form in UNDONE)
    why = "gains half to twice as much" if apart else "both together, over Triton's own; the claim is of each"
    for form, (without, rate) in (UNDONE if apart else NEITHER).items():
        for sample, ratio in gains(results, form, OURS, kind="ablation"):
            both, one = (flops(sample, "forward") / 1e9 / took(sample, name).median for name in (OURS, form))
            factor = 661 / rate
            held = ratio.low > 1 and 0.5 <= (ratio.median - 1) / (factor - 1) <= 2
            what = f"forward of 4 x 16 x 8448 x 128, over the one {without}"
            shown = f"{ratio.shown()} ({both:.0f} over {one:.0f} TFLOP/s)"
            theirs, share = f"{factor:.2f}x (661 over {rate})", ratio.median / factor
            found.add("C25", what, theirs, shown, held if apart else None, why, ratio=share)


def _tiles(results: Results, head_dim: int) -> str:
    """Which of its tiles flash1 was timed with; after a failure it has the first of the table."""
    said = ""
    for sample in results["samples"]:
        if (sample["kind"], sample.get("head_dim")) == ("flash1 tiles", head_dim):
            tiles = len(sample.get("ms", ()))
            tile = f"the fastest of {tiles} tiles" if tiles else "its first tile: another failed"
            said += f"{sample['kernel']} at {tile}, "
    return said


def _judge_programs(results: Results, found: Verdicts) -> None:
    programs = gains(results, "one", "many", kind="programs")
    for sample, ratio in sorted(programs, key=lambda each: each[0]["heads"]):
        heads = sample["heads"]
        bound = max(1.0, min(sample["processors"], heads * sample["length"] / 64) / heads)
        where = f"batch * heads {heads}, {sample['length']} tokens"
        passed = 0.5 * bound <= ratio.low <= ratio.high <= 2 * bound
        why = "half to twice the bound, as several programs on a processor can exceed it; of the two-pass forward"
        if bound < 1.1:
            passed = 0.9 <= ratio.low <= ratio.high <= 1.15
            why = "0.9x to 1.15x: by the bound, heads alone fill the GPU; it leaves out shared processors"
        what = f"one program a head over one a tile of queries, {where}"
        theirs = f"up to {bound:.3g}x, by its argument and this GPU's processors"
        found.add("C19", what, theirs, ratio.shown("{:.3g}x"), passed, why)


def _judge_backward(results: Results, found: Verdicts) -> None:
    checks = {s["backend"]: s["passed"] for s in pick(results, kind="check")}
    counted = {s["backend"]: s for s in pick(results, kind="backward count") if s["backend"] in checks}

    def agreement(*backends: str) -> tuple[bool, str]:
        right = all(checks[backend] for backend in backends)
        return right, f"gradients of both {'' if right else 'not '}within twice naive's error of float64"

    if {"flash1", "flash"} <= counted.keys():
        saved = [counted[name]["saved"] for name in ("flash1", "flash")]
        right, why = agreement("flash1", "flash")
        what = "bytes per query saved for the backward: maximum and sum, log-sum-exp alone"
        ours, passed = "{:.0f} and {:.0f}".format(*saved), saved == [8, 4] and right
        found.add("C21", what, "8 and 4", ours, passed, why, basis=COUNTED)
    if {"flash1", "two_pass"} <= counted.keys():
        products = [counted[name]["products"] for name in ("flash1", "two_pass")]
        right, why = agreement("flash1", "two_pass")
        what = "matrix products of the backward: delta from dO * O, delta in a pass of its own"
        passed = [round(each, 2) for each in products] == [5, 7] and right
        found.add("C22", what, "5 and 7", "{:.3g} and {:.3g}".format(*products), passed, why, basis=COUNTED)
    for sample, ratio in gains(results, "two_pass", "flash1", "backward", kind="passes"):
        head_dim = sample["head_dim"]
        what = f"time of the backward in two passes over one, head_dim {head_dim}, one tile for both"
        why = "fewer products take less time, not in proportion"
        found.add("C22", what, BY_PRODUCTS, ratio.shown(), None, why)
    order = gains(results, "two_pass", "flash1", "backward", kind="order", causal=False)
    for head_dim in sorted({sample["head_dim"] for sample, _ in order}):
        ratios = [ratio for sample, ratio in order if sample["head_dim"] == head_dim]
        why = f"geometric mean over {len(ratios)} lengths; both with one program a head"
        for tiles in pick(results, kind="flash1 tiles", head_dim=head_dim, kernel="backward"):
            why += f"; one pass at the fastest of {len(tiles['ms'])} tiles, two passes at their one"
        if unraced := _unraced(results, head_dim):
            why += f"; {unraced}"
        what = f"time of the backward in two passes over one, head_dim {head_dim}"
        found.add("C22", what, BY_PRODUCTS, Times.mean(ratios).shown(), None, why)


def _judge_changes(results: Results, found: Verdicts) -> None:
    counted = {s["change"]: s for s in pick(results, kind="change count")}
    if {"printed", "maximum and sum"} <= counted.keys():
        lse, both = counted["printed"], counted["maximum and sum"]
        more = [(both[phase] - lse[phase]) / lse["length"] for phase in ("forward", "backward")]
        what = "bytes a query that maximum and sum move more than the log-sum-exp: forward, backward"
        theirs, ours = f"4 and {4 * lse['key_tiles']}", "{:g} and {:g}".format(*more)
        why = "float32, written once and read for each tile of keys"
        found.add("C21", what, theirs, ours, theirs == ours, why, basis=COUNTED)
    for _, ratio in gains(results, "maximum and sum", "printed", kind="changes"):
        what = "time with maximum and sum saved, over log-sum-exp alone"
        why = "above 1x in each process"
        found.times("C21", what, 1.0, ratio, ratio.low > 1, why, theirs="log-sum-exp a little faster")
    for _, ratio in gains(results, "divided each step", "printed", "forward", kind="changes"):
        what = "time of the forward divided in every step, over once at the end"
        why = "above 1x in each process"
        found.times("C21", what, 1.0, ratio, ratio.low > 1, why, theirs="once is faster")
    for sample in timed(results, kind="warps"):
        name = min((n for n in sample["ms"] if n != "queries"), key=lambda n: took(sample, n).median)
        ratio, queries = gain(sample, name, "queries"), name.partition(", ")[2]
        what = f"time of the forward with keys split over two warps ({queries} queries), over queries"
        why = "one of the paper's reasons; says nothing of its factor; keys at the fastest of three tiles"
        found.add("C18", what, "queries are faster", ratio.shown(), None, why)


def _judge_softmax(results: Results, found: Verdicts) -> None:
    accesses = {s["softmax"]: s["accesses"] for s in pick(results, kind="softmax count")}
    if {"safe", "online"} <= accesses.keys():
        counts, why = (accesses["safe"], accesses["online"]), "for a row that does not stay on the chip"
        what, ours = "memory accesses per element: safe, online softmax", "{:.3g} and {:.3g}".format(*counts)
        found.add("C27", what, "4 and 3", ours, counts == (4, 3), why, basis=COUNTED)
    names = ("safe, top-k", "online, top-k", "online with top-k")
    if set(names) <= accesses.keys():
        counts = [accesses[name] for name in names]
        passed = all(abs(a - b) < 0.05 for a, b in zip(counts, (5, 4, 1), strict=True))
        what = "memory accesses per element: safe softmax then top-k, online then top-k, both in one pass"
        why = "ours includes writing the k results, which the paper leaves out"
        ours = ", ".join(f"{each:.2f}" for each in counts)
        found.add("C28", what, "5, 4 and 1", ours, passed, why, basis=COUNTED)
    _judge_online(results, found)
    least, most = paper.TOPK_OF_TEN
    for sample, ratio in gains(results, "safe, top-k", "online with top-k", kind="softmax", rows=10, k=5):
        what = f"time of safe softmax then top-k over one pass, k 5, 10 rows of {sample['length']}"
        shown, passed = ratio.shown(), least <= ratio.low <= ratio.high <= most
        found.add("C28", what, f"{least}x to {most}x", shown, passed, "in that range, at every length")
    fused = {"kind": "softmax", "rows": 4000, "length": paper.TOPK_LENGTH}
    for k, theirs in paper.TOPK_SPEEDUP.items():
        for _, ratio in gains(results, "safe, top-k", "online with top-k", k=k, **fused):
            what = f"time of safe softmax then top-k over one pass, k {k}, 4000 rows of {paper.TOPK_LENGTH}"
            why = "at least the paper's; the top-k after safe softmax is torch's"
            found.times("C28", what, theirs, ratio, ratio.low >= theirs, why)


def _judge_online(results: Results, found: Verdicts) -> None:
    """C27, two-sided: the upper bound is as far above the paper's figure as the lower, which came first, is below."""
    for rows, (theirs, apart) in {
        4000: (paper.SOFTMAX_OF_4000, 0.1),
        10: (paper.SOFTMAX_OF_TEN, 0.05),
    }.items():
        softmaxes = gains(results, "safe", "online", kind="softmax", rows=rows)
        for length, ratio in {s["length"]: ratio for s, ratio in softmaxes}.items():
            expected, where = theirs, ""
            if rows == 4000:
                if 1000 < length < 4000:
                    continue
                expected = theirs if length >= 4000 else 1.0
                where = f" {'from 4000' if length >= 4000 else 'up to 1000'} on a V100"
            low, high = expected - apart, expected + apart
            why = f"{low:.3g}x to {high:.3g}x; the paper has {expected:g}x{where}{_kept(rows, length)}"
            if ratio.median > ACCESSES:
                why += "; more than its 4 accesses over 3 account for"
            what = f"time of safe over online softmax, {rows} rows of {length}"
            found.times("C27", what, expected, ratio, low <= ratio.low <= ratio.high <= high, why)


def _kept(rows: int, length: int) -> str:
    """Why a second pass over float32 rows may read no memory: their processor still has them in its own cache."""
    at_once = min(-(-rows // PROCESSORS), ROWS_AT_ONCE)
    kb = 4 * length * at_once / 1000
    return f"; a processor has at most {kb:.0f} kB of rows at a time, its cache 256 kB" if kb <= 256 else ""
