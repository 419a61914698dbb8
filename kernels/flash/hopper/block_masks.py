"""Block masks in the Hopper kernels: which blocks of keys a tile of queries visits, and the reverse.

`masks.block_lists` makes the lists, for blocks of 128 queries by 128 keys. Blocks that are not listed cost nothing.
An empty list names one block beyond the end, visited like any other: TMA fills it with zeros, the mask removes all of
it, and the rows get the result of fully masked rows.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Blocks(NamedTuple):
    """The lists, as runtime values."""

    Lists: gl.tensor  # int32 (batch, heads, blocks, width)
    stride_b: gl.tensor  # 0 where all batches share a mask; stride_h likewise for heads
    stride_h: gl.tensor
    width: gl.tensor


LISTS = ("stride_lb", "stride_lh", "width")  # the kernels' names for these arguments


@gluon.jit
def list_of(block, head, batch, blocks):
    """Pointer to the list of a block: the count, then the blocks to visit."""
    Lists = blocks.Lists + batch.to(gl.int64) * blocks.stride_b + head.to(gl.int64) * blocks.stride_h
    return Lists + block * blocks.width


@gluon.jit
def count_visited(List):
    """Number of blocks to visit: the listed ones, or for an empty list the one beyond the end."""
    return gl.maximum(gl.load(List), 1)
