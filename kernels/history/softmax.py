"""Row softmax in three passes and, online, in two (Milakov and Gimelshein 2018, arXiv 1805.02867).

An overflow-safe sum of exponentials needs the row's maximum first (their Algorithm 2). Online softmax (Algorithm 3)
keeps a sum relative to the running maximum and rescales it when that grows: 3 memory accesses per element instead of
4. If only the k largest are wanted, one pass is enough (Algorithm 4): 1 access per element, instead of 5 for softmax
followed by top-k. Rows are assumed to be too long for on-chip memory, and are read again in every pass.
"""

import torch
import triton
import triton.language as tl

from ..flash.portable.forward import LOWEST
from ..launch import FUSION

Tensor = torch.Tensor
BLOCK = 4096  # elements of a row at a time; each lane has its own running maximum and sum
WARPS = 8


def safe_softmax(x: Tensor) -> Tensor:
    """softmax(x, dim=-1) of x (rows, length), like x, in three passes. Computed in float32; no gradient.

    x: on a CUDA device, or wherever TRITON_INTERPRET=1 is set.
    """
    return _softmax(safe_kernel, x)


def online_softmax(x: Tensor) -> Tensor:
    """As `safe_softmax`, in two passes."""
    return _softmax(online_kernel, x)


def online_softmax_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of softmax(x, dim=-1), descending, and their int64 indices, each (rows, k), in one pass over x.

    x: (rows, length), as in `safe_softmax`. Ties are broken arbitrarily. Raises ValueError unless 1 <= k <= length.
    """
    x = x.contiguous()
    rows, length = x.shape
    if not 1 <= k <= length:
        raise ValueError(f"k={k}: it must be 1 to {length}, the length of a row")
    slots = triton.next_power_of_2(k)
    values, indices = x.new_empty(rows, slots), x.new_empty(rows, slots, dtype=torch.int64)
    topk_kernel[(rows,)](x, values, indices, length, k, slots, _block(length), num_warps=WARPS, **FUSION)
    values, order = values[:, :k].sort(descending=True)
    return values, indices[:, :k].gather(1, order)


def _softmax(kernel: triton.JITFunction, x: Tensor) -> Tensor:
    x = x.contiguous()
    rows, length = x.shape
    out = torch.empty_like(x)
    if x.numel():
        kernel[(rows,)](x, out, length, _block(length), num_warps=WARPS, **FUSION)
    return out


def _block(length: int) -> int:
    return min(BLOCK, triton.next_power_of_2(length))


@triton.jit
def safe_kernel(X, Out, length, BLOCK: tl.constexpr):
    """Grid (rows,)."""
    X += tl.program_id(0).to(tl.int64) * length
    Out += tl.program_id(0).to(tl.int64) * length
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    for first in range(0, length, BLOCK):
        largest = tl.maximum(largest, load(X, first, length, BLOCK))
    row_max = tl.max(largest, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, length, BLOCK):
        sums += tl.exp(load(X, first, length, BLOCK) - row_max)
    write(X, Out, row_max, tl.sum(sums, 0), length, BLOCK)


@triton.jit
def online_kernel(X, Out, length, BLOCK: tl.constexpr):
    """Grid (rows,)."""
    X += tl.program_id(0).to(tl.int64) * length
    Out += tl.program_id(0).to(tl.int64) * length
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, length, BLOCK):
        largest, sums = online(largest, sums, load(X, first, length, BLOCK))
    row_max, row_sum = merged(largest, sums)
    write(X, Out, row_max, row_sum, length, BLOCK)


@triton.jit
def topk_kernel(X, Values, Indices, length, k, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows,). Values, Indices: (rows, SLOTS), of which the first k are written, unordered."""
    row = tl.program_id(0).to(tl.int64)
    X += row * length
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    slots = tl.arange(0, SLOTS)
    values = tl.where(slots < k, float("-inf"), float("inf"))  # slots beyond k accept no element
    indices = tl.full([SLOTS], 0, tl.int64)
    for first in range(0, length, BLOCK):
        x = load(X, first, length, BLOCK)
        largest, sums = online(largest, sums, x)
        # Clamp to LOWEST, above the -inf beyond the row's end, so that an element of -inf keeps its index.
        x = tl.where(first + tl.arange(0, BLOCK) < length, tl.maximum(x, LOWEST), float("-inf"))
        # Replace the worst of the k by the best of this block while that is better.
        least = tl.min(values, 0)
        best = tl.max(x, 0)
        while best > least:
            column, slot = tl.argmax(x, 0), tl.argmin(values, 0)
            values = tl.where(slots == slot, best, values)
            indices = tl.where(slots == slot, (first + column).to(tl.int64), indices)
            x = tl.where(tl.arange(0, BLOCK) == column, float("-inf"), x)
            least = tl.min(values, 0)
            best = tl.max(x, 0)
    row_max, row_sum = merged(largest, sums)
    tl.store(Values + row * SLOTS + slots, tl.exp(values - row_max) / row_sum, mask=slots < k)
    tl.store(Indices + row * SLOTS + slots, indices, mask=slots < k)


@triton.jit
def online(largest, sums, x):
    """Update each lane's running maximum and sum of exponentials with one more element."""
    new_largest = tl.maximum(largest, x)
    return new_largest, sums * tl.exp(largest - new_largest) + tl.exp(x - new_largest)


@triton.jit
def merged(largest, sums):
    """Merge the lanes: the row's maximum and sum."""
    row_max = tl.max(largest, 0)
    return row_max, tl.sum(sums * tl.exp(largest - row_max), 0)


@triton.jit
def write(X, Out, row_max, row_sum, length, BLOCK: tl.constexpr):
    """The last pass of both kernels: normalise and store."""
    for first in range(0, length, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        out = tl.exp(load(X, first, length, BLOCK) - row_max) / row_sum
        tl.store(Out + columns, out.to(Out.dtype.element_ty), mask=columns < length)


@triton.jit
def load(X, first, length, BLOCK: tl.constexpr):
    """Load elements of a row; -inf beyond its end."""
    columns = first + tl.arange(0, BLOCK)
    return tl.load(X + columns, mask=columns < length, other=float("-inf")).to(tl.float32)
