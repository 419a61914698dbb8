"""Launches the Hopper kernels: which tensors they accept, and the arguments of each launch."""

import functools

import torch
import triton

from ...launch import Launch, launch, sm_count
from ..call import Options, Tensors
from ..dispatch import HOPPER_DTYPES
from ..masks import ANY, by_query, list_strides, queries_of_keys
from . import groups
from .backward import choose_columns, choose_dq_delay, choose_dq_delay_of_few, hopper_backward_kernel
from .backward_loads import TOGETHER
from .backward_schedule import BLOCK_M, KEYS
from .descriptors import Descriptor, fits_tma, rows_of, tile_width
from .dq import SUM_BLOCK, delta_kernel, round_kernel, sum_block
from .dropout import drop_of
from .forward import hopper_forward_kernel
from .forward_schedule import ROWS
from .padding import clear_kernel
from .primitives import OVERLAPPED, compile_options
from .spec import block_n, has_few_tiles, specify
from .split_tiles import box_width
from .wide_dkdv import KEYS as WIDE_KEYS
from .wide_dkdv import WIDTH, dkdv_kernel
from .wide_dq import dq_kernel

Tensor = torch.Tensor
Shape = tuple[int, ...]
# Warps of the passes before and after the backward, up to head_dim 128. With 4 the whole took 1.02 to 1.12 of the
# time at 16 x 8 heads of head_dim 64, full, and 128 to 512 tokens, and 1.00 to 1.01 at 16k tokens of head_dim 128.
BESIDE = {"num_warps": 8}
# Where the cost of tiles depends on data, and there are up to so many tiles of 128 queries a program, the forward
# claims late (scheduler.py): 0.89 to 1.00 of the time, with one tile a program 1.01 to 1.06. With 31 and more it
# takes up to 1.025, under the causal mask (kernels/log/hopper_masks.md).
LATE = 24
SHAPES = 4096  # whose check is cached: reading strides in Python takes 2 us per tensor


