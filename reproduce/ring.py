"""Attention across GPUs: time and bytes of our ring against length, and of PyTorch's context parallelism and one GPU.

Every rank is a process that this starts. Causal, forward and backward. Contenders: `kernels.ring` with the flash
kernels, and with all keys gathered at once; PyTorch's `context_parallel` around its own FlashAttention-2, which cuts
and balances the sequence in the same way and by default gathers too; and flash on one GPU that has the whole
sequence. To tell what is not hidden, the ring is also timed without its exchange (each rank computes with its own
keys again), and its messages alone. Time is the slowest rank's, on the host's clock from barrier to synchronised
device.

`predict` is the same from two numbers, the kernels' rate and the link's.
"""

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from kernels.ring import gathers_keys

from . import plots
from .common import ReproduceError, text_table
from .experiment import NOT_STATED, Options, Results, Sample, Verdict, Verdicts
from .ring_ranks import BACKWARD, COMPUTE, EXCHANGE, FORWARD, GATHERED, ONE, RING, TORCH, Shape, on_rank
from .timing import timed, took

SELECTION = ("ranks", "lengths")  # settings by which more samples join those of an earlier run
NEEDED = ("ranks", "lengths")


@dataclass(frozen=True)
class Settings:
    # GPUs that share a sequence.
    ranks: tuple[int, ...] = (2,)
    lengths: tuple[int, ...] = (32768, 65536, 131072)
    # GPT-2 small's.
    batch: int = 1
    heads: int = 12
    head_dim: int = 64
    dtype: str = "bfloat16"
    # Of the check against float64.
    check_length: int = 2048
    # As `experiment.Timing` has them.
    processes: int = 3
    rounds: int = 20
    warmup: int = 3


TINY = Settings(
    lengths=(64,), heads=2, head_dim=16, dtype="float16", check_length=32, processes=1, rounds=1, warmup=0
)  # fmt: skip


def message_bytes(shape: Shape, ranks: int, element: int) -> int:
    """Of the keys and values of a rank."""
    return 2 * shape.batch * shape.heads * shape.length // ranks * shape.head_dim * element


def predict(shape: Shape, ranks: int, element: int, flops: float, link: float) -> dict[str, float]:
    """Seconds of both passes of a ring.

    Every step has the same work, c seconds of a rank's, and moves the keys and values of a rank, x seconds. Where the
    longer of the two is the work, the exchange is hidden. The backward has 5 products where the forward has 2, moves
    the keys again, and their gradients in float32 one step behind them; a quarter of its first step comes before the
    others, and the rest after.

    Args:
        ranks: two or more. element: bytes of one number. flops: FLOP/s of the kernels. link: bytes/s from one GPU to
            the next.
    """
    c = shape.flops / ranks**2 / flops
    x = message_bytes(shape, ranks, element) / link
    gradients = message_bytes(shape, ranks, 4) / link
    # Step by step: the keys leave for the next one, if there is one, and the gradients of the one before.
    steps = [max(2.5 * c, x * (step < ranks - 1) + gradients * (step > 1)) for step in range(1, ranks)]
    return {
        FORWARD: (ranks - 1) * max(c, x) + c,
        BACKWARD: max(0.625 * c, x) + sum(steps) + max(1.875 * c, gradients),
    }


def run(options: Options) -> None:
    settings, device = options.settings, options.device
    available = torch.cuda.device_count()
    if device.type == "cuda" and max(settings.ranks) > available:
        raise ReproduceError(
            f"ring ranks={max(settings.ranks)} needs as many GPUs, and there are {available}"
        )
    for ranks in settings.ranks:
        for length in settings.lengths:
            how = partial(measure, ranks, length, settings, device.type, options.process)
            options.timed(how, kind="time", ranks=ranks, length=length)


def measure(ranks: int, length: int, settings: Settings, device_type: str, process: int) -> Sample:
    """{"ms": {contender: {pass: [...]}}, "sent_bytes": {contender: {pass: of one rank}}, "errors": {contender:
    {result: over its limit}}, "left_out": {contender: why}, "clocks": of the first GPU}."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/sample.pt"
        try:
            mp.spawn(on_rank, (ranks, length, settings, device_type, process, path), nprocs=ranks)
        except mp.ProcessRaisedException as error:  # its last line says why
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error
        return torch.load(path)


def median(sample: Sample, name: str) -> float:
    """Median milliseconds of a contender's passes together; NaN if it was not timed."""
    times = took(sample, name)
    return times.median if times else float("nan")


