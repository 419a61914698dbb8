"""Block masks in the Hopper kernels: the blocks of keys that a tile of queries visits, and the other way round.

They come as the lists of `masks.block_lists`, of blocks as large as the tiles here: a kernel visits what is listed,
and what is not costs nothing. An empty list names one block beyond the end, which is visited as any other: TMA fills
it with zeros, all of it is masked, and so the rows get the results of rows that see nothing.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Blocks(NamedTuple):
    """The lists, at run time."""

    Lists: gl.tensor  # int32 (batch, heads, blocks, width)
    stride_b: gl.tensor  # 0 where all batches, or heads, share a mask
    stride_h: gl.tensor
    width: gl.tensor


LISTS = ("stride_lb", "stride_lh", "width")  # as the kernels call these numbers


@gluon.jit
def list_of(block, head, batch, blocks):
    """The list of a block, as a pointer."""
    Lists = blocks.Lists + batch.to(gl.int64) * blocks.stride_b + head.to(gl.int64) * blocks.stride_h
    return Lists + block * blocks.width


@gluon.jit
def count_visited(List):
    """How many blocks are visited: as many as are listed, or the one beyond the end."""
    return gl.maximum(gl.load(List), 1)
