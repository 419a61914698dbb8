"""Step time for 8 to 1,024 GPUs, from one GPU's and stated link speeds: python -m benchmarks predict

What goes in, and where it is from:

    one GPU          its step as measured (results/*/scaling.json); a model too large for it at the next smaller one's
                     share of the peak; time is taken to be in proportion to tokens
    NVLink           450 GB/s a GPU and direction (NVIDIA's data sheets of H100 and H200: 900 GB/s both ways)
    network          50 GB/s a GPU and direction: one 400 Gb/s InfiniBand NDR port each, 8 GPUs a host
    overlap          all that PyTorch can overlap: gradients with the last micro-batch's backward but for the last
                     bucket of 25 MB; the parts of blocks that are gathered at once with the computation before them
    one sequence     that all GPUs share (parallel.context): a block's attention is a ring (reproduce.ring.predict),
                     whose slowest link counts, and the flash kernels reach 550 TFLOP/s on an H200, both passes at
                     16,384 tokens (results/nvidia-h200/attention.json); all other layers treat tokens one by
                     one, and take one GPU's share of the time. With gathered keys nothing of attention's exchange is
                     hidden
    host             no step is shorter than what the fastest of the measured hosts needs for FSDP's blocks and groups
                     of them, or for a ring's steps that are not replayed (BLOCK_HOST, STEP_HOST)

What is left out, so that it predicts the best case: latency, links below their stated speed, SMs that NCCL takes from
the computation, slower hosts, hosts that wait for each other. The last tables have all that was measured on several
GPUs in these layouts, step by step as it was, beside its prediction from one GPU of the same file, or else of the
same card.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from reproduce.common import markdown_table
from reproduce.ring import predict as ring
from reproduce.ring_ranks import Shape
from training.parallel.shard import group_size

# width, blocks, tokens at once of a whole model
SHAPES = {"small": (768, 12, 65536), "xl": (1600, 48, 8192), "7b": (4096, 32, 4096)}
IN_PARTS = {"xl": 16384}  # tokens at once, where parts leave the room for more
TOKENS = {"xl": 65536, "7b": 16384}  # a GPU and step, where that is more than one micro-step
MEMORY = 80e9  # bytes of a GPU
GPUS_A_HOST = 8
NVLINK, NETWORK = 450e9, 50e9  # bytes/s of a GPU, each direction
PEAK = 989e12  # FLOP/s in bf16, H100 and H200 SXM
BACKWARD = 2 / 3  # of a step's computation
BUCKET = 25 * 2**20  # bytes, of DistributedDataParallel
KERNELS = 550e12  # FLOP/s
# Seconds of a host, the least that were measured where GPUs waited for it. For a block and micro-step of FSDP, one
# block at a time: GPT-2 XL on two H200s (results/nvidia-h200x2/scaling.json), 2,487.5 ms for 48 blocks and 8
# micro-steps; other hosts took up to 10 ms. Half is for what is gathered at once, be it one block or four
# (kernels/log/step.md).
BLOCK_HOST = 6.5e-3
# For a step of a ring: 7.3 ms for 8, both passes, 32,768 tokens on four H200s (results/nvidia-h200/ring.json)
STEP_HOST = 0.9e-3
# Layouts, of scaling.py.
RING = "context"
GATHERED = ("context, keys gathered", "context, keys gathered, CUDA graphs")
KINDS = {
    "whole, CUDA graphs": "data parallel, CUDA graphs",
    "whole": "data parallel, no CUDA graphs",
    **dict.fromkeys(("full", "full, blocks again"), "FSDP"),
    RING: "ring",
    "context, CUDA graphs": "ring, CUDA graphs",
    **dict.fromkeys(GATHERED, "keys gathered"),
}
LENGTHS = {"32k": 32768, "64k": 65536, "128k": 131072, "256k": 262144}  # of one sequence, as in scaling.py
LEAST = 2048  # tokens of a chunk of it: on less, the kernels are slower than that
HEADER = ("model", "layout", "GPUs", "step, ms", "k tokens/s", "of so many alone")
CASES = (*HEADER[:3], "tokens a step", "at once", "predicted, ms", "measured, ms", "error", "where")
ERRORS = ("layout", "GPUs", "runs", "longer than predicted, least", "most")
SEQUENCE = 1024  # tokens, of the models that are not named after theirs


@dataclass(frozen=True)
class Work:
    """What a GPU does in a step."""

    parameters: float
    in_blocks: float  # parameters
    blocks: int
    tokens: int  # a GPU and step
    micro_steps: int
    seconds: float  # of the computation
    at_once: int  # blocks, of a model in parts

    @property
    def backward(self) -> float:
        return BACKWARD * self.seconds / self.micro_steps


def collective(size: float, gpus: int) -> float:
    """Seconds of an all-gather or a reduce-scatter of `size` bytes in all; an all-reduce is both.

    Within a host a GPU receives what its neighbours have; from other hosts it receives one in eight of their bytes,
    and passes those on. Both happen at once, so the slower one counts.
    """
    inside = min(gpus, GPUS_A_HOST)
    hosts = gpus // inside
    return max(size * (inside - 1) / inside / NVLINK, size * (hosts - 1) / hosts / inside / NETWORK)


def data_parallel(work: Work, gpus: int) -> float:
    """Seconds of a step: gradients in float32, hidden behind the last backward but for the last bucket."""
    exchange = 2 * collective(4 * work.parameters, gpus)
    last = exchange * min(1.0, BUCKET / (4 * work.parameters))
    return work.seconds + max(last, exchange - work.backward)


def fsdp(work: Work, gpus: int, again: bool = False) -> float:
    """Seconds of a step with shard=full: parameters in bf16 gathered for each pass, gradients reduced in float32.

    again: with parallel.recompute=block, whose backward begins with the forward, behind which nothing travels.
    """
    groups = work.blocks / work.at_once
    ends = work.parameters - work.in_blocks  # embeddings, in float32
    gather, reduce = (collective(size * work.in_blocks / groups, gpus) for size in (2, 4))
    backward = work.backward / groups
    forward = backward * (1 - BACKWARD) / BACKWARD
    waits = max(0.0, gather - forward) + max(0.0, gather + reduce - backward)
    open_ends = collective(4 * ends, gpus) * 2 + gather + reduce  # before the first group, after the last
    computing = work.seconds + (work.seconds * (1 - BACKWARD) if again else 0.0)
    device = computing + work.micro_steps * (groups * waits + open_ends)
    return max(device, work.micro_steps * BLOCK_HOST * (work.blocks + groups) / 2)


LAYOUTS: dict[str, Callable[[Work, int], float]] = {"whole": data_parallel, "full": fsdp}
COMPARED = LAYOUTS | {"whole, CUDA graphs": data_parallel, "full, blocks again": partial(fsdp, again=True)}


def work(model: str, tokens: int, mfu: float, fill: int | None = None) -> Work:
    """GPT-2's shapes and FLOPs (model.gpt), at a share of the peak. fill: tokens at once, at most; None: SHAPES'."""
    width, blocks, whole = SHAPES[model]
    block = 12 * width**2 + 13 * width
    in_blocks = blocks * block
    ends = (50304 + 1024 + 2) * width
    flops = 6 * (in_blocks + 50257 * width) + 12 * blocks * width * 1024
    micro_steps = max(1, tokens // (fill or whole))
    seconds = tokens * flops / mfu / PEAK
    at_once = group_size(blocks, block, (6 * block + 12 * width * 1024) * tokens / micro_steps)
    return Work(in_blocks + ends, in_blocks, blocks, tokens, micro_steps, seconds, at_once)


def alone(results: Path) -> dict[str, tuple[float, str]]:
    """Model -> (MFU on one GPU, where it is from)."""
    found = {}
    for where, samples in measured(results).items():
        for model, mfu in shares(samples).items():
            found[model] = mfu, f"measured, {where}"
    for smaller, model in itertools.pairwise(SHAPES):
        found.setdefault(model, (found[smaller][0], f"{smaller}'s"))
    return found


def measured(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Folder -> what `scaling` measured there."""
    read = {file.parent.name: json.loads(file.read_text()) for file in sorted(results.glob("*/scaling.json"))}
    return {where: [s for s in each["samples"] if "failed" not in s] for where, each in read.items()}


