"""Time the candidate tiles of the portable kernels on this GPU: python -m kernels.tune

Each candidate of each kernel runs on 16,384 tokens of hidden width 2048 in bfloat16, causal and full, at each length
of tiles.LENGTHS. The times are written to the user's cache, where `flash` looks for them; --out names another file.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .versions import kernels_lack, mismatched_libraries, no_cuda

if lacking := kernels_lack():
    sys.exit(f"kernels.tune needs {lacking}")

import triton
from triton.testing import do_bench

from .flash.api import flash_attention
from .flash.portable.launch import architecture
from .flash.portable.tiles import KERNELS, LENGTHS, Tile, candidates, forced, tuned_path

TOKENS, WIDTH = 16384, 2048


@dataclass(frozen=True)
class Case:
    """One kernel with one tile at one shape."""

    kernel: str
    head_dim: int
    causal: bool
    length: int
    tile: Tile

    def call(self, batch: int | None = None) -> Callable[[], object]:
        """The function to time: the forward, or the backward with this tile in one of its two kernels."""
        shape = (batch or TOKENS // self.length, self.length, WIDTH // self.head_dim, self.head_dim)
        q, k, v, d_out = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
        )
        if self.kernel == "forward":
            return lambda: flash_attention(q, k, v, causal=self.causal)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = flash_attention(*leaves, causal=self.causal)
        return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)


def cases(head_dims: list[int]) -> Iterator[Case]:
    """Every candidate at every shape, for kernels with more than one candidate."""
    this = architecture(torch.device("cuda"))
    for head_dim in head_dims:
        for kernel in KERNELS:
            for causal in (True, False):
                tiles = candidates(kernel, this, head_dim, torch.bfloat16, causal)
                for length in LENGTHS if len(tiles) > 1 else ():
                    for tile in tiles:
                        yield Case(kernel, head_dim, causal, length, tile)


def compile_case(case: Case) -> None:
    """Compile the kernel into Triton's disk cache."""
    with forced(**{case.kernel: case.tile}):
        case.call(batch=1)()


def microseconds(case: Case) -> float:
    """Median time, with a cold L2 cache."""
    with forced(**{case.kernel: case.tile}):
        return round(1e3 * do_bench(case.call(), warmup=10, rep=50, return_mode="median"), 1)


def measure(found: list[Case]) -> list[dict[str, Any]]:
    """One entry per kernel, head_dim, causality and length, with {"us": {tile: microseconds}}, fastest first."""
    entries: dict[tuple[str, int, bool, int], dict[str, float]] = {}
    for case in found:
        key = (case.kernel, case.head_dim, case.causal, case.length)
        entries.setdefault(key, {})[str(case.tile)] = microseconds(case)
    names = ("kernel", "head_dim", "causal", "length")
    return [
        {**dict(zip(names, key, strict=True)), "us": dict(sorted(times.items(), key=lambda item: item[1]))}
        for key, times in entries.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the times, fastest tile first, and write them to the file."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--out", type=Path, help="write here instead of the user's cache")
    options = parser.parse_args(arguments)
    if lacking := no_cuda() or mismatched_libraries():
        sys.exit(f"kernels.tune times kernels on a GPU: {lacking}")
    found = list(cases(options.head_dim))
    shortest = [case for case in found if case.length == LENGTHS[0]]  # kernels are not specialised on length
    with ProcessPoolExecutor(
        min(8, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        list(pool.map(compile_case, shortest))
    entries = measure(found)
    for entry in entries:
        mask = "causal" if entry["causal"] else "full"
        times = "  ".join(f"{tile} {us:.0f}" for tile, us in entry["us"].items())
        print(f"{entry['kernel']:8} d{entry['head_dim']:<4}{mask:7}{entry['length']:6}  {times} us")
    path = options.out or tuned_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__, "entries": entries}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document, indent=1) + "\n")
    new.replace(path)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
