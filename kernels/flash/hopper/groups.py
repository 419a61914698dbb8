"""How many heads the Hopper kernels schedule together: in a group, whose tiles all come before those of the next.

Small groups find their tensors in the L2 cache. Large ones balance the load better, and in the backward keep the work
items of one head, which wait for one another's dQ, further apart in time. Each rule is what was timed (kernels/log/).

Group sizes do not change results. Which heads go "upwards" (backward_schedule.py) does: those sum dQ in another
order, so that depends on the shape alone, never on the device.
"""

import triton

from .spec import FEW

CACHED = 32 << 20  # bytes in the L2 cache for a group's tensors: K and V in the forward
# Least number of heads in a group of the forward with documents: 0.95 to 0.96 of the time of 4 (16k tokens at 128).
WITH_DOCUMENTS = 16
# The same of dQ above head_dim 128: 0.95 to 0.98 of the backward's time from 4096 tokens on, with 16 up to 1.00.
DQ_WITH_DOCUMENTS = 32
HEADS = 128  # with few tiles: fewer, in small groups, give the busiest program up to 1.33 as much, by count

KeyShape = tuple[int, ...]  # batch, key-value heads, keys, head_dim


def of_forward(
    k: KeyShape,
    group: int,
    programs: int,
    *,
    causal: bool,
    bounded: bool,
    documents: bool,
    dynamic: bool,
    few: bool,
) -> int:
    """Heads in a group of the forward.

    Dynamically scheduled tiles balance well with groups of any size, so the groups are those whose K and V fit the L2
    cache. Statically scheduled ones balance only in groups of half as many heads as there are programs: by count, the
    busiest of 132 programs then has 0 to 3 % more than the mean, but 6 to 20 % more in groups that fit the cache. If
    a head has few tiles, and there are `HEADS` or more, the smallest groups balance too, and read a head's keys
    together: 0.93 to 1.00 of the time.

    Args:
        group: query heads per key head.
        programs: at most, one for each SM.
        bounded: a window or documents are used. documents: documents are, or a window with key padding.
        dynamic, few: `DYNAMIC` and `has_few_tiles` of spec.py.
    """
    batch, kv_heads, _, head_dim = k
    heads = batch * kv_heads * group
    if not (causal or bounded):
        return 1
    if causal and few and head_dim > 128 and heads < HEADS:
        # By count, the busiest program has 1.00 to 1.13 of what claiming gives it; in two groups up to 1.5.
        return heads
    if bounded and not causal and not dynamic:
        return max(1, programs // 32)  # 4 of an H200's 132: full windows take 0.85 to 1.01 of the time of 66
    if few and heads >= HEADS:
        return 1 if head_dim > 64 else 2
    if not dynamic:
        return max(1, programs // 2)
    return _whose_keys_fit(k, group, CACHED, documents)


def _whose_keys_fit(k: KeyShape, group: int, cached: int, documents: bool = False) -> int:
    """Heads, in groups of about the same size, whose K and V fit into `cached` bytes.

    With documents the last tiles of a group are not those with the fewest keys, and where there are many a program
    claims them up to two ahead: in a last group of few heads, it has long tiles left when the others have none. (The
    last group may still have fewer than `WITH_DOCUMENTS`, where it does not divide.)
    """
    batch, kv_heads, kv_len, head_dim = k
    flat_heads = batch * kv_heads
    groups = triton.cdiv(flat_heads * 4 * kv_len * head_dim, cached)
    if documents:
        groups = min(groups, max(1, group * flat_heads // WITH_DOCUMENTS))
    return group * triton.cdiv(flat_heads, groups)


def of_backward(
    heads: int,
    q_len: int,
    kv_len: int,
    width: int,
    row_blocks: int,
    programs: int,
    *,
    causal: bool,
    bounded: bool,
    documents: bool,
    plain: bool,
) -> tuple[int, int | None]:
    """(heads in a group of the backward up to head_dim 128, the head before which all go upwards: see
    backward_schedule.py). 0: none does; None: a kernel that has no code for it.

    Three work items of a head are in flight under the causal mask, with a window or documents; else a quarter of its
    blocks of queries.

    Args:
        heads: query heads times batch.
        width: `tile_width` of the head_dim.
        programs: at most, one for each SM.
        documents: documents or key padding are used.
        plain: no window, documents, block mask, dropout or padding; there may be a softcap or ALiBi.
    """
    items = 3 if causal or bounded else max(3, row_blocks // 4)
    together = max(1, programs // items)
    long = q_len > 2048
    if bounded and width == 128 and (long or not (documents and causal)):
        # Fewer blocks of dQ's sum at a time. A quarter: windows of 1024 at 4096 tokens take 0.79 of the time of all.
        # Half: 0.96 at 1024 tokens, at 2048 as with a quarter; documents of 1024 in a long row 0.88, in rows of 2048
        # tokens 0.90 if full, but 1.02 under the causal mask, and 1.06 in rows of 1024 (kernels/log/hopper_masks.md).
        together = max(1, together // (4 if long and not documents else 2))
    if causal and plain:  # with dropout it would spill 8 to 12 B
        upwards, in_cache = _upwards(heads, q_len, width)
        return (in_cache if upwards else together), upwards
    if plain and width == 64 and q_len == kv_len <= FEW and _in_groups(heads, q_len, width) == 1:
        # Fewer programs wait for one another. 0.93 to 0.95 of the time at 16 x 8 heads of 256 and 512 queries, full;
        # fewer heads, other head_dims up to 64, grouped heads, softcap and ALiBi are included but were not timed.
        together = max(heads, together)
    return together, None


def _upwards(heads: int, q_len: int, width: int) -> tuple[int, int]:
    """(how many heads go upwards: those of all groups but the last, heads in a group).

    A group's Q, dO and sum of dQ fit the L2 cache. Heads that all fit are one group, and so none goes upwards. At
    width 128 upwards is 9 % slower at 512 and 2 % at 1024 tokens, and 4 to 23 % faster from 2048 on
    (kernels/log/hopper_backward.md).
    """
    if width == 128 and q_len < 2048:
        return 0, heads
    together = triton.cdiv(heads, _in_groups(heads, q_len, width))
    return (heads - 1) // together * together, together


def _in_groups(heads: int, q_len: int, width: int) -> int:
    """How many groups there are if each group's Q, dO and float32 sum of dQ fit the L2 cache."""
    return triton.cdiv(heads * 8 * q_len * width, CACHED)


def of_dkdv(heads: int, q_len: int, head_dim: int, full_window: bool) -> int:
    """Heads in a group for dK and dV above head_dim 128: those whose Q and dO fit the L2 cache. heads: times batch.
    full_window: a window that is not causal is the only mask."""
    return min(heads, max(1, _cached(q_len, full_window) // (4 * q_len * head_dim)))


def of_dq(
    k: KeyShape, group: int, q_len: int, *, causal: bool, bounded: bool, documents: bool, full_window: bool
) -> int:
    """Heads in a group for dQ above head_dim 128, whose programs take tiles of queries as the forward's do. Arguments
    are those of `of_forward` and `of_dkdv`."""
    batch, kv_heads, _, _ = k
    together = 1
    if causal or bounded:
        together = _whose_keys_fit(k, group, _cached(q_len, full_window))
    if documents:
        together = min(batch * kv_heads * group, max(together, DQ_WITH_DOCUMENTS))
    return together


def _cached(q_len: int, full_window: bool) -> int:
    """`CACHED`, or half of it with a full window and few queries: 0.97 to 0.99 of the time of 16k tokens in rows of
    1024, with 512 keys to each side, in all heads of 512 tiles 1.00 to 1.01, in rows of 4096 and 16,384 1.00."""
    return CACHED // 2 if full_window and q_len <= 1024 else CACHED