def fits_forward(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `forward` accepts these: head_dim a multiple of 8, 16 bits, not empty, addressable by TMA."""
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
    return (
        aligned
        and q.dtype in HOPPER_DTYPES
        and _fits_forward(q.shape, k.shape, q.stride(), k.stride(), v.stride())
    )


@functools.lru_cache(maxsize=SHAPES)
def _fits_forward(
    q_shape: Shape, kv_shape: Shape, q_strides: Shape, k_strides: Shape, v_strides: Shape
) -> bool:
    batch, heads, _, head_dim = q_shape
    fit = fits_tma(q_shape, q_strides) and fits_tma(kv_shape, k_strides) and fits_tma(kv_shape, v_strides)
    # If q has tokens outermost, so has out; offsets of 64 tokens, batch * heads * head_dim apart, must fit 32 bits.
    return fit and head_dim % 8 == 0 and batch * heads * head_dim < 2**25


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    out_low: Tensor,
    lse: Tensor,
    tensors: Tensors,
    options: Options,
) -> None:
    """Write softmax(q k^T * scale) v to out, and the log-sum-exp of the scaled scores to lse.

    Args:
        q: float16 or bfloat16 (batch, heads, q_len, head_dim).
        k, v: (batch, kv_heads, kv_len, head_dim) of its type; kv_heads divides heads. `fits_forward` accepts all.
        out: like q, 16-byte aligned, with strides that TMA takes.
        out_low: with precise_delta what rounding took from out, with out's strides; otherwise not written.
        lse: float32 (batch, heads, q_len), contiguous.
        tensors, options: what `dispatch.choose` lets through. A fully masked row gets out 0 and lse -inf.
    """
    # With cu_seqlens_k the bounds already hold the causal mask, if any, so it is not known. A window whose right side
    # is 0 is causal.
    full = not (options.causal or options.ragged or options.right == 0)
    tensors, options = by_query(tensors, options, q, k)
    causal, scale, left, key_blocks = options.causal, options.scale, options.left, tensors.key_blocks
    bounded, listed = left >= 0 or tensors.document_starts is not None, key_blocks is not None
    padded, drop = tensors.kv_lengths is not None, drop_of(options.dropout_p)
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
    features = (bounded, listed, padded, drop, options.softcap, options.precise_delta)
    window = left >= 0 and tensors.document_starts is None and not padded
    uneven = tensors.document_starts is not None or (bounded and padded)
    late = uneven and heads * batch * -(-q_len // (2 * ROWS.value)) <= LATE * sm_count(q.device)
    spec = specify(head_dim, causal, q_len, kv_len, heads // kv_heads, *features, full, window, late)

    def prepare() -> Launch:
        tiles = triton.cdiv(q_len, ROWS.value * spec.CONSUMERS.value) * heads * batch
        group, programs = heads // kv_heads, sm_count(q.device)
        together = groups.of_forward(
            k.shape,
            group,
            programs,
            causal=causal,
            bounded=bounded,
            documents=uneven,
            dynamic=spec.DYNAMIC.value,
            few=has_few_tiles(head_dim, q_len, group, *features),
        )
        sizes = (q_len, kv_len, heads, batch, together, tiles, *_sides(options, kv_len - q_len))
        numbers = (*out.stride()[:3], *sizes, *list_strides(key_blocks), scale, spec)
        grid = (min(tiles, programs), 1, 1)
        return hopper_forward_kernel, grid, numbers, compile_options(tile_width(head_dim))

    strides = out.stride(), list_strides(key_blocks)
    of_call = (causal, full, scale, left, options.right, options.dropout_p, options.softcap)
    key = ("hopper forward", q.dtype, q.shape, k.shape, *strides, *of_call)
    seed = tensors.seed if drop else None
    # Allocated in every call: a cached one would live in the memory pool of the CUDA graph being warmed up when it
    # was made, and torch.compile's mode "reduce-overhead" rejects live tensors in that pool.
    counter = q.new_zeros(1, dtype=torch.int32) if spec.DYNAMIC.value else None
    low = out_low if options.precise_delta else None
    of_heads = (tensors.sinks, tensors.alibi_slopes)
    ends = tensors.document_ends if options.ragged else None
    of_features = (tensors.document_starts, ends, key_blocks, tensors.kv_lengths, seed, *of_heads)
    pointers = (lse, low, counter, *of_features)
    if spec.OUT_BY_TMA.value:
        launch(pointers, key, prepare, (q, k, v, out), _describe_forward)
    else:
        launch((out, *pointers), key, prepare, (q, k, v), _describe_forward)


def _is_full_window(tensors: Tensors, options: Options) -> bool:
    """Whether a window that is not causal is the only mask (call it after `by_query`). A window with key padding gets
    the choices of documents in the backward: those of a window alone were not timed there."""
    return options.left >= 0 and not options.causal and tensors.kv_lengths is None


def _sides(options: Options, apart: int) -> tuple[int, int | None]:
    """A window's sides as the kernels take them: `left` and `right` of bounds.py. apart: kv_len - q_len."""
    if options.left < 0:
        return ANY, None
    return options.left - apart, None if options.causal else options.right + apart


def _describe_forward(q: Tensor, k: Tensor, v: Tensor, *out: Tensor) -> tuple[Descriptor, ...]:
    rows, keys, columns = ROWS.value, block_n(q.shape[3]), box_width(q.shape[3])
    inputs = rows_of(q, rows, columns), rows_of(k, keys, columns), rows_of(v, keys, columns)
    return *inputs, *(rows_of(x, rows) for x in out)


def fits_backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor) -> bool:
    """Whether `backward` accepts these: `fits_forward` does, and d_out fits TMA too."""
    return (
        fits_forward(q, k, v)
        and d_out.data_ptr() % 16 == 0
        and _fits_backward(q.shape, out.stride(), d_out.stride())
    )


