"""FLOPs and memory traffic, standard against flash: FlashAttention Figure 1 (right) and Figure 2 (left, middle).

On a CPU they are counted (`counting.py`; results/cpu/traffic.json). On a GPU the same shapes are timed, and hardware
counters read. Attention's traffic is proportional to batch * heads, so one head is counted; the paper's shape is that
times 1024.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from kernels.flash.portable.launch import architecture
from kernels.flash.portable.tiles import KERNELS, Tile, forced, tile_for
from kernels.history.one_pass import one_pass
from kernels.history.softmax import online_softmax, safe_softmax

from . import counting, hardware_counters, paper, peers, plots, timing
from .attention import DROPPED, PADDED, Inputs, Workload, attend_with, backend_names, check, race, time_all
from .attention_figures import EAGER, is_hopper, over, speedup
from .experiment import Options, Results, Sample, Timing, Verdict, Verdicts, pick
from .peers import BASELINE, OURS
from .standard import standard_attention, standard_passes
from .timing import Times, fastest, timed, took

OF_A_WARPGROUP = 64  # queries: Hopper's tensor core instruction takes no fewer
PASSES = ("matmul", "mask", "softmax", "dropout", "matmul 2")
DRAM_RATIO = "9.2x (NeurIPS: 8.0x)"  # the paper's
NEEDED = ("lengths",)


@dataclass(frozen=True)
class Settings(Timing):
    # Names in kernels.ATTENTION, "standard" and its other forms; if empty, all of them.
    backends: tuple[str, ...] = ()
    # Lengths counted, for one head of head_dim 64; 1024 is the paper's.
    lengths: tuple[int, ...] = (1024, 512, 256)
    # Sweep of the forward kernel's BLOCK_M at this BLOCK_N; counted at the last of `lengths`.
    block_m: tuple[int, ...] = (16, 32, 64, 128)
    block_n: int = 64
    # The GPU architecture whose tiles are used for the counts: compute capability * 10.
    architecture: int = 90
    # The paper's batch and heads, for timing on a GPU.
    batch: int = 64
    heads: int = 16
    # Left out because it is compiled again for every shape; `attention` times it.
    compiled: tuple[str, ...] = ("flex",)
    seconds: float = 0.3


TINY = Settings(
    backends=(BASELINE, "naive", OURS), lengths=(64,), block_m=(32, 64), batch=1, heads=2, seconds=0.0,
    processes=1, rounds=1,
)  # fmt: skip


def run(options: Options) -> None:
    """Run the experiment; see `experiment.py`."""
    if options.device.type == "cuda" or options.tiny:
        _time(options)
    if options.device.type == "cpu":
        _count(options)


# ---- what a CPU counts ----------------------------------------------------------------------------


def _count(options: Options) -> None:
    settings = options.settings
    first, *others = settings.lengths
    for length, mask in ((first, "plain"), (first, PADDED), *((length, "plain") for length in others)):
        workload = Workload("figure2", 1, 1, length, 64, False, mask)
        for name in backend_names(settings.backends):
            measure = partial(count, name, workload, settings.architecture)
            options.sample(measure, kind="count", backend=name, **asdict(workload))
    workload = Workload("figure2", 1, 1, settings.lengths[-1], 64, False)
    for block_m in settings.block_m:
        tile = {"block_m": block_m, "block_n": settings.block_n}
        measure = partial(count, OURS, workload, settings.architecture, **tile)
        options.sample(measure, kind="tile count", backend=OURS, **tile, **asdict(workload))


def count(backend: str, workload: Workload, architecture: int, **forward_tile: int) -> Sample:
    """{"forward": {"read", "written", "flops"}, "backward": ..., "tiles"}; "tiles" are those our kernels used."""
    peers.refuse(backend, workload, torch.float16, torch.device("cpu"))
    tiles = _tiles(architecture, workload) if backend == OURS else {}
    if forward_tile:
        tiles["forward"] = replace(tiles["forward"], **forward_tile)
    inputs = Inputs(workload, torch.float16, torch.device("cpu"))
    attend = attend_with(backend)
    with torch.no_grad():
        attend(inputs, 0)  # builds masks and does lookups, which are not to be counted
    with forced(**tiles), counting.counting() as traffic:
        out = attend(inputs, 0)
        forward = traffic.copy()
        torch.autograd.grad(out, inputs.qkv, inputs.d_out)
    shapes = {kernel: (tile.block_m, tile.block_n) for kernel, tile in tiles.items()}
    return {"forward": asdict(forward), "backward": asdict(traffic.since(forward)), "tiles": shapes}


def _tiles(architecture: int, workload: Workload) -> dict[str, Tile]:
    """The tile of each of our kernels on that architecture."""
    shape = (workload.head_dim, torch.float16, workload.causal, workload.length)
    return {kernel: tile_for(kernel, architecture, *shape) for kernel in KERNELS}


# ---- what a GPU times and reads -------------------------------------------------------------------


def _time(options: Options) -> None:
    settings, device = options.settings, options.device
    known = backend_names(settings.backends, (BASELINE, peers.CUT, peers.COMPILED))
    names = [each for each in known if each not in settings.compiled]
    plain = Workload("figure2", settings.batch, settings.heads, settings.lengths[0], 64, False)
    for workload in (replace(plain, mask=PADDED), plain):
        how = {"workload": workload, "dtype": torch.float16, "device": device}
        suitable = [name for name in names if peers.suits(name, workload)]
        able = options.right(suitable, partial(check, **how), mask=workload.mask)
        measure = partial(time_all, able, workload, options, torch.float16)
        options.timed(measure, kind="time", **asdict(workload))
    dropped = replace(plain, mask=DROPPED)
    options.timed(partial(time_passes, dropped, options), kind="passes", **asdict(dropped))
    options.timed(partial(time_tiles, plain, options), kind="tiles", **asdict(plain))
    options.timed(partial(time_rungs, plain, options), kind="rungs", **asdict(plain))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the profiled program is a separate process that needs memory on the same device
    for name in (BASELINE, OURS):
        measure = partial(hardware_counters.read_counters, name, plain)
        found = options.sample(measure, kind="ncu", backend=name, **asdict(plain))
    if {"refused", "command"} <= found.keys():  # the other's command differs only in the backend's name
        options.say(f"  hardware counters: {found['refused']}; where they can be read:\n  {found['command']}")


def time_passes(workload: Workload, options: Options) -> Sample:
    """Each pass of the standard forward; as a single pass its other forms, and our forward."""
    inputs = Inputs(workload, torch.float16, options.device)

    @torch.no_grad()
    def standard(number: int) -> Iterator[None]:
        for _ in standard_passes(*inputs.qkv, inputs.bias(), inputs.dropout_p):
            yield

    def forward_of(attend: peers.Attend) -> timing.Call:
        @torch.no_grad()
        def call(number: int) -> Iterator[None]:
            attend(inputs, number)
            yield

        return call

    calls = {BASELINE: standard} | {name: forward_of(attend_with(name)) for name in (OURS, peers.CUT)}
    if options.device.type == "cuda":
        calls[peers.COMPILED] = forward_of(attend_with(peers.COMPILED))
    inputs.bias()
    return timing.race(calls, options, PASSES)


def time_tiles(workload: Workload, options: Options) -> Sample:
    """Our forward with each BLOCK_M; the default tile's other parameters stay."""
    attend, default = attend_with(OURS), _tiles(architecture(options.device), workload)["forward"]

    def with_rows(block_m: int) -> Callable[[Inputs, int], None]:
        tile = replace(default, block_m=block_m, block_n=options.settings.block_n)

        def forward(inputs: Inputs, number: int) -> None:
            with torch.no_grad(), forced(forward=tile):
                attend(inputs, number)

        return forward

    attends = {str(block_m): with_rows(block_m) for block_m in options.settings.block_m}
    return race(attends, [Inputs(workload, torch.float16, options.device)], options, backward=False)


