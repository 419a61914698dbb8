"""The attention experiment's quantities and pictures; its verdicts are in `attention_verdicts.py`."""

from collections.abc import Iterator
from pathlib import Path

from . import paper, plots
from .experiment import Results, Sample, pick
from .peers import BASELINE, COMPILED, CUDNN_MASK, CUT, EFFICIENT_MASK, FLEX_MASK, MASK_NAMES, OURS
from .timing import Times, fastest, gain, medians, timed, took

# Standard attention in eager PyTorch; speed-ups are over the fastest of them that was timed: with padding, and in
# long causal rows, the one cut to its mask.
EAGER = (BASELINE, CUT, "naive", "sdpa_math")
FASTEST = "the fastest of the eager forms timed here"


def flops(sample: Sample, phase: str) -> float:
    """Forward 4 * batch * heads * length^2 * head_dim, half if causal; backward 2.5 times that (FA2, section 4.1)."""
    forward = 4 * sample["batch"] * sample["heads"] * sample["length"] ** 2 * sample["head_dim"]
    forward /= 2 if sample["causal"] else 1
    return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[phase]


def tflops(sample: Sample, backend: str, phase: str) -> Times | None:
    times = took(sample, backend, phase)
    return times and times.inverse(flops(sample, phase) / 1e9)


def rates(samples: list[Sample], backend: str) -> dict[int, float]:
    """Length -> TFLOP/s of forward and backward."""
    reached = ((sample["length"], tflops(sample, backend, "both")) for sample in samples)
    return {length: rate.median for length, rate in reached if rate}


def speedup(sample: Sample, ours: str = OURS) -> Times | None:
    """Time of the fastest of the eager forms of standard attention that were timed over ours."""
    standard = fastest(sample, EAGER)
    return gain(sample, standard[0], ours) if standard else None


def over(sample: Sample) -> str:
    """What a speed-up is over, and what torch.compile makes of standard attention, and libraries of its mask."""
    words = f"over {fastest(sample, EAGER)[0]}, {FASTEST}{without_cut([sample])}"
    if compiled := gain(sample, COMPILED, OURS):
        words += f"; compiled, standard attention takes {compiled.shown()} our time"
    libraries = {name: gain(sample, name, OURS) for name in (EFFICIENT_MASK, CUDNN_MASK, FLEX_MASK)}
    return words + "".join(f", {name} {found.shown()}" for name, found in libraries.items() if found)


def without_cut(samples: list[Sample]) -> str:
    """At how many with a mask the form that is cut to it, by arithmetic the fastest there, was not timed."""
    masked = [each for each in samples if each.get("causal") or each.get("mask", "plain") != "plain"]
    lacking = sum(CUT not in each["ms"] for each in masked)
    where = f" at {lacking} of {len(masked)} with a mask" * (len(samples) > 1)
    return f" ({CUT} was not{where})" if lacking else ""


def peaks(results: Results) -> dict[str, dict[int, float]]:
    """Backend -> length -> peak bytes on Table 21's workload, without masks."""
    found: dict[str, dict[int, float]] = {}
    for sample in pick(results, kind="memory", figure="fa1", mask="plain"):
        found.setdefault(sample["backend"], {})[sample["length"]] = sample["peak_bytes"]
    return found


def on_cpu(results: Results) -> bool:
    return results["device"].startswith("CPU")


def is_hopper(results: Results) -> bool:
    """Whether shares of the peak and gains can be compared with FlashAttention-3's, of an H100."""
    return any(name in results["device"] for name in ("H100", "H200"))


def draw(results: Results, path: Path, claim: str = "") -> bool:
    """Time with each of the three masks, peak memory, TFLOP/s on FA2's workload; a panel for each one measured."""
    return plots.draw(path, f"Attention on {results['device']}", _panels(results), claim=claim)


def _panels(results: Results) -> Iterator[plots.Panel]:
    for mask, words in MASK_NAMES.items():
        if samples := timed(results, kind="time", figure="fa1", mask=mask):
            series = {name: medians(samples, name) for name in _backends(samples)}
            panel = plots.lines(f"Time, {words}", series, up="ms, forward and backward", log="y")
            yield plots.of("C7", panel)
    if measured := peaks(results):
        # A CPU counts one head of one sequence, so the paper's memory, of 128 heads, is drawn divided by 128.
        heads = 1 if on_cpu(results) else 128
        names = sorted(measured, key=lambda name: (name == OURS, name))
        series = {name: {n: b / 2**20 for n, b in measured[name].items()} for name in names}
        lengths = set().union(*measured.values())
        theirs = {
            f"{name} of FA1, Table 21": {n: mib * heads / 128 for n, mib in table.items() if n in lengths}
            for name, table in paper.FA1_MIB.items()
        }
        up = "peak MiB" + ", one head" * (heads == 1)
        panel = plots.lines("Peak memory, forward and backward", series, up=up, log="y", paper=theirs)
        yield plots.of("C8", panel)
    shapes = {(s["head_dim"], s["causal"]) for s in timed(results, kind="time", figure="fa2")}
    for head_dim, causal in sorted(shapes):
        samples = timed(results, kind="time", figure="fa2", head_dim=head_dim, causal=causal)
        series = {name: rates(samples, name) for name in _backends(samples)}
        theirs = {"paper, FA2 on an H100": paper.FA2_H100.get((head_dim, causal), {}).get("fa2", {})}
        title = f"head_dim {head_dim}{', causal' if causal else ''}, 16k tokens"
        panel = plots.lines(title, series, up="TFLOP/s, forward and backward", paper=theirs)
        yield plots.of("C24", panel)


def _backends(samples: list[Sample]) -> list[str]:
    """Every contender, ours last, so that it lies on top."""
    names = {name for sample in samples for name in sample["ms"]}
    return sorted(names, key=lambda name: (name == OURS, name != BASELINE, name))
