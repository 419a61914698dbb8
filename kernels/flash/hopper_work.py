"""What the programs of the Hopper backward do, and in which order.

A work is a block of KEYS keys of a head, with all blocks of queries that see one of them. As many programs run as the
GPU has processors, and each takes one work after another: its first tiles arrive while the warps finish the one
before. With a program for each, a work took 14 to 30 us at 512 to 2048 causal tokens, 5 of them around its steps
(LOG.md).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_blocks import Blocks, count_visited, list_of
from .hopper_bounds import Bounds, end_rows

KEYS = gl.constexpr(128)
# head_dim -> queries a tile. S and dP of a warpgroup fill half of its registers or a quarter, dK and dV the rest.
BLOCK_M = {64: 128, 128: 64}


class Sizes(NamedTuple):
    """What a launch is about. What could be computed from the rest comes from the host too: ptxas would keep it in
    registers, and spill it."""

    heads: gl.tensor
    sequences: gl.tensor  # heads of the whole batch
    together: gl.tensor  # heads in a group
    in_group: gl.tensor  # works of a group
    q_len: gl.tensor
    kv_len: gl.tensor
    offset: gl.tensor  # kv_len - q_len
    row_blocks: gl.tensor
    key_blocks: gl.tensor
    bounds: Bounds  # or None: no window, no documents
    blocks: Blocks  # of queries, or None: no block mask
    Seed: gl.tensor  # dropout's, or None


class Work(NamedTuple):
    """A block of keys of a head, with `steps` blocks of queries from block `last` down (but see `block_at`).

    The first `begun` of them need a mask, and those from `clear` on.
    """

    batch: gl.tensor
    head: gl.tensor
    sequence: gl.tensor  # head of the whole batch
    key_block: gl.tensor
    last: gl.tensor
    steps: gl.tensor
    begun: gl.tensor  # steps with a row that some of the keys are not for any more
    clear: gl.tensor
    keys_left: gl.tensor  # from the first of this block on
    diagonal: gl.tensor  # the row whose causal mask ends at the first key, less block `last`'s first


@gluon.jit
def plan(index, sizes, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """The index-th work. Heads come in groups; in a group the first keys come first."""
    first_sequence = index // sizes.in_group * sizes.together
    index -= first_sequence * sizes.key_blocks
    together = gl.minimum(sizes.together, sizes.sequences - first_sequence)
    sequence = first_sequence + index % together
    key_block = index // together
    first_key = key_block * KEYS
    batch = sequence // sizes.heads
    steps = sizes.row_blocks
    begun = 0
    if sizes.bounds is not None:
        last_key = gl.minimum(first_key + KEYS, sizes.kv_len) - 1
        steps = gl.cdiv(end_rows(last_key, batch, sizes.bounds), BLOCK_M)
        begun = steps - end_rows(first_key, batch, sizes.bounds) // BLOCK_M
    last = steps - 1
    clear = steps
    diagonal = first_key - sizes.offset - last * BLOCK_M
    if sizes.blocks is not None:
        steps, clear = plan_listed(key_block, sequence % sizes.heads, batch, sizes, BLOCK_M, CAUSAL)
        # The last of the steps on the diagonal begins with the first key's row, as if all steps were side by side.
        diagonal = BLOCK_M - KEYS - clear * BLOCK_M
    elif CAUSAL:
        steps -= gl.maximum(first_key - sizes.offset, 0) // BLOCK_M
        clear -= gl.cdiv(gl.maximum(first_key + KEYS - 1 - sizes.offset, 0), BLOCK_M)
    if first_key + KEYS > sizes.kv_len:
        clear = 0
    return Work(
        batch, sequence % sizes.heads, sequence, key_block, last, steps, begun, clear,
        sizes.kv_len - first_key, diagonal,
    )  # fmt: skip


@gluon.jit
def plan_listed(key_block, head, batch, sizes, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """steps and clear of a work whose blocks of queries are listed, KEYS // BLOCK_M at a time."""
    PARTS: gl.constexpr = KEYS // BLOCK_M
    List = list_of(key_block, head, batch, sizes.blocks)
    steps = count_visited(List) * PARTS
    clear = steps
    if CAUSAL:  # the block on the diagonal, if it is listed, comes last
        on_diagonal = gl.load(List + 1) * KEYS == key_block * KEYS - sizes.offset
        clear -= gl.where(on_diagonal, PARTS, 0)
    return steps, clear


@gluon.jit
def block_at(work, step, sizes, BLOCK_M: gl.constexpr):
    """The block of queries of a step. Of a list it may be one beyond the end, which has no rows."""
    block = work.last - step
    if sizes.blocks is not None:
        PARTS: gl.constexpr = KEYS // BLOCK_M
        List = list_of(work.key_block, work.head, work.batch, sizes.blocks)
        rest = work.steps - 1 - step
        block = gl.load(List + 1 + rest // PARTS) * PARTS + rest % PARTS
    return block
