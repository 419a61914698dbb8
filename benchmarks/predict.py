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

What is left out, so that it predicts the best case: latency, links below their stated speed, SMs that NCCL takes from
the computation, hosts that wait for each other. The last table has what was measured on several GPUs, step by step as
it was, beside its prediction from one GPU of the same file, or else of the same card.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reproduce.common import markdown_table
from reproduce.ring import predict as ring
from reproduce.ring_ranks import Shape
from training.parallel.shard import group_size

# width, blocks, tokens at once
SHAPES = {"small": (768, 12, 65536), "xl": (1600, 48, 8192), "7b": (4096, 32, 4096)}
TOKENS = {"xl": 65536, "7b": 16384}  # a GPU and step, where that is more than one micro-step
MEMORY = 80e9  # bytes of a GPU
GPUS_A_HOST = 8
NVLINK, NETWORK = 450e9, 50e9  # bytes/s of a GPU, each direction
PEAK = 989e12  # FLOP/s in bf16, H100 and H200 SXM
BACKWARD = 2 / 3  # of a step's computation
BUCKET = 25 * 2**20  # bytes, of DistributedDataParallel
KERNELS = 550e12  # FLOP/s
# Layouts, of scaling.py.
RINGS = ("context", "context, CUDA graphs")
GATHERED = ("context, keys gathered", "context, keys gathered, CUDA graphs")
LENGTHS = {"32k": 32768, "64k": 65536, "128k": 131072, "256k": 262144}  # of one sequence, as in scaling.py
LEAST = 2048  # tokens of a chunk of it: on less, the kernels are slower than that
HEADER = ("model", "layout", "GPUs", "step, ms", "k tokens/s", "of so many alone")
CASES = ("model", "layout", "GPUs", "tokens a step", "predicted, ms", "measured, ms", "error", "where")
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


def fsdp(work: Work, gpus: int) -> float:
    """Seconds of a step with shard=full: parameters in bf16 gathered for each pass, gradients reduced in float32."""
    groups = work.blocks / work.at_once
    ends = work.parameters - work.in_blocks  # embeddings, in float32
    gather, reduce = (collective(size * work.in_blocks / groups, gpus) for size in (2, 4))
    backward = work.backward / groups
    forward = backward * (1 - BACKWARD) / BACKWARD
    waits = max(0.0, gather - forward) + max(0.0, gather + reduce - backward)
    open_ends = collective(4 * ends, gpus) * 2 + gather + reduce  # before the first group, after the last
    return work.seconds + work.micro_steps * (groups * waits + open_ends)


def fsdp_again(work: Work, gpus: int) -> float:
    """With parallel.recompute=block, whose backward begins with the forward."""
    again = work.seconds * (1 - BACKWARD)
    return fsdp(work, gpus) + again


LAYOUTS: dict[str, Callable[[Work, int], float]] = {"whole": data_parallel, "full": fsdp}
COMPARED = LAYOUTS | {"whole, CUDA graphs": data_parallel, "full, blocks again": fsdp_again}


