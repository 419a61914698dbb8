"""The work items of the Hopper backward, and their order.

A work item ("work" below) is a block of KEYS keys of one head, with all blocks of queries that see any of them: one
step for each block of queries. The kernel is persistent: one program for each SM takes one item after another, and
the next item's first tiles are prefetched while the warps finish the current one. With one program for each item, an
item took 14 to 30 us at 512 to 2048 causal tokens, 5 of them before and after its steps (LOG.md).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_blocks import Blocks, count_visited, list_of
from .hopper_bounds import Bounds, end_rows

KEYS = gl.constexpr(128)
# head_dim -> queries in a tile. A warpgroup's S and dP fill half of its registers, or a quarter; dK and dV the rest.
BLOCK_M = {64: 128, 128: 64}


class Sizes(NamedTuple):
    """The problem sizes of a launch. The host passes derived values too: computed in the kernel, ptxas would keep
    them in registers and spill them."""

    heads: gl.tensor
    sequences: gl.tensor  # batch * heads
    together: gl.tensor  # heads in a scheduling group
    in_group: gl.tensor  # work items of a group
    q_len: gl.tensor
    kv_len: gl.tensor
    offset: gl.tensor  # kv_len - q_len
    row_blocks: gl.tensor
    key_blocks: gl.tensor
    bounds: Bounds  # None without window and documents
    blocks: Blocks  # lists of blocks of queries; None without block mask
    Seed: gl.tensor  # of dropout, or None


class Work(NamedTuple):
    """A work item: one block of keys of one head, and `steps` blocks of queries, from block `last` downwards (for
    lists see `block_at`).

    The masked steps are the first `begun` ones (ends of windows and documents), and those from step `clear` on (the
    causal diagonal; in a partial block of keys, all).
    """

    batch: gl.tensor
    head: gl.tensor
    sequence: gl.tensor  # batch * heads + head
    key_block: gl.tensor
    last: gl.tensor
    steps: gl.tensor
    begun: gl.tensor  # steps with a row that no longer sees all of the keys
    clear: gl.tensor
    keys_left: gl.tensor  # kv_len - first key of the block
    diagonal: gl.tensor  # first row that sees the first key, relative to block `last`'s first row


@gluon.jit
def plan(index, sizes, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """Decode the index-th work item. Heads come in groups; within a group, items go by ascending blocks of keys."""
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
        # The last diagonal step begins at the row of the first key, counting rows as if all steps were adjacent.
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
    """steps and clear of a work item under a block mask; a listed block of queries is KEYS // BLOCK_M steps."""
    PARTS: gl.constexpr = KEYS // BLOCK_M
    List = list_of(key_block, head, batch, sizes.blocks)
    steps = count_visited(List) * PARTS
    clear = steps
    if CAUSAL:  # the diagonal block, if listed, is visited last
        on_diagonal = gl.load(List + 1) * KEYS == key_block * KEYS - sizes.offset
        clear -= gl.where(on_diagonal, PARTS, 0)
    return steps, clear


@gluon.jit
def block_at(work, step, sizes, BLOCK_M: gl.constexpr):
    """The block of queries of a step. A list may name a block beyond the end, which has no rows."""
    block = work.last - step
    if sizes.blocks is not None:
        PARTS: gl.constexpr = KEYS // BLOCK_M
        List = list_of(work.key_block, work.head, work.batch, sizes.blocks)
        rest = work.steps - 1 - step
        block = gl.load(List + 1 + rest // PARTS) * PARTS + rest % PARTS
    return block