def samples(results: Results) -> list[Sample]:
    """The timings, by the number of ranks, then by length."""
    return sorted(timed(results, kind="time"), key=lambda sample: sample["ranks"])


def default(sample: Sample, settings: dict[str, Any]) -> str:
    """The contender that `ring_attention` is unless told otherwise; the ring where no other was timed."""
    ranks = sample["ranks"]
    shape = settings["batch"], settings["heads"], sample["length"] // ranks, settings["head_dim"]
    return GATHERED if gathers_keys(*shape, ranks) and GATHERED in sample["ms"] else RING


def not_hidden(sample: Sample) -> float:
    """The share of the exchange's time by which the ring takes longer than its computing alone, timed apart."""
    return max(0.0, (median(sample, RING) - median(sample, COMPUTE)) / median(sample, EXCHANGE))


def predicted(sample: Sample, settings: dict[str, Any]) -> float:
    """Milliseconds of both passes by `predict`, from the rates of the same sample: of the kernels on one GPU, and of
    the messages alone."""
    shape = Shape(settings["batch"], settings["heads"], sample["length"], settings["head_dim"])
    flops = 3.5 * shape.flops / median(sample, ONE)
    link = sum(sample["sent_bytes"][RING].values()) / median(sample, EXCHANGE)
    element = getattr(torch, settings["dtype"]).itemsize
    return sum(predict(shape, sample["ranks"], element, flops, link).values())


def gigabytes(sample: Sample, name: str) -> float:
    """Sent by all ranks in both passes."""
    return sample["ranks"] * sum(sample["sent_bytes"].get(name, {}).values()) / 1e9


def table(results: Results) -> str:
    """A row for each number of ranks and each length."""
    header = ["both passes", "ring ms", "predicted", f"{GATHERED} ms", f"{TORCH} ms", "one GPU ms"]
    header += ["ring GB", f"{TORCH} GB", "exchange alone ms", "not hidden"]
    rows = []
    for sample in samples(results):
        ours, *others = (f"{median(sample, name):.4g}" for name in (RING, GATHERED, TORCH, ONE))
        sent = [f"{gigabytes(sample, name):.3g}" for name in (RING, TORCH)]
        rest = [f"{median(sample, EXCHANGE):.3g}", f"{not_hidden(sample):.0%}"]
        times = [ours, f"{predicted(sample, results['settings']):.4g}", *others]
        rows.append([f"{sample['length']} over {sample['ranks']}", *times, *sent, *rest])
    left_out = [each for sample in results["samples"] for each in sample.get("left_out", {}).items()]
    return "\n".join([text_table(header, rows), *(f"left out: {name}: {why}" for name, why in left_out)])


def draw(results: Results, path: Path, claim: str = "") -> bool:
    """Time and bytes against length, a pair of panels for each number of ranks."""
    panels, measured = [], samples(results)
    for ranks in dict.fromkeys(sample["ranks"] for sample in measured):
        own = [sample for sample in measured if sample["ranks"] == ranks]
        raced = (RING, TORCH, ONE, EXCHANGE, *[GATHERED] * any(GATHERED in s["ms"] for s in own))
        times = {name: {s["length"]: median(s, name) for s in own} for name in raced}
        sent = {name: {s["length"]: gigabytes(s, name) for s in own} for name in (RING, TORCH)}
        title = f"{ranks} ranks"
        panels += [plots.of("C33", plots.lines(title, times, up="ms, forward and backward", log="y"))]
        panels += [plots.of("C33", plots.lines(title, sent, up="GB sent, all ranks", log="y"))]
    title = f"Attention of one sequence on several GPUs, {results['device']}"
    return plots.draw(path, title, panels, columns=2, claim=claim)


def judge(results: Results) -> list[Verdict]:
    """C33. The paper has no figure, so ours are compared with no one's."""
    found = Verdicts(results["device"])
    for sample in samples(results):
        if {RING, ONE} <= sample["ms"].keys():
            name = default(sample, results["settings"])
            where = f"{sample['length']:,} tokens on {sample['ranks']} GPUs, {name}"
            sent = f"a ring sends {gigabytes(sample, RING):.2g} GB"
            waits = f"and waits for {not_hidden(sample):.0%} of the time that its messages take alone"
            why = "the paper measured nothing across GPUs, so there is no figure to compare with"
            gain = took(sample, ONE) / took(sample, name)
            if gain.median > 1.01 * sample["ranks"]:
                why += f"; why more than {sample['ranks']}x is not known"
            ours = f"{gain.shown('{:.2f}x one GPU')}; {sent}, {waits}"
            found.add("C33", f"{where}: forward and backward", NOT_STATED, ours, None, why)
    return found
