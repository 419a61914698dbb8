"""The work items of the Hopper backward, and their order.

A work item is a block of KEYS keys of one head, with all blocks of queries that see any of them: one step for each
block of queries. The kernel is persistent: one program for each SM takes one item after another, and the next item's
first tiles are prefetched while the warps finish the current one. With one program for each item, an item took 14 to
30 us at 512 to 2048 causal tokens, 5 of them before and after its steps (LOG.md).

Heads come in groups. Under the causal mask the heads before `tail_head` go upwards: later keys first, and each item
from the diagonal on. So no item waits for another's dQ (dq.py), and a group can be small enough for the L2 cache. All
others, and so the last group, go downwards, earlier keys first: the longest items come first, which keeps the GPU
busy to the end. By count (132 programs) all upwards took 1.05 of the mean, this order 1.02.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .block_masks import Blocks, count_visited, list_of
from .bounds import Bounds, end_rows, start_rows
from .padding import key_end, last_key_before
from .scheduler import broadcast, issue_claim

KEYS = gl.constexpr(128)
STAGES = gl.constexpr(2)  # tiles in shared memory of each of Q, dO, dS and dQ
HALF = gl.constexpr(64)  # keys of a consumer warpgroup: M of one wgmma
# Tile width -> its queries. A warpgroup's S and dP fill half of its registers, or a quarter; dK and dV the rest.
BLOCK_M = {64: 128, 128: 64}


class BackwardSizes(NamedTuple):
    """The problem sizes of a launch. The host passes derived values too: if the kernel computed them, ptxas would
    keep them in registers and spill them."""

    heads: gl.tensor
    flat_heads: gl.tensor  # batch * heads
    heads_per_group: gl.tensor  # heads in a scheduling group
    items_per_group: gl.tensor  # work items of a group
    q_len: gl.tensor
    kv_len: gl.tensor
    offset: gl.tensor  # kv_len - q_len
    row_blocks: gl.tensor
    key_blocks: gl.tensor
    tail_head: gl.tensor  # the heads before it go upwards; None if none does
    bounds: Bounds  # None without window and documents
    blocks: Blocks  # lists of blocks of queries; None without block mask
    Seed: gl.tensor  # of dropout, or None
    KvLengths: gl.tensor  # of key padding (padding.py), or None
    Slopes: gl.tensor  # of ALiBi, or None


class WorkItem(NamedTuple):
    """A work item: one block of keys of one head, and `steps` blocks of queries, from block `last_block` downwards
    or, if `upwards`, up to it (for lists see `block_at`).

    The masked steps, counted downwards (`passed`), are those before `masked_until` (ends of windows and documents)
    and those from `masked_from` on (the causal diagonal; in a partial block of keys, all).
    """

    batch: gl.tensor
    head: gl.tensor
    flat_head: gl.tensor  # batch * heads + head
    key_block: gl.tensor
    last_block: gl.tensor
    steps: gl.tensor
    masked_until: gl.tensor  # the steps before it have a row that no longer sees all of the keys
    masked_from: gl.tensor
    keys_left: gl.tensor  # from the first key of the block to the last key
    diagonal_row: gl.tensor  # first row that sees the first key, relative to the first row of `last_block`
    upwards: gl.tensor  # None if no head goes upwards


@gluon.jit
def decode_work_item(index, sizes, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """Decode the index-th work item. With bounds by query it may have no steps, and where all keys are padding a
    negative number: `claim_keys` skips both."""
    BY_QUERY: gl.constexpr = sizes.bounds is not None and sizes.bounds.keys is not None
    first_flat_head = index // sizes.items_per_group * sizes.heads_per_group
    index -= first_flat_head * sizes.key_blocks
    heads_per_group = gl.minimum(sizes.heads_per_group, sizes.flat_heads - first_flat_head)
    flat_head = first_flat_head + index % heads_per_group
    key_block = index // heads_per_group
    upwards: gl.constexpr = None
    if sizes.tail_head is not None:
        upwards = flat_head < sizes.tail_head
        key_block = gl.where(upwards, sizes.key_blocks - 1 - key_block, key_block)
    first_key = key_block * KEYS
    batch = flat_head // sizes.heads
    head = flat_head % sizes.heads
    steps = sizes.row_blocks
    masked_until = 0
    if sizes.bounds is not None:
        last_key = last_key_before(first_key + KEYS, batch, sizes)
        steps = gl.cdiv(end_rows(last_key, batch, sizes.bounds), BLOCK_M)
        masked_until = steps - end_rows(first_key, batch, sizes.bounds) // BLOCK_M
    last_block = steps - 1
    masked_from = steps
    diagonal_row = first_key - sizes.offset - last_block * BLOCK_M
    if sizes.blocks is not None:
        steps, masked_from = count_listed_steps(key_block, head, batch, sizes, BLOCK_M, CAUSAL)
        # The last diagonal step begins at the row of the first key, counting rows as if all steps were adjacent.
        diagonal_row = BLOCK_M - KEYS - masked_from * BLOCK_M
    elif BY_QUERY:
        steps -= start_rows(first_key, batch, sizes.bounds) // BLOCK_M
        masked_from -= gl.cdiv(start_rows(last_key, batch, sizes.bounds), BLOCK_M)
    elif CAUSAL:
        steps -= gl.maximum(first_key - sizes.offset, 0) // BLOCK_M
        masked_from -= gl.cdiv(gl.maximum(first_key + KEYS - 1 - sizes.offset, 0), BLOCK_M)
    end = key_end(batch, sizes)
    if first_key + KEYS > end:
        masked_from = 0
    return WorkItem(
        batch, head, flat_head, key_block, last_block, steps, masked_until, masked_from,
        end - first_key, diagonal_row, upwards,
    )  # fmt: skip


@gluon.jit
def claim_keys(pending, Counter, sizes, BLOCK_M: gl.constexpr):
    """The first claim from `pending` on whose block of keys is not all padding and (bounds by query) has a step."""
    BY_QUERY: gl.constexpr = sizes.bounds is not None and sizes.bounds.keys is not None
    index = broadcast(pending)
    looking = index < sizes.key_blocks * sizes.flat_heads
    while looking:
        item = decode_work_item(index, sizes, BLOCK_M if BY_QUERY else KEYS, False)
        looking = item.keys_left <= 0
        if BY_QUERY:
            looking |= item.steps == 0
        if looking:
            index = broadcast(issue_claim(Counter))
            looking = index < sizes.key_blocks * sizes.flat_heads
    return index


@gluon.jit
def count_listed_steps(key_block, head, batch, sizes, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """steps and masked_from of a work item under a block mask; a listed block of queries is KEYS // BLOCK_M steps."""
    STEPS_PER_BLOCK: gl.constexpr = KEYS // BLOCK_M
    List = list_of(key_block, head, batch, sizes.blocks)
    steps = count_visited(List) * STEPS_PER_BLOCK
    masked_from = steps
    if CAUSAL:  # the diagonal block, if listed, is visited last
        on_diagonal = gl.load(List + 1) * KEYS == key_block * KEYS - sizes.offset
        masked_from -= gl.where(on_diagonal, STEPS_PER_BLOCK, 0)
    return steps, masked_from


@gluon.jit
def block_at(item, step, sizes, BLOCK_M: gl.constexpr):
    """The block of queries of a step. A list may name a block beyond the end, which has no rows."""
    block = item.last_block - passed(item, step)
    if sizes.blocks is not None:
        STEPS_PER_BLOCK: gl.constexpr = KEYS // BLOCK_M
        List = list_of(item.key_block, item.head, item.batch, sizes.blocks)
        rest = item.steps - 1 - step
        block = gl.load(List + 1 + rest // STEPS_PER_BLOCK) * STEPS_PER_BLOCK + rest % STEPS_PER_BLOCK
    return block


@gluon.jit
def passed(item, step):
    """Blocks of queries from a step's block to `last_block`."""
    if item.upwards is not None:
        step = gl.where(item.upwards, item.steps - 1 - step, step)
    return step
