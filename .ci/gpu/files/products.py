"""GPT-2 small's weight gradients, one product of float32 sums, beside K split into batches: python products.py

d_out^T x is added to a float32 total (kernels/layers/sums.py), for 16 and 64 sequences of 1024 tokens. By count 768 x
768 has 36 tiles for 132 processors (kernels/log/step.md). Prints microseconds, and each split's over the one
product's in the same round: median [quartiles]. Writes $JOB_OUT/products.txt. With TRY=1 tiny, on a CPU.
"""

import functools
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, os.getcwd())
import torch
from torch import Tensor

from kernels.layers.sums import add_product
from reproduce import timing

TRY = "TRY" in os.environ
DEVICE = torch.device("cpu" if TRY else "cuda")
SHAPES = ((32, 32),) if TRY else ((768, 768), (2304, 768), (3072, 768), (768, 3072))  # of the weight
TOKENS = (64,) if TRY else (16384, 65536)
SPLITS = (1, 2, 4, 8)
Operands = tuple[Tensor, Tensor, Tensor]


def add(total: Tensor, d_out: Tensor, x: Tensor, parts: int) -> None:
    if parts == 1:
        return add_product(total, d_out.t(), x)
    rows = len(x) // parts
    batches = (each[: parts * rows].unflatten(0, (parts, rows)) for each in (d_out, x))
    how = {} if TRY else {"out_dtype": torch.float32}
    total += torch.bmm(next(batches).mT, next(batches), **how).sum(0)
    return None


def turn(parts: int, sets: list[Operands], number: int) -> Iterator[None]:
    add(*sets[number % len(sets)], parts)
    yield


def line(rows: int, columns: int, tokens: int) -> str:
    make = functools.partial(torch.randn, device=DEVICE, dtype=torch.float32 if TRY else torch.bfloat16)
    count = timing.input_sets(2 * tokens * (rows + columns), DEVICE)
    sets = [
        (torch.zeros(rows, columns, device=DEVICE), make(tokens, rows), make(tokens, columns))
        for _ in range(count)
    ]
    calls = {str(parts): functools.partial(turn, parts, sets) for parts in SPLITS}
    times = timing.time_alternating(calls, DEVICE, seconds=0.0 if TRY else 0.5).ms
    one = times["1"][0]
    cells = [f"{rows} x {columns}, {tokens} tokens: {1e3 * statistics.median(one):.0f} us"]
    for parts, (each,) in list(times.items())[1:]:
        low, median, high = statistics.quantiles([a / b for a, b in zip(each, one, strict=True)], n=4)
        cells.append(f"in {parts} {median:.3f} [{low:.2f} {high:.2f}]")
    return "  ".join(cells)


def main() -> None:
    found = [line(*shape, tokens) for tokens in TOKENS for shape in SHAPES]
    Path(os.environ["JOB_OUT"], "products.txt").write_text("\n".join(found) + "\n")
    print(*found, sep="\n")


if __name__ == "__main__":
    main()
