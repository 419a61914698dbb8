"""Step time for 8 to 1,024 GPUs, from one GPU's and stated link speeds: python -m benchmarks predict

What goes in, and where it is from:

    one GPU          GPT-2 small's step on one H200, measured (results/nvidia-h200/train_two_gpus.json); larger models
                     at the same share of the peak, unless results/*/scaling.json has them on one GPU; time is taken
                     to be in proportion to tokens
    NVLink           450 GB/s a GPU and direction (NVIDIA's data sheets of H100 and H200: 900 GB/s both ways)
    network          50 GB/s a GPU and direction: one 400 Gb/s InfiniBand NDR port each, 8 GPUs a host
    overlap          all that PyTorch can overlap: gradients with the last micro-batch's backward but for the last
                     bucket of 25 MB; a block's parts with the computation of the block before it

What is left out, so that it predicts the best case: latency, links below their stated speed, SMs that NCCL takes from
the computation, hosts that wait for each other. The last column holds a prediction against what was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reproduce.common import markdown_table

SHAPES = {
    "small": (768, 12, 65536),
    "xl": (1600, 48, 8192),
    "7b": (4096, 32, 4096),
}  # width, blocks, tokens at once
TOKENS = {"xl": 65536, "7b": 16384}  # a GPU and step, where that is more than one micro-step
MEMORY = 80e9  # bytes of a GPU
GPUS_A_HOST = 8
NVLINK, NETWORK = 450e9, 50e9  # bytes/s of a GPU, each direction
PEAK = 989e12  # FLOP/s in bf16, H100 and H200 SXM
BACKWARD = 2 / 3  # of a step's computation
BUCKET = 25 * 2**20  # bytes, of DistributedDataParallel
MEASURED = Path("nvidia-h200/train_two_gpus.json")


@dataclass(frozen=True)
class Work:
    """What a GPU does in a step."""

    model: str
    parameters: float
    in_blocks: float  # parameters
    blocks: int
    tokens: int  # a GPU and step
    micro_steps: int
    seconds: float  # of the computation

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
    block = work.in_blocks / work.blocks
    ends = work.parameters - work.in_blocks  # embeddings, in float32
    gather, reduce = collective(2 * block, gpus), collective(4 * block, gpus)
    backward = work.backward / work.blocks
    forward = backward * (1 - BACKWARD) / BACKWARD
    waits = max(0.0, gather - forward) + max(0.0, gather + reduce - backward)
    open_ends = collective(4 * ends, gpus) * 2 + gather + reduce  # before the first block, after the last
    return work.seconds + work.micro_steps * (work.blocks * waits + open_ends)


LAYOUTS: dict[str, Callable[[Work, int], float]] = {"whole": data_parallel, "full": fsdp}


def work(model: str, tokens: int, mfu: float) -> Work:
    """GPT-2's shapes and FLOPs (model.gpt), at a share of the peak; as many micro-steps as fill a GPU."""
    width, blocks, at_once = SHAPES[model]
    in_blocks = blocks * (12 * width**2 + 13 * width)
    ends = (50304 + 1024 + 2) * width
    flops = 6 * (in_blocks + 50257 * width) + 12 * blocks * width * 1024
    micro_steps = max(1, tokens // at_once)
    seconds = tokens * flops / mfu / PEAK
    return Work(model, in_blocks + ends, in_blocks, blocks, tokens, micro_steps, seconds)


def alone(results: Path) -> dict[str, tuple[float, str]]:
    """Model -> (MFU on one GPU, where it is from)."""
    small = json.loads((results / MEASURED).read_text())["summaries"][1]["perf/mfu"]  # without CUDA graphs
    found = dict.fromkeys(SHAPES, (small, "small's, measured on an H200"))
    for file in sorted(results.glob("*/scaling.json")):
        for sample in json.loads(file.read_text())["samples"]:
            if sample.get("perf/mfu") and sample["ranks"] == 1 and sample["model"] in SHAPES:
                found[sample["model"]] = sample["perf/mfu"], f"measured, {file.parent.name}"
    return found


def measured(results: Path) -> dict[tuple[str, str, int], float]:
    """(model, layout, GPUs) -> tokens/s a GPU, of all that results/ has of several GPUs."""
    two = [s for s in json.loads((results / MEASURED).read_text())["summaries"] if s["world_size"] == 2]
    found = {("small", "whole", 2): two[0]["perf/tokens_per_second"] / 2}
    for file in sorted(results.glob("*/scaling.json")):
        for sample in json.loads(file.read_text())["samples"]:
            if "failed" not in sample and sample["ranks"] > 1:
                key = sample["model"], sample["name"], sample["ranks"]
                found[key] = sample["perf/tokens_per_second_per_device"]
    return found


def rows(results: Path, counts: list[int], batch: int | None) -> list[list[str]]:
    """batch: tokens of all GPUs together; None: as many a GPU as SHAPES has, so the batch grows with them."""
    known, mfus = measured(results), alone(results)
    found = []
    for (model, (_, _, at_once)), (layout, predict) in itertools.product(SHAPES.items(), LAYOUTS.items()):
        for gpus in counts:
            own = work(model, batch // gpus if batch else TOKENS.get(model, at_once), mfus[model][0])
            if own.tokens < 1024 or (layout == "whole" and 16 * own.parameters > MEMORY):
                continue  # less than a sequence, or more weights, gradients and moments than a GPU holds
            seconds = predict(own, gpus)
            truth = None if batch else known.get((model, layout, gpus))
            error = f"{own.tokens / seconds / truth - 1:+.1%}" if truth else "not measured"
            speed = f"{1e3 * seconds:.1f}", f"{own.tokens * gpus / seconds / 1e3:,.0f}"
            found.append([model, layout, f"{gpus:,}", *speed, f"{own.seconds / seconds:.1%}", error])
    return found


HEADER = ("model", "layout", "GPUs", "step, ms", "k tokens/s", "of so many alone", "error")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks predict", description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", nargs="+", type=int, default=[2, 8, 16, 64, 256, 1024])
    parser.add_argument("--batch-tokens", type=int, help="of all GPUs; left out, the batch grows with them")
    parser.add_argument("--results", type=Path, default=Path("results"))
    asked = parser.parse_args(argv)
    if odd := [n for n in asked.gpus if n > GPUS_A_HOST and n % GPUS_A_HOST]:
        parser.error(f"--gpus {odd[0]}: beyond one host, whole hosts of {GPUS_A_HOST} GPUs")
    for model, (mfu, source) in alone(asked.results).items():
        print(f"{model}: MFU of one GPU {mfu:.3f} ({source})")
    print("\n" + "\n".join(markdown_table(HEADER, rows(asked.results, asked.gpus, asked.batch_tokens))))
    from . import predict_context  # which builds on this module

    print("\nOne sequence that the GPUs share, GPT-2 small (predict_context.py):\n")
    print("\n".join(markdown_table(HEADER, predict_context.rows(asked.results, asked.gpus))))
    return 0