def time_rungs(workload: Workload, options: Options) -> Sample:
    """The forward of those rungs of docs/ladder.md that are no backend, beside standard attention's.

    "errors": the first head's greatest against float64.
    """

    def attend(softmax: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = next(standard_passes(q, k, v, None, 0.0))
        return torch.bmm(softmax(scores.flatten(0, 1)).view_as(scores), v.flatten(0, 1)).view_as(q)

    rungs = {"safe softmax": partial(attend, safe_softmax), "online softmax": partial(attend, online_softmax)}
    attends = {BASELINE: standard_attention, **rungs, "one pass": one_pass}
    inputs = Inputs(workload, torch.float16, options.device)
    with torch.no_grad():
        q, k, v = (each[0, 0].double() for each in inputs.qkv)
        exact = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        errors = {name: (its(*inputs.qkv)[0, 0] - exact).abs().max().item() for name, its in attends.items()}
        calls = {name: (lambda inputs, number, its=its: its(*inputs.qkv)) for name, its in attends.items()}
        return {**race(calls, [inputs], options, backward=False), "errors": errors}


# ---- the page ----------------------------------------------------------------------------------------


def total(sample: Sample, what: str = "bytes") -> int:
    """Bytes (read + written) or FLOPs of forward and backward together."""
    return sum(phase_total(sample, phase, what) for phase in ("forward", "backward"))


def phase_total(sample: Sample, phase: str, what: str = "bytes") -> int:
    return sum(sample[phase][key] for key in (("read", "written") if what == "bytes" else ("flops",)))


def _compulsory(length: int, head_dim: int) -> int:
    return sum(counting.compulsory_bytes(length, head_dim).values())


def draw(results: Results, path: Path, claim: str = "") -> bool:
    """Bytes against length, the tile sweep, and the passes of the standard forward."""
    return plots.draw(path, f"Memory traffic, {results['device']}", _panels(results), claim=claim)


def _panels(results: Results) -> Iterator[plots.Panel]:
    if counted := [s for s in pick(results, kind="count") if s["mask"] == "plain"]:
        names = [name for name in (BASELINE, "naive", OURS) if any(s["backend"] == name for s in counted)]
        series = {n: {s["length"]: total(s) / 1e6 for s in counted if s["backend"] == n} for n in names}
        floor = {s["length"]: _compulsory(s["length"], 64) / 1e6 for s in counted}
        title, up = "Read and written, forward and backward", "MB, one head, counted"
        panel = plots.lines(title, series, up=up, log="y", paper={"paper: compulsory": floor})
        yield plots.of("C3", panel)
    title, across = "Tile size of the forward kernel", "BLOCK_M, queries a program owns"
    if tiles := pick(results, kind="tile count"):
        series = {OURS: {s["block_m"]: phase_total(s, "forward") / 1e6 for s in tiles}}
        panel = plots.lines(title, series, across=across, up="MB, one head, counted", log="x")
        yield plots.of("C29", panel)
    for sample in timed(results, kind="tiles"):
        series = {OURS: {int(m): took(sample, m).median for m in sample["ms"]}}
        yield plots.of("C31", plots.lines(title, series, across=across, up="ms", log="x"))
    for sample in timed(results, kind="passes"):
        rows = {}
        for name, phases in sample["ms"].items():
            parts = {phase: took(sample, name, phase).median for phase in phases}
            rows[name] = parts if len(parts) > 1 else {"in one": sum(parts.values())}
        across = "ms, forward with mask and dropout"
        yield plots.of("C6", plots.bars("Where the time of a forward goes", rows, across=across))


def judge(results: Results) -> list[Verdict]:
    """C3, C6, C29 and C31."""
    found = Verdicts(results["device"])
    for part in (_judge_counts, _judge_formula, _judge_times, _judge_tiles, _judge_passes, _judge_counters):
        part(results, found)
    return found


def _judge_counts(results: Results, found: Verdicts) -> None:
    counted = {s["backend"]: s for s in pick(results, kind="count", length=1024, mask=PADDED)}
    if not {BASELINE, OURS} <= counted.keys():
        return
    standard, flash, basis = counted[BASELINE], counted[OURS], "counted on one head, times 1024"
    standard_gb, flash_gb = (total(s) * paper.FIGURE_2_HEADS / 1e9 for s in (standard, flash))
    floor_gb = _compulsory(1024, flash["head_dim"]) * paper.FIGURE_2_HEADS / 1e9
    ratio, most = standard_gb / flash_gb, standard_gb / floor_gb
    what, shown = "bytes of standard attention, GPT-2 medium, batch 64", f"{standard_gb:.1f} GB"
    passed, why = 30 <= standard_gb <= 41, "30 to 41 GB; each pass reads and writes whole matrices"
    of_papers = standard_gb / paper.FIGURE_2["arXiv v2"]["standard_gb"]
    found.add("C3", what, "40.3 GB (NeurIPS: 35.3)", shown, passed, why, ratio=of_papers, basis=basis)
    why = (
        f"bounds: ours moves {flash_gb:.1f} GB if no cache serves re-reads of K, V, Q, d_out, "
        f"{floor_gb:.1f} GB if L2 serves all; the paper has 4.4; hardware counters tell where ours lies"
    )
    found.add(
        "C3", "bytes standard/flash", DRAM_RATIO, f"{ratio:.1f}x to {most:.0f}x", None, why, basis=basis
    )
    work = total(flash, "flops") / total(standard, "flops")
    why = (
        "1.25x at most; more arithmetic for fewer bytes, as claimed, but a CPU runs the portable kernels: 9 matrix "
        "products to the paper's 7, since their backward recomputes the scores for dq and again for dk, dv; with the "
        "Hopper backward, which the timed call has, they are 7, 1.17x by arithmetic"
    )
    found.times(
        "C3", "FLOPs flash/standard", paper.FIGURE_2_FLOPS_RATIO, work, work <= 1.25, why, basis=basis
    )


def _judge_formula(results: Results, found: Verdicts) -> None:
    basis = "counted on one head"
    if plain := [s for s in pick(results, kind="count", mask="plain") if s["tiles"]]:
        equal = all(
            total(s) == sum(counting.flash_bytes(s["length"], s["head_dim"], s["tiles"]).values())
            for s in plain
        )
        lengths = ", ".join(str(s["length"]) for s in plain)
        what = "count against the formula (2 T_r + 2) N d + N of FlashAttention-2's order, and its backward's"
        ours = "equal" if equal else "differs"
        found.add("C29", what, "equal", ours, equal, f"to the byte, at {lengths} tokens", basis=basis)
    sweep = sorted(pick(results, kind="tile count"), key=lambda s: s["block_m"])
    if len(sweep) > 1:
        first, last = sweep[0], sweep[-1]
        # A tile of twice as many queries halves the re-reads of K and V; the compulsory traffic stays.
        floor = counting.compulsory_bytes(first["length"], first["head_dim"])["forward"]
        floor -= 2 * first["length"] * first["head_dim"] * 2
        fall = (phase_total(first, "forward") - floor) / (phase_total(last, "forward") - floor)
        growth = last["block_m"] / first["block_m"]
        what = f"reads of K and V, BLOCK_M {first['block_m']} over {last['block_m']}"
        passed, why = abs(fall / growth - 1) < 0.01, "traffic beyond Q and O falls as 1/M, Theorem 2"
        shown = (f"{growth:.0f}x", f"{fall:.1f}x")
        found.add("C29", what, *shown, passed, why, ratio=fall / growth, basis=basis)


def _judge_times(results: Results, found: Verdicts) -> None:
    for sample in timed(results, kind="time"):
        if gain := speedup(sample):
            for version, figure in paper.FIGURE_2.items():
                what = f"time standard/flash, {sample['mask']}, of {version}"
                bar = round(figure["standard_ms"] / figure["flash_ms"], 1)
                why = f"the paper's two versions disagree, and each is a bar; {over(sample)}"
                found.times("C3", what, bar, gain, gain.low >= bar, why, theirs=f"{bar}x", form="{:.1f}x")


def _judge_tiles(results: Results, found: Verdicts) -> None:
    """C31, not comparable: a tile of fewer queries stands in for a chip with less on-chip memory.

    Below 64 queries a tile also loses Hopper's tensor core instruction, so these do not count.
    """
    standard = [fastest(s, EAGER, "forward") for s in timed(results, kind="time", mask="plain")]
    for sample in timed(results, kind="tiles"):
        if not standard or not standard[0] or len(sample["ms"]) < 2:
            continue
        gains = {int(m): standard[0][1] / took(sample, m) for m in sample["ms"]}
        alike = [m for m in sorted(gains) if m >= OF_A_WARPGROUP] if is_hopper(results) else sorted(gains)
        smaller = [gains[a].below(gains[b]) for a, b in pairwise(alike)]
        shrinks = "yes" if smaller and all(smaller) else "not shown"
        ours = ", ".join(f"{gains[m].median:.1f}x" for m in sorted(gains))
        why = f"a smaller tile in the place of a chip with less memory; each below the next larger one's: {shrinks}"
        if alike != sorted(gains) and alike:
            why += (
                f", of those of {alike[0]} queries and more; smaller ones also fall back from Hopper's tensor core "
                "instruction to Ampere's"
            )
        what = f"time standard/flash, forward, tiles of {', '.join(map(str, sorted(gains)))} queries"
        found.add("C31", what, "lower on a T4 than on an A100", ours, None, f"{why}; portable kernel")


def _judge_passes(results: Results, found: Verdicts) -> None:
    for sample in timed(results, kind="passes"):
        whole, ours = took(sample, BASELINE), took(sample, OURS)
        products = [took(sample, BASELINE, phase) for phase in ("matmul", "matmul 2")]
        share = Times(1 - sum(parts) / all_ for *parts, all_ in zip(*products, whole, strict=True))
        what = "mask, softmax and dropout, share of the standard forward"
        found.times("C6", what, 0.76, share, share.low >= 0.6, "60 % at least", form="{:.0%}")
        cut, what = took(sample, peers.CUT), "standard/flash time, forward with mask and dropout"
        if not cut:
            found.append(Verdict("C6", what, "7.6x", why=f"{peers.CUT} was not timed", basis=found.basis))
            continue
        gain, over_cut = whole / ours, cut / ours
        why = (
            "5x at least, also over eager forms that use what the mask looks like: one takes "
            f"{(cut / whole).shown('{:.2f}')} of the standard forward's time, {over_cut.shown()} ours"
        )
        if compiled := took(sample, peers.COMPILED):
            why += f"; compiled, the standard forward takes {(compiled / ours).shown()} our time"
        found.times("C6", what, 7.6, gain, min(gain.low, over_cut.low) >= 5, why, form="{:.1f}x")


def _judge_counters(results: Results, found: Verdicts) -> None:
    read = {s["backend"]: s for s in pick(results, kind="ncu")}
    if not {BASELINE, OURS} <= read.keys():
        reasons = [s["refused"] for s in results["samples"] if s["kind"] == "ncu" and "refused" in s]
        for why in reasons[:1]:
            found.append(Verdict("C3", "DRAM bytes standard/flash", DRAM_RATIO, why=why, basis=found.basis))
        return
    moved = {name: s["dram_read"] + s["dram_written"] for name, s in read.items()}
    ours = read[OURS]
    if not moved[OURS]:  # a tiny problem: all of it stayed in the L2 cache
        return
    floor = ours["batch"] * ours["heads"] * _compulsory(ours["length"], ours["head_dim"])
    ratio, excess = moved[BASELINE] / moved[OURS], moved[OURS] / floor
    what = f"DRAM bytes standard/flash, {ours['mask']}"
    why = f"hardware counters: {moved[BASELINE] / 1e9:.1f} and {moved[OURS] / 1e9:.2f} GB; 9.2x at least"
    found.add("C3", what, DRAM_RATIO, f"{ratio:.1f}x", ratio >= 9.2, why, ratio=ratio / 9.2)
    what = f"DRAM bytes over compulsory, {ours['length']} tokens"
    theirs = "1, if the caches serve every read but the first"
    why = "the paper does not say from where on all of it is compulsory"
    found.add("C29", what, theirs, f"{excess:.2f}x", None, why, ratio=excess)