@functools.lru_cache(maxsize=SHAPES)
def _fits_backward(q_shape: Shape, out_strides: Shape, d_out_strides: Shape) -> bool:
    batch, heads, q_len, head_dim = q_shape
    row_blocks = triton.cdiv(q_len, BLOCK_M.get(tile_width(head_dim), ROWS.value))  # an axis of a grid
    rows = batch * heads * (q_len + 128)  # int32 row index of lse and delta; dQ's sum has fewer
    return fits_tma(q_shape, d_out_strides) and out_strides[3] == 1 and row_blocks <= 65535 and rows < 2**31


def backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    out_low: Tensor | None,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    delta: Tensor,
    tensors: Tensors,
    options: Options,
) -> None:
    """Write the gradients of attention to dq, dk, dv, and delta, for inputs that `fits_backward` accepts.

    Workspace, freed on return: up to head_dim 128, 4 * `tile_width` bytes per query and head for the float32 sum of
    dQ; with grouped heads, 4 * head_dim per key and query head, for dk and dv before they are summed over a group.

    Args:
        d_out, out, q, dq: (batch, heads, q_len, head_dim). k, v, dk, dv: (batch, kv_heads, kv_len, head_dim).
        d_lse: as lse, or None. out_low: as `forward` writes it, needed with precise_delta.
        lse: float32 (batch, heads, q_len), contiguous: natural log-sum-exp of the scaled scores, -inf if fully
            masked.
        dq, dk, dv: any strides that TMA takes. delta: like lse.
        tensors, options: as for `forward`.
    """
    is_wide = tile_width(q.shape[3]) == WIDTH.value
    keys = WIDE_KEYS.value if is_wide else KEYS.value
    unseen = 0  # how many keys, from the first on, no query sees
    if options.left >= 0 and tensors.kv_lengths is None:  # else `clear_kernel` clears them, or `dkdv_kernel`
        unseen = max(k.shape[2] - q.shape[2] - options.left, 0) // keys * keys
    zeros: tuple[Tensor | None, Tensor | None] = None, None
    if unseen:  # by the window, in whole blocks
        if _clears_unseen(q, dk, dv):
            zeros = dk, dv
        else:
            for x in (dk, dv):
                x[:, :, :unseen].zero_()
        k, v, dk, dv = (x[:, :, unseen:] for x in (k, v, dk, dv))
    low = out_low if options.precise_delta else None
    tensors, options = by_query(tensors, options, q, k)
    if is_wide:
        return _backward_wide(d_out, d_lse, out, low, lse, q, k, v, dq, dk, dv, delta, tensors, options)
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
    block_m = BLOCK_M[tile_width(head_dim)]
    blocks = batch * heads * -(-q_len // block_m)  # not triton.cdiv, a wrapper that costs 2 us
    rows, columns = SUM_BLOCK.value
    dq_sum = q.new_empty(2 * rows * blocks, columns, dtype=torch.float32)  # two halves per block of queries
    turns = q.new_empty(blocks + 1, dtype=torch.int32)
    starts, ends, key_end, row_start = _bounds(tensors, options, kv_len)
    lengths, key_blocks = tensors.kv_lengths, tensors.key_blocks
    left, right = _sides(options, kv_len - q_len)
    beside: tuple[Tensor | None, int | None] = None, None  # (kv_lengths, left) of a window with key padding
    if right is not None and lengths is not None:
        beside = lengths, left
    lists = list_strides(key_blocks), list_strides(tensors.query_blocks)
    numbers = (options.causal, options.scale, options.left, options.right, options.dropout_p, options.softcap)
    key = (q.shape, kv_heads, kv_len, *numbers, *lists)
    of_delta = (out, low, d_out, None if d_lse is None else lse, d_lse, delta)
    launch(
        (*of_delta, turns, starts, beside[0]),
        ("delta", *key, out.stride(), d_out.stride()),
        lambda: _prepare_delta(out, d_out, left, block_m, KEYS.value, bool(OVERLAPPED)),
    )
    of_heads = _of_every_head(q, dk, dv)
    bounds = (starts, ends, row_start)
    of_features = (tensors.query_blocks, tensors.seed, lengths, tensors.alibi_slopes)
    launch(
        (lse, delta, turns, *bounds, *of_features, *zeros),
        ("hopper backward", q.dtype, unseen, *key),
        lambda: _prepare_backward(q, k, tensors, options, zeros[0], unseen),
        (q, k, v, d_out, *of_heads, dq_sum),
        functools.partial(_describe_backward, options.dropout_p),
    )
    if lengths is not None or row_start is not None:
        strides, row_end = [x.stride() for x in of_heads], None if row_start is None else ends
        pointers = (*of_heads, lengths, row_start, row_end)
        launch(pointers, ("clear", *key, *strides), lambda: _prepare_clear(*of_heads, beside[1], block_m))
    of_rows = (lengths, None, None) if key_end is None else (None, starts, key_end)
    launch(
        (dq_sum, dq, key_blocks, *of_rows),
        ("round", *key, dq.stride()),
        lambda: _prepare_round(dq, kv_len, key_blocks, options, beside[1]),
    )
    _add_up_groups((dk, dv), of_heads)


def _clears_unseen(q: Tensor, dk: Tensor, dv: Tensor) -> bool:
    """Whether the main kernel sets dk and dv of unseen keys to 0, while it computes; else two launches do.

    With a window of 1024 over twice as many keys the backward then takes 0.925 of its time at 4096 queries, 0.95 at
    16,384 (kernels/log/hopper_masks.md). At head_dim 64 it would spill 8 B; of grouped heads it has no dk and dv.
    """
    return q.shape[3] == 128 and q.shape[1] == dk.shape[1] and dk.stride() == dv.stride()


def _prepare_delta(
    out: Tensor, d_out: Tensor, left: int, block_m: int, keys: int, overlapped: bool
) -> Launch:
    batch, heads, q_len, head_dim = out.shape
    strides = (*out.stride()[:3], *d_out.stride()[:3])
    tile = (block_m, head_dim, tile_width(head_dim), keys)
    grid = (heads, triton.cdiv(q_len, block_m), batch)
    # In float16 ptxas would give 8 warps 80 registers, and spill 64 B.
    compiled = BESIDE if tile_width(head_dim) < WIDTH.value and out.dtype is torch.bfloat16 else {}
    return delta_kernel, grid, (*strides, q_len, left, *tile, overlapped), compiled


def _prepare_backward(
    q: Tensor, k: Tensor, tensors: Tensors, options: Options, cleared: Tensor | None = None, unseen: int = 0
) -> Launch:
    """The launch of the main kernel up to head_dim 128. cleared: dk with its unseen keys, if `_clears_unseen`."""
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
    causal, width = options.causal, tile_width(head_dim)
    bounded, listed = options.left >= 0 or tensors.document_starts is not None, tensors.key_blocks is not None
    drop, padded = drop_of(options.dropout_p), tensors.kv_lengths is not None
    flat_heads, row_blocks = batch * heads, triton.cdiv(q_len, BLOCK_M[width])
    columns = triton.cdiv(kv_len, KEYS.value)
    programs = sm_count(q.device)
    heads_per_group, tail_head = groups.of_backward(
        flat_heads,
        q_len,
        kv_len,
        width,
        row_blocks,
        programs,
        causal=causal,
        bounded=bounded,
        documents=tensors.document_starts is not None or padded,
        plain=not (bounded or listed or drop or padded),
    )
    sizes = (
        *(heads, flat_heads, heads_per_group, heads_per_group * columns),
        *(q_len, kv_len, kv_len - q_len, row_blocks, columns, tail_head),
        *(*_sides(options, kv_len - q_len), *list_strides(tensors.query_blocks)),
        *_zeros(cleared, unseen, columns),
    )
    masked = causal or bounded or kv_len % KEYS.value != 0 or padded
    multiplied = choose_columns(head_dim, options.dropout_p)
    if bounded or listed:
        dq_delay = choose_dq_delay_of_few(multiplied, _is_full_window(tensors, options))
    else:
        dq_delay = choose_dq_delay(width, causal, row_blocks, padded, options.softcap > 0)
    spec = (heads // kv_heads, causal, masked, dq_delay, bounded, listed, drop, options.softcap, multiplied)
    programs = min(flat_heads * columns, programs)
    compiled = compile_options(width, dq_delay) | OVERLAPPED
    return hopper_backward_kernel, (programs, 1, 1), (*sizes, options.scale, *spec), compiled


def _zeros(cleared: Tensor | None, unseen: int, key_blocks: int) -> tuple[int | None, ...]:
    """The numbers of `Zeros`: each work item of a head clears an equal share of the head's unseen keys."""
    if cleared is None:
        return 5 * (None,)
    share = triton.cdiv(unseen, key_blocks * TOGETHER.value) * TOGETHER.value
    return share, unseen, *cleared.stride()[:3]


def _prepare_clear(dk: Tensor, dv: Tensor, left: int | None, block_m: int) -> Launch:
    batch, heads, kv_len, head_dim = dk.shape
    grid = (triton.cdiv(kv_len, KEYS.value), heads, batch)
    tile = (KEYS.value, block_m, head_dim, tile_width(head_dim))
    numbers = (*dk.stride()[:3], *dv.stride()[:3], kv_len, left, *tile)
    return clear_kernel, grid, numbers, {}


def _prepare_round(
    dq: Tensor, kv_len: int, key_blocks: Tensor | None, options: Options, left: int | None = None
) -> Launch:
    batch, heads, q_len, head_dim = dq.shape
    width, drop = tile_width(head_dim), drop_of(options.dropout_p)
    masked_rows = max(q_len - kv_len, 0) if options.causal else 0
    whole = options.scale * (drop.SCALE.value if drop else 1.0)
    numbers = (*dq.stride()[:3], q_len, masked_rows, left, *list_strides(key_blocks), whole)
    tile = (BLOCK_M[width], head_dim, width, KEYS.value)
    grid = (heads, triton.cdiv(q_len, BLOCK_M[width]), batch)
    return round_kernel, grid, (*numbers, *tile, bool(OVERLAPPED)), OVERLAPPED | BESIDE


def _backward_wide(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    out_low: Tensor | None,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    delta: Tensor,
    tensors: Tensors,
    options: Options,
) -> None:
    """`backward` above head_dim 128, by wide_dkdv.py and wide_dq.py. No workspace but that of grouped heads."""
    causal, scale, softcap, device = options.causal, options.scale, options.softcap, q.device
    (batch, heads, q_len, head_dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
    rows, keys = ROWS.value, WIDE_KEYS.value
    starts, ends, key_end, row_start = _bounds(tensors, options, kv_len)
    lengths, slopes = tensors.kv_lengths, tensors.alibi_slopes
    drop = drop_of(options.dropout_p)
    seed = tensors.seed if drop else None
    bounded = options.left >= 0 or starts is not None
    sides = _sides(options, kv_len - q_len) if bounded else (None, None)

    def prepare_delta() -> Launch:  # the next kernel waits for the end of this one
        return _prepare_delta(out, d_out, 0, rows, keys, overlapped=False)

    def prepare_dkdv() -> Launch:
        row_blocks, key_blocks = triton.cdiv(q_len, rows), triton.cdiv(kv_len, keys)
        together = groups.of_dkdv(batch * heads, q_len, head_dim, _is_full_window(tensors, options))
        sizes = (heads, batch * heads, together, q_len, kv_len, row_blocks, key_blocks)
        strides = (*of_heads[0].stride()[:3], *of_heads[1].stride()[:3])
        numbers = (*strides, *sizes, *sides, scale, heads // kv_heads, head_dim, causal, drop, softcap)
        programs = min(batch * heads * key_blocks, sm_count(device))
        return dkdv_kernel, (programs, 1, 1), numbers, compile_options(WIDTH.value)

    def prepare_dq() -> Launch:
        spec = specify(
            head_dim, causal, q_len, kv_len, heads // kv_heads, bounded, drop=drop, softcap=softcap
        )
        tiles = triton.cdiv(q_len, 2 * rows) * heads * batch
        together = groups.of_dq(
            k.shape,
            heads // kv_heads,
            q_len,
            causal=causal,
            bounded=bounded,
            documents=starts is not None or (bounded and lengths is not None),
            full_window=_is_full_window(tensors, options),
        )
        numbers = (*dq.stride()[:3], q_len, kv_len, heads, batch, together, tiles, *sides, scale, spec)
        return dq_kernel, (min(tiles, sm_count(device)), 1, 1), numbers, compile_options(WIDTH.value)

    of_call = (causal, scale, options.left, options.right, options.dropout_p, softcap)
    key = (q.shape, kv_heads, kv_len, *of_call)
    of_delta = (out, out_low, d_out, None if d_lse is None else lse, d_lse, delta, None, None, None)
    launch(of_delta, ("wide delta", *key, out.stride(), d_out.stride()), prepare_delta)
    for_dkdv, for_dq = q.new_zeros(2, 4, dtype=torch.int32)  # counters of work items, 16 bytes apart
    of_heads, moved = _of_every_head(q, dk, dv), (q, k, v, d_out)
    pointers = (*of_heads, lse, delta, for_dkdv, ends, row_start, seed, lengths, slopes)
    launch(pointers, ("dk dv", *key, *[x.stride() for x in of_heads]), prepare_dkdv, moved, _describe_wide)
    of_dq = (dq, lse, delta, for_dq, starts, key_end, seed, lengths, slopes)
    launch(of_dq, ("dq", *key, dq.stride()), prepare_dq, moved, _describe_wide)
    _add_up_groups((dk, dv), of_heads)


def _describe_wide(*moved: Tensor) -> tuple[Descriptor, ...]:
    columns = box_width(moved[0].shape[3])
    return tuple(rows_of(x, ROWS.value, columns) for x in moved)  # WIDE_KEYS is the same number as ROWS


def _bounds(
    tensors: Tensors, options: Options, kv_len: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The backward's DocumentStart, DocumentEnd and, with bounds by query, KeyEnd and RowStart (bounds.py)."""
    if not options.ragged:
        return tensors.document_starts, tensors.document_ends, None, None
    of_keys = queries_of_keys(tensors, kv_len)
    return tensors.document_starts, of_keys.document_ends, tensors.document_ends, of_keys.document_starts


def _of_every_head(q: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel writes dK and dV to: dk and dv, or with grouped heads new tensors with every query head."""
    if q.shape[1] == dk.shape[1]:
        return dk, dv
    shape = (*q.shape[:2], *dk.shape[2:])
    return q.new_empty(shape), q.new_empty(shape)


def _add_up_groups(totals: tuple[Tensor, Tensor], of_heads: tuple[Tensor, Tensor]) -> None:
    """With grouped heads, sum what `_of_every_head` made over the query heads of each key head, into dk and dv."""
    for total, each in zip(totals, of_heads, strict=True):
        if total is not each:
            batch, kv_heads, kv_len, head_dim = total.shape
            torch.sum(each.view(batch, kv_heads, -1, kv_len, head_dim), 2, out=total)


def _describe_backward(
    dropout_p: float, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, dk: Tensor, dv: Tensor, dq_sum: Tensor
) -> tuple[Descriptor, ...]:
    block_m, columns = BLOCK_M[tile_width(q.shape[3])], choose_columns(q.shape[3], dropout_p)
    return (
        rows_of(q, block_m), rows_of(k, KEYS.value), rows_of(v, KEYS.value), rows_of(d_out, block_m),
        rows_of(dk, KEYS.value), rows_of(dv, KEYS.value), Descriptor(dq_sum, sum_block(columns)),
    )  # fmt: skip