def work(model: str, tokens: int, mfu: float) -> Work:
    """GPT-2's shapes and FLOPs (model.gpt), at a share of the peak; as many micro-steps as fill a GPU."""
    width, blocks, fill = SHAPES[model]
    block = 12 * width**2 + 13 * width
    in_blocks = blocks * block
    ends = (50304 + 1024 + 2) * width
    flops = 6 * (in_blocks + 50257 * width) + 12 * blocks * width * 1024
    micro_steps = max(1, tokens // fill)
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
    for (model, (_, _, at_once)), (layout, predict) in itertools.product(SHAPES.items(), LAYOUTS.items()):
        for gpus in counts:
            own = work(model, batch // gpus if batch else TOKENS.get(model, at_once), mfus[model][0])
            if own.tokens < SEQUENCE or (layout == "whole" and 16 * own.parameters > MEMORY):
                continue  # less than a sequence, or more weights, gradients and moments than a GPU holds
            seconds = predict(own, gpus)
            yield _row((model, layout, gpus), own.tokens, seconds, own.seconds / seconds)


def _row(key: tuple[str, str, int], tokens: float, seconds: float, share: float) -> list[str]:
    """tokens: of a GPU and step. share: of the speed of so many GPUs alone."""
    model, layout, gpus = key
    speed = f"{1e3 * seconds:.1f}", f"{tokens * gpus / seconds / 1e3:,.0f}"
    return [model, layout, f"{gpus:,}", *speed, f"{share:.1%}"]


def shared(length: int, gpus: int, mfu: float, *, gathered: bool = False) -> float:
    """Seconds of a step of GPT-2 small with one sequence that the GPUs share.

    mfu: of one GPU, in all but long attention; gradients travel as in data parallel.
    """
    shape, short = Shape(1, 12, length, 64), work("small", length, mfu)
    attention = 3.5 * shape.flops / KERNELS  # of a block, both passes
    if gathered:
        keys = 2 * length * 12 * 64  # and values, of all ranks; the backward sums their gradients in float32
        attention = attention / gpus + 2 * collective(2 * keys, gpus) + collective(4 * keys, gpus)
    elif gpus > 1:
        link = NVLINK if gpus <= GPUS_A_HOST else NETWORK
        attention = sum(ring(shape, gpus, element=2, flops=KERNELS, link=link).values())
    seconds = short.seconds / gpus + short.blocks * attention
    return data_parallel(replace(short, tokens=length // gpus, micro_steps=1, seconds=seconds), gpus)


def rows_of_one_sequence(mfu: float, counts: list[int]) -> Iterator[list[str]]:
    for (name, length), gpus in itertools.product(LENGTHS.items(), counts):
        if length >= 2 * gpus * LEAST:
            seconds = shared(length, gpus, mfu)
            share = shared(length, 1, mfu) / gpus / seconds
            yield _row((name, "context", gpus), length / gpus, seconds, share)


# ---- what was measured ---------------------------------------------------------------------------


def cases(results: Path) -> list[list[str]]:
    """A row for each layout that was measured and can be predicted."""
    found: dict[tuple[str, ...], str] = {}  # one GPU's samples stand in the file of each number of GPUs
    files = measured(results)
    # What a file lacks, another of the same card may have.
    of_card: dict[str, dict[str, float]] = defaultdict(dict)
    for where, samples in files.items():
        of_card[card(where)] |= shares(samples)
    for where, samples in files.items():
        mfus = of_card[card(where)] | shares(samples)
        # One GPU is what predictions start from, but for a long sequence.
        compared = [each for each in samples if each["ranks"] > 1 or each["model"] in LENGTHS]
        several = {(s["model"], s["name"], s["ranks"], at_once(s)): s for s in reversed(compared)}
        for (model, layout, gpus, blocks), sample in reversed(several.items()):
            known = {"xl": ("xl", "small"), "7b": ("xl", "small")}.get(model, ("small",))
            mfu = next((mfus[each] for each in known if each in mfus), None)
            if mfu and (seconds := predicted(sample, mfu)):
                milliseconds = sample["perf/step_ms"]
                error = f"{milliseconds / seconds / 1e3 - 1:+.1%}"
                took = f"{1e3 * seconds:,.1f}", f"{milliseconds:,.1f}"
                tokens = f"{sample['batch_tokens']:,}"
                if blocks > 1:
                    layout += f", {blocks} blocks at once"
                found.setdefault((model, layout, str(gpus), tokens, *took, error), where)
    return [[*row, where] for row, where in found.items()]


def card(folder: str) -> str:
    """That of results/CARDxGPUS."""
    return re.sub(r"x\d+$", "", folder)


def predicted(sample: dict[str, Any], mfu: float) -> float | None:
    """Seconds of a step of a sample of `scaling`; None if its layout is not predicted. mfu: of one GPU."""
    model, layout, gpus = sample["model"], sample["name"], sample["ranks"]
    if model in LENGTHS and (gpus == 1 or layout in RINGS + GATHERED):
        return shared(LENGTHS[model], gpus, mfu, gathered=layout in GATHERED)
    if model not in SHAPES or layout not in COMPARED:
        return None
    tokens = sample["batch_tokens"] // gpus
    micro_steps = max(1, tokens // (sample["micro_batch"] * SEQUENCE))
    as_it_was = replace(work(model, tokens, mfu), micro_steps=micro_steps, at_once=at_once(sample))
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
    print("\nMeasured, and how much longer it took than predicted:\n")
    print("\n".join(markdown_table(CASES, cases(asked.results))))
    return 0
