"""Count bytes and FLOPs without a GPU: what Triton kernels load and store, and what torch operators read and write.

The counts are the memory accesses that the program requests. Caches may serve some of them, so the DRAM traffic lies
between this count and the compulsory traffic (each input read once, each output written once); only hardware
counters can tell where.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kernels import AttentionError


@dataclass
class Traffic:
    """Counts so far: bytes read and written, and FLOPs of matrix products (2 per multiply-add)."""

    read: int = 0
    written: int = 0
    flops: int = 0

    def since(self, other: Traffic) -> Traffic:
        return Traffic(self.read - other.read, self.written - other.written, self.flops - other.flops)

    def copy(self) -> Traffic:
        return Traffic(self.read, self.written, self.flops)


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count everything run inside: torch operators, and Triton kernels in the interpreter."""
    traffic = Traffic()
    with _interpreter_counted(traffic), _OperatorCounter(traffic):
        yield traffic


@contextmanager
def _interpreter_counted(traffic: Traffic) -> Iterator[None]:
    """Wrap the builder's `create_` methods, through which every load, store and dot of an interpreted kernel goes.

    Lanes that are masked off count nothing. Descriptor loads and stores are counted too: the interpreter turns them
    into masked ones. Its own tensor operations, to fetch and return a kernel's arguments, are not counted.
    """
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    original = dict(vars(Builder))

    def size(mask: Any, handle: Any) -> int:
        return int(np.count_nonzero(mask.data)) * handle.data.dtype.itemsize

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        loaded = original["create_masked_load"](self, ptrs, mask, *rest)
        traffic.read += size(mask, loaded)
        return loaded

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.written += size(mask, value)
        return original["create_masked_store"](self, ptrs, value, mask, *rest)

    def create_atomic_rmw(self: Any, operation: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.read += size(mask, value)
        traffic.written += size(mask, value)
        return original["create_atomic_rmw"](self, operation, ptrs, value, mask, *rest)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        *batch, m, k = a.data.shape
        traffic.flops += 2 * math.prod(batch) * m * k * b.data.shape[-1]
        return original["create_dot"](self, a, b, *rest)

    launch = GridExecutor.__call__

    def uncounted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return launch(self, *args, **kwargs)

    counted = (create_masked_load, create_masked_store, create_atomic_rmw, create_dot)
    with (
        patch.multiple(Builder, **{each.__name__: each for each in counted}),
        patch.object(GridExecutor, "__call__", uncounted),
    ):
        yield


class _OperatorCounter(TorchDispatchMode):
    """Count each torch operator as reading its arguments once and writing its results once; views move nothing."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = operator(*args, **(kwargs or {})), operator.overloadpacket.__name__
        if operator.namespace != "aten" or operator.is_view or name in _MOVE_NOTHING:
            return result
        if "scaled_dot_product" in name and "math" not in name:
            raise AttentionError(
                "torch fuses it into one operator, whose loads and stores cannot be seen from here"
            )
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.traffic.read += 0 if name in _WRITE_ONLY else sum(_bytes(x) for x in inputs)
        self.traffic.written += sum(_bytes(x) for x in outputs)
        if name in _PRODUCTS:
            *_, a, b = inputs
            self.traffic.flops += 2 * a.numel() * b.shape[-1]
        return result


# Allocations and views, whether or not their schema declares the alias (reshape's _unsafe_view does not).
_MOVE_NOTHING = {"empty", "new_empty", "empty_like", "new_empty_strided", "_unsafe_view", "detach", "alias"}
# Of their arguments the first need the shape and the dtype alone.
_WRITE_ONLY = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like"}
_WRITE_ONLY |= {"randn_like", "fill_", "zero_", "normal_", "uniform_", "random_"}
_PRODUCTS = {"bmm", "mm", "baddbmm"}


def _bytes(x: torch.Tensor) -> int:
    """Distinct bytes of a tensor: an expanded dimension (stride 0) counts once."""
    distinct = math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return distinct * x.element_size()


def flash_bytes(length: int, head_dim: int, tiles: dict[str, tuple[int, int]]) -> dict[str, int]:
    """One head's traffic in closed form, forward and backward, without masks; tiles: kernel -> (BLOCK_M, BLOCK_N).

    FlashAttention-2's order reads K and V once for every tile of queries: (2 T_r + 2) N d elements and 4 N bytes of
    log-sum-exp. The dq kernel does the same and also reads out and d_out; the dk, dv kernel reads Q, d_out and two
    floats per row once for every tile of keys.
    """
    rows, floats = 2 * length * head_dim, 4 * length
    row_tiles = {kernel: -(-length // block_m) for kernel, (block_m, _) in tiles.items()}
    column_tiles = -(-length // tiles["dkdv"][1])
    dq = (3 + 2 * row_tiles["dq"] + 1) * rows + 2 * floats
    dkdv = (2 + 2 * column_tiles + 2) * rows + 2 * column_tiles * floats
    return {"forward": (1 + 2 * row_tiles["forward"] + 1) * rows + floats, "backward": dq + dkdv}


def compulsory_bytes(length: int, head_dim: int) -> dict[str, int]:
    """One head, in 16 bits. Forward: q, k, v and out; backward: these and d_out, and three gradients; both: lse."""
    rows, floats = 2 * length * head_dim, 4 * length
    return {"forward": 4 * rows + floats, "backward": 8 * rows + floats}