def shares(samples: list[dict[str, Any]]) -> dict[str, float]:
    """Model -> MFU on one GPU."""
    own = (each for each in samples if each["ranks"] == 1 and each["model"] in SHAPES)
    return {each["model"]: each["perf/mfu"] for each in own if each.get("perf/mfu")}


def rows(mfus: dict[str, tuple[float, str]], counts: list[int], batch: int | None) -> Iterator[list[str]]:
    """batch: tokens of all GPUs together; None: as many a GPU as SHAPES has, so the batch grows with them."""
    for (model, (_, _, fill)), (layout, predict) in itertools.product(SHAPES.items(), LAYOUTS.items()):
        at_once = IN_PARTS.get(model) if layout == "full" else None
        for gpus in counts:
            own = work(model, batch // gpus if batch else TOKENS.get(model, fill), mfus[model][0], at_once)
            if own.tokens < SEQUENCE or (layout == "whole" and 16 * own.parameters > MEMORY):
                continue  # less than a sequence, or more weights, gradients and moments than a GPU holds
            seconds = predict(own, gpus)
            yield _row((model, layout, gpus), own.tokens, seconds, own.seconds / seconds)


def _row(key: tuple[str, str, int], tokens: float, seconds: float, share: float) -> list[str]:
    """tokens: of a GPU and step. share: of the speed of so many GPUs alone."""
    model, layout, gpus = key
    speed = f"{1e3 * seconds:.1f}", f"{tokens * gpus / seconds / 1e3:,.0f}"
    return [model, layout, f"{gpus:,}", *speed, f"{share:.1%}"]


def shared(length: int, gpus: int, mfu: float, layout: str = RING) -> float:
    """Seconds of a step of GPT-2 small with one sequence that the GPUs share.

    mfu: of one GPU, in all but long attention; gradients travel as in data parallel.
    """
    shape, short = Shape(1, 12, length, 64), work("small", length, mfu)
    attention = 3.5 * shape.flops / KERNELS  # of a block, both passes
    if layout in GATHERED:
        keys = 2 * length * 12 * 64  # and values, of all ranks; the backward sums their gradients in float32
        attention = attention / gpus + 2 * collective(2 * keys, gpus) + collective(4 * keys, gpus)
    elif gpus > 1:
        link = NVLINK if gpus <= GPUS_A_HOST else NETWORK
        attention = sum(ring(shape, gpus, element=2, flops=KERNELS, link=link).values())
        if layout == RING:
            attention = max(attention, 2 * gpus * STEP_HOST)
    seconds = short.seconds / gpus + short.blocks * attention
    return data_parallel(replace(short, tokens=length // gpus, micro_steps=1, seconds=seconds), gpus)


def rows_of_one_sequence(mfu: float, counts: list[int]) -> Iterator[list[str]]:
    for (name, length), gpus in itertools.product(LENGTHS.items(), counts):
        if length >= 2 * gpus * LEAST:
            seconds = shared(length, gpus, mfu)
            share = shared(length, 1, mfu) / gpus / seconds
            yield _row((name, "context", gpus), length / gpus, seconds, share)


# ---- what was measured ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Steps of one layout that were to take the same time, beside what was predicted."""

    key: tuple[str, ...]  # the first of CASES
    kind: str
    predicted: float  # ms
    measured: tuple[float, ...]  # ms, of all runs, least first
    where: str = field(compare=False)  # one GPU's samples stand in the file of each number of GPUs

    @property
    def errors(self) -> list[float]:
        """How much longer it took, as a share; least and most."""
        return [each / self.predicted - 1 for each in (self.measured[0], self.measured[-1])]

    @property
    def row(self) -> list[str]:
        least, most = (f"{each:+.1%}" for each in self.errors)
        runs = "; ".join(f"{each:,.1f}" for each in self.measured)
        error = least if least == most else f"{least} to {most}"
        return [*self.key, f"{self.predicted:,.1f}", runs, error, self.where]


def cases(results: Path) -> list[Case]:
    """All that was measured and can be predicted."""
    found = []
    files = measured(results)
    # What a file lacks, another of the same card may have.
    of_card: dict[str, dict[str, float]] = defaultdict(dict)
    for where, samples in files.items():
        of_card[card(where)] |= shares(samples)
    for where, samples in files.items():
        mfus = of_card[card(where)] | shares(samples)
        runs: dict[tuple[tuple[str, ...], str, float], list[float]] = defaultdict(list)
        # One GPU is what predictions start from, but for a long sequence.
        for sample in (each for each in samples if each["ranks"] > 1 or each["model"] in LENGTHS):
            known = {"xl": ("xl", "small"), "7b": ("xl", "small")}.get(sample["model"], ("small",))
            mfu = next((mfus[each] for each in known if each in mfus), None)
            if mfu and (seconds := predicted(sample, mfu)):
                runs[*_named(sample), 1e3 * seconds].append(sample["perf/step_ms"])
        for (key, kind, milliseconds), each in runs.items():
            found.append(Case(key, kind, milliseconds, tuple(sorted(each)), where))
    return [*dict.fromkeys(found)]


def _named(sample: dict[str, Any]) -> tuple[tuple[str, ...], str]:
    """Case's key and kind."""
    layout, blocks = sample["name"], at_once(sample)
    kind = "one GPU" if sample["ranks"] == 1 else KINDS[layout]
    if blocks > 1:
        layout += f", {blocks} blocks at once"
    tokens = sample["micro_batch"] * LENGTHS.get(sample["model"], SEQUENCE)
    return (sample["model"], layout, str(sample["ranks"]), f"{sample['batch_tokens']:,}", f"{tokens:,}"), kind


def errors(found: list[Case]) -> Iterator[list[str]]:
    """A row for each kind of layout and number of GPUs: the least and the most of all that was measured of it."""
    kinds = [*dict.fromkeys(("one GPU", *KINDS.values()))]
    alike: dict[tuple[int, int], list[Case]] = defaultdict(list)
    for case in found:
        alike[kinds.index(case.kind), int(case.key[2])].append(case)
    for (kind, gpus), several in sorted(alike.items()):
        each = [error for case in several for error in case.errors]
        runs = sum(len(case.measured) for case in several)
        yield [kinds[kind], str(gpus), str(runs), f"{min(each):+.1%}", f"{max(each):+.1%}"]


def card(folder: str) -> str:
    """That of results/CARDxGPUS."""
    return re.sub(r"x\d+$", "", folder)


def predicted(sample: dict[str, Any], mfu: float) -> float | None:
    """Seconds of a step of a sample of `scaling`; None if its layout is not predicted. mfu: of one GPU."""
    model, layout, gpus = sample["model"], sample["name"], sample["ranks"]
    if model in LENGTHS and (gpus == 1 or layout.startswith(RING)):
        return shared(LENGTHS[model], gpus, mfu, layout)
    if model not in SHAPES or layout not in COMPARED:
        return None
    own = work(model, sample["batch_tokens"] // gpus, mfu, sample["micro_batch"] * SEQUENCE)
    as_it_was = replace(own, at_once=at_once(sample))
    return COMPARED[layout](as_it_was, gpus)


def at_once(sample: dict[str, Any]) -> int:
    """Blocks that were gathered at once: 1 before they could be more."""
    return sample.get("blocks_at_once") or 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks predict", description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", nargs="+", type=int, default=[2, 8, 16, 64, 256, 1024])
    parser.add_argument("--batch-tokens", type=int, help="of all GPUs; left out, the batch grows with them")
    parser.add_argument("--results", type=Path, default=Path("results"))
    asked = parser.parse_args(argv)
    if odd := [n for n in asked.gpus if n > GPUS_A_HOST and n % GPUS_A_HOST]:
        parser.error(f"--gpus {odd[0]}: beyond one host, whole hosts of {GPUS_A_HOST} GPUs")
    mfus = alone(asked.results)
    for model, (mfu, source) in mfus.items():
        print(f"{model}: MFU of one GPU {mfu:.3f} ({source})")
    print("\n" + "\n".join(markdown_table(HEADER, [*rows(mfus, asked.gpus, asked.batch_tokens)])))
    print("\nOne sequence that the GPUs share, GPT-2 small:\n")
    print("\n".join(markdown_table(HEADER, [*rows_of_one_sequence(mfus["small"][0], asked.gpus)])))
    found = cases(asked.results)
    print("\nMeasured, every run, and how much longer it took than predicted:\n")
    print("\n".join(markdown_table(CASES, [case.row for case in found])))
    print("\nOf all of these, by layout:\n")
    print("\n".join(markdown_table(ERRORS, [*errors(found)])))
    return 0
