"""The part of `python -m benchmarks predict` for one long sequence that all GPUs share (parallel.context).

A block's attention is a ring (reproduce.ring.predict), whose slowest link counts: NVLink within a host, else the
network. What goes in beside predict.py's: the flash kernels' 550 TFLOP/s on an H200, both passes at 16,384 tokens
(results/nvidia-h200/attention.json). All other layers treat tokens one by one, and take one GPU's share of the time.
"""

from __future__ import annotations

from pathlib import Path

from reproduce.ring import predict
from reproduce.ring_ranks import Shape

from .predict import GPUS_A_HOST, NETWORK, NVLINK, Work, alone, data_parallel, measured, work

KERNELS = 550e12  # FLOP/s
LENGTHS = {"32k": 32768, "64k": 65536, "128k": 131072, "256k": 262144}  # as in scaling.py
HEADS, HEAD_DIM = 12, 64
BF16 = 2  # bytes
LEAST = 2048  # tokens of a chunk: on less, the kernels are slower than that


def attention(length: int, gpus: int) -> float:
    """Seconds of both passes of a block's attention."""
    shape = Shape(1, HEADS, length, HEAD_DIM)
    if gpus == 1:
        return 3.5 * shape.flops / KERNELS
    link = NVLINK if gpus <= GPUS_A_HOST else NETWORK
    return sum(predict(shape, gpus, BF16, KERNELS, link).values())


def step(length: int, gpus: int, mfu: float) -> float:
    """Seconds of a step. mfu: of one GPU, in all but long attention; gradients travel as in data parallel."""
    short = work("small", length, mfu)
    seconds = short.seconds / gpus + short.blocks * attention(length, gpus)
    share = Work("small", short.parameters, short.in_blocks, short.blocks, length // gpus, 1, seconds)
    return data_parallel(share, gpus)


def rows(results: Path, counts: list[int]) -> list[list[str]]:
    """A row for each length and number of GPUs that can share it, with the error of the prediction."""
    known, (mfu, _) = measured(results), alone(results)["small"]
    found = []
    for name, length in LENGTHS.items():
        for gpus in counts:
            if length < 2 * gpus * LEAST:
                continue
            seconds, whole = step(length, gpus, mfu), step(length, 1, mfu)
            truth = known.get((name, "context", gpus))
            error = f"{length / gpus / seconds / truth - 1:+.1%}" if truth else "not measured"
            speed = f"{1e3 * seconds:.1f}", f"{length / seconds / 1e3:,.0f}"
            found.append([name, "context", f"{gpus:,}", *speed, f"{whole / gpus / seconds:.1%}", error])
    return found
