"""Block-sparse attention: FlashAttention section 3.3, Figure 2 right, and its linear-length rows of Tables 11 and 20.

Tiles that the block mask excludes are skipped, so time should be affine in the share of non-zero blocks. A backend
that does not support `block_mask` is left out, and the output says so.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kernels import get_attention, resolve_attention

from . import counting, paper, plots
from .attention import STANDARD, Inputs, Workload, backend_names, gradients, input_sets, race, relative_error
from .experiment import NOT_STATED, Options, Results, Sample, Timing, Verdict, Verdicts, pick
from .peers import OURS, Attend
from .timing import FASTER, Times, fastest, timed, took, versus

BLOCK = 128  # queries and keys per block of the attention signature's block_mask


@dataclass(frozen=True)
class Settings(Timing):
    # Names in kernels.ATTENTION; if empty, all that take a block mask. naive is only checked: it skips no tiles.
    backends: tuple[str, ...] = ()
    length: int = 4096
    percents: tuple[int, ...] = (10, 20, 30, 40, 50, 60, 70, 80, 90)
    # Lengths for the butterfly mask.
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    batch: int = 16
    heads: int = 8
    head_dim: int = 64
    # Length of the exactness check, and of the work counted on a CPU for one head.
    small_length: int = 1280
    seconds: float = 0.2


TINY = Settings(
    length=256, percents=(50,), lengths=(256,), batch=1, heads=1, head_dim=32, small_length=256, seconds=0.0,
    processes=1, rounds=1,
)  # fmt: skip


def masked(backend: str, mask: torch.Tensor | None, device: torch.device) -> Attend:
    """`backend` with a block mask, or without."""
    features = {} if mask is None else {"block_mask": mask.to(device)}
    return lambda inputs, number: get_attention(backend)(*inputs.qkv, causal=False, **features)


def random_mask(length: int, percent: float) -> torch.Tensor:
    """bool (1, 1, blocks, blocks): the same number of random blocks in every row, `percent` of them, rounded."""
    blocks = -(-length // BLOCK)
    kept = max(1, round(blocks * percent / 100))
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(blocks, blocks, generator=generator).argsort(dim=1)
    return (order < kept)[None, None]


def butterfly_mask(length: int) -> torch.Tensor:
    """bool (1, 1, blocks, blocks): a block sees itself and those whose index differs from its own in one bit.

    The fixed butterfly of Dao et al. (Pixelated Butterfly, 2021), which block-sparse FlashAttention uses:
    log2(blocks) + 1 blocks per row, so O(N log N) in all.
    """
    blocks = -(-length // BLOCK)
    number = torch.arange(blocks)
    difference = number[:, None] ^ number
    return ((difference & (difference - 1)) == 0)[None, None]


def run(options: Options) -> None:
    settings, device = options.settings, options.device
    for backend in backend_names(settings.backends):
        if backend == STANDARD:
            continue
        found = options.sample(partial(exactness, backend, options), kind="exact", backend=backend)
        if "worst" not in found or backend == "naive":
            continue
        for percent in (*settings.percents, 100) if device.type == "cpu" else ():
            where = {"backend": backend, "percent": percent}
            options.sample(partial(work, options=options, **where), kind="work", **where)
        if device.type == "cuda" or options.tiny:
            options.timed(partial(time_shares, backend, options), kind="shares", backend=backend)
            for length in settings.lengths:
                where = {"backend": backend, "length": length}
                options.timed(partial(time_butterfly, options=options, **where), kind="butterfly", **where)


def exactness(backend: str, options: Options) -> Sample:
    """{"worst", "share"}: the largest relative error of out, dq, dk, dv against masked dense attention in float64."""
    settings, device, dtype = options.settings, options.device, torch.float16
    mask = random_mask(settings.small_length, 40)
    request = {"head_dim": settings.head_dim, "block_mask": mask.to(device)}
    resolve_attention(backend, device=device, dtype=dtype, **request)
    inputs = Inputs(Workload("sparse", 1, 2, settings.small_length, settings.head_dim, False), dtype, device)
    found = gradients(masked(backend, mask, device), inputs)
    exact = gradients(masked("naive", mask, device), inputs.to(torch.float64))
    worst = max(relative_error(a, b) for a, b in zip(found, exact, strict=True))
    return {"worst": worst, "share": _share(mask)}


def work(backend: str, percent: int, options: Options) -> Sample:
    """Counted FLOPs and bytes of one head, forward and backward: {"flops", "bytes", "share"}."""
    length, device = options.settings.small_length, options.device
    mask = random_mask(length, percent)
    workload = Workload("sparse", 1, 1, length, options.settings.head_dim, False)
    inputs = Inputs(workload, torch.float16, device)
    with counting.counting() as traffic:
        gradients(masked(backend, mask, device), inputs)
    return {"flops": traffic.flops, "bytes": traffic.read + traffic.written, "share": _share(mask)}


def _share(mask: torch.Tensor) -> float:
    return round(float(mask.float().mean()), 4)


def time_shares(backend: str, options: Options) -> Sample:
    """Forward plus backward at every share of blocks, and "dense": without a mask."""
    masks = [random_mask(options.settings.length, percent) for percent in options.settings.percents]
    named = {str(_share(mask)): mask for mask in masks}
    return _time(backend, options.settings.length, {"dense": None, **named}, options)


def time_butterfly(backend: str, length: int, options: Options) -> Sample:
    """With the butterfly mask, and without a mask; and the share of blocks."""
    mask = butterfly_mask(length)
    return {**_time(backend, length, {"butterfly": mask, "dense": None}, options), "share": _share(mask)}


def _time(backend: str, length: int, masks: dict[str, torch.Tensor | None], options: Options) -> Sample:
    settings, device = options.settings, options.device
    workload = Workload("sparse", settings.batch, settings.heads, length, settings.head_dim, False)
    attends = {name: masked(backend, mask, device) for name, mask in masks.items()}
    return race(attends, input_sets(workload, torch.float16, device), options)


def _relative_times(sample: Sample) -> dict[float, Times]:
    """Share of blocks -> time over the dense time."""
    dense = took(sample, "dense")
    return {float(name): took(sample, name) / dense for name in sample["ms"] if name != "dense"}


PAPERS_SHARES = {p: ms / paper.FIGURE_2_DENSE_MS for p, ms in paper.FIGURE_2_SPARSE_MS.items()}


def draw(results: Results, path: Path, claim: str = "") -> bool:
    """Time (or counted work) against the share of blocks, and the butterfly against length."""
    series = {}
    for sample in timed(results, kind="shares", backend=OURS):
        series[OURS] = {100 * share: time.median for share, time in _relative_times(sample).items()}
    counted = sorted(pick(results, kind="work", backend=OURS), key=lambda s: s["share"])
    if counted:
        series["FLOPs counted"] = {100 * s["share"]: s["flops"] / counted[-1]["flops"] for s in counted}
    how = {"across": "% of blocks not zero", "up": "over dense", "ticks": False}
    panel = plots.lines("Cost against sparsity", series, paper={"paper, Figure 2": PAPERS_SHARES}, **how)
    panels = [plots.of("C5", panel)]
    if butterflies := timed(results, kind="butterfly", backend=OURS):
        series = {n: {s["length"]: took(s, n).median for s in butterflies} for n in ("dense", "butterfly")}
        up = "ms, forward and backward"
        panels.append(plots.of("C10", plots.lines("Butterfly mask against length", series, up=up, log="y")))
    return plots.draw(path, f"Block-sparse attention, {results['device']}", panels, claim=claim)


def judge(results: Results) -> list[Verdict]:
    """C5 and C10, but for what takes a run of another experiment: `judge_against_others`."""
    found = Verdicts(results["device"])
    for sample in pick(results, kind="exact", backend=OURS):
        worst, why = sample["worst"], "relative difference in float16, out and gradients"
        found.add("C5", "skipping blocks against masking them", "equal", f"{worst:.1e}", worst < 5e-3, why)
    counted = {s["share"]: s["flops"] for s in pick(results, kind="work", backend=OURS)}
    if len(counted) > 2:
        slope, intercept, fit = affine(counted)
        why = f"work, not time: {intercept / (slope + intercept):.0%} of dense is left at 0 blocks"
        what, ours = "FLOPs affine in the share of blocks", f"R^2 = {fit:.4f}"
        found.add("C5", what, "R^2 > 0.99", ours, fit > 0.99, why, basis="counted on one head")
    for sample in timed(results, kind="shares", backend=OURS):
        times = _relative_times(sample)
        if len(times) < 3:
            continue
        fit = Times(
            affine(dict(zip(times, each, strict=True)))[2] for each in zip(*times.values(), strict=True)
        )
        what = f"time affine in the share of blocks, {results['settings']['length']} tokens"
        found.add("C5", what, "R^2 > 0.99", f"R^2 = {fit.shown('{:.4f}')}", fit.low > 0.99)
        theirs = {x: PAPERS_SHARES[min(PAPERS_SHARES, key=lambda p: abs(p / 100 - x))] for x in times}
        passed = all(abs(each - theirs[x]) <= 0.1 for x in times for each in times[x])
        ours = ", ".join(each.ranging("{:.2f}") for each in times.values()) + fit.alone
        why = "within 0.1 of the figure's"
        found.add("C5", "time over dense, 10 to 90 %", "0.14 to 0.93", ours, passed, why)
    _judge_butterfly(results, found)
    return found


def affine(points: dict[float, float]) -> tuple[float, float, float]:
    """Slope, intercept and R^2 of the least-squares line; R^2 is 0 where nothing varies."""
    x, y = list(points), list(points.values())
    if len(set(y)) == 1:
        return 0.0, y[0], 0.0
    line = statistics.linear_regression(x, y)
    return line.slope, line.intercept, statistics.correlation(x, y) ** 2


def _judge_butterfly(results: Results, found: Verdicts) -> None:
    times = {s["length"]: s for s in timed(results, kind="butterfly", backend=OURS)}
    sparse = {n: took(s, "butterfly") for n, s in times.items()}
    blocks = {n: s["share"] * n**2 for n, s in times.items()}
    if lengths := [n for n in times if n >= 4096 and 2 * n in times]:
        ours = Times.mean(sparse[2 * n] / sparse[n] for n in lengths)
        blocks_grow = statistics.geometric_mean(blocks[2 * n] / blocks[n] for n in lengths)
        why = f"within 10 % of it; the butterfly's blocks grow as N log N, {blocks_grow:.2f}x here"
        what = "growth of time when the length doubles, from 4096"
        found.times("C10", what, 2.0, ours, 1.8 <= ours.low <= ours.high <= 2.2, why, theirs="2.0x")
        why = "near 1: time grows as the mask's blocks do"
        what = "growth of time over the growth of the blocks, when the length doubles"
        share = Times(each / blocks_grow for each in ours)
        found.add("C10", what, NOT_STATED, share.shown(), None, why)
    if 65536 in times:
        sample, theirs = times[65536], paper.BLOCK_SPARSE_SPEEDUP_64K["plain"]
        gain, share = took(sample, "dense") / took(sample, "butterfly"), sample["share"]
        why = (
            f"50x at least; {share:.1%} of the blocks are not zero, so {1 / share:.0f}x at most for equal time a "
            "block; the paper's share is not stated"
        )
        what = "dense over butterfly time at 65536 tokens"
        found.times("C10", what, theirs, gain, gain.low >= 50, why, form="{:.0f}x")


def judge_against_others(documents: Iterable[Results]) -> list[Verdict]:
    """C10, the fastest of all: against what `attention` timed at the same shape on the same device, a row a length.

    documents: of all experiments; of two of an experiment on a device, the first counts.
    """
    runs: dict[tuple[str, str], Results] = {}
    for each in documents:
        runs.setdefault((each["experiment"], each["device"]), each)
    found = Verdicts("")
    for (experiment, device), own in runs.items():
        if experiment == "sparse" and (others := runs.get(("attention", device))):
            _judge_fastest(own, others, found)
    return found


def _judge_fastest(own: Results, others: Results, found: Verdicts) -> None:
    shape = {key: own["settings"][key] for key in ("batch", "heads", "head_dim")}
    pairs = [
        (sample, theirs)
        for sample in timed(own, kind="butterfly", backend=OURS)
        for theirs in timed(others, kind="time", figure="fa1", mask="plain", length=sample["length"], **shape)
        if OURS in theirs["ms"]
    ]
    if not pairs:
        return
    # The kernel without a mask is in both runs: it tells how far they differ apart from the blocks left out.
    apart = [took(sample, "dense").median / took(theirs, OURS).median for sample, theirs in pairs]
    why = (
        f"faster than the fastest; two runs, butterfly's in float16, the others' in {others['settings']['dtype']}; "
        f"flash without a mask takes {min(apart):.2f}x to {max(apart):.2f}x as long in the first, and a verdict that "
        "this factor would change is not given"
    )
    for (sample, theirs), factor in zip(pairs, apart, strict=True):
        ours = took(sample, "butterfly")
        name, best = fastest(theirs, tuple(theirs["ms"]))
        what = f"time of the fastest other attention over butterfly, {sample['length']} tokens"
        shown = f"{best.median / ours.median:.2f}x, {name} ({_ms(best)} over {_ms(ours)})"
        basis = f"{own['device']}, two runs"
        faster = {versus(Times(ms / by for ms in ours), best) == FASTER for by in (1, factor)}
        passed = faster.pop() if len(faster) == 1 else None
        found.add("C10", what, "the fastest", shown, passed, why, basis=basis)


def _ms(times: Times) -> str:
    return times.shown("{:.2f} ms")
