"""Converts packed documents and block masks into the tensors that the attention kernels read, by a small kernel each.

The conversion runs in every call, although the layers of a model pass the same tensors. Caching would be wrong when a
CUDA graph's replay writes to such a tensor, which Python cannot detect. Under torch.compile it runs once.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..operators import operator
from .call import Options, Tensors
from .portable.masks import BLOCK_MASK_SIZE

TOKENS = 256  # per program
CHUNK = 128  # of blocks, read at a time
OFFSETS = tl.constexpr(1024)  # that are read at a time
ANY = 1 << 30  # side of a window without a limit, where a kernel takes no -1
Tensor = torch.Tensor


def document_bounds(cu_seqlens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Begin and end (exclusive) of each token's document, relative to its row: two int32 (batch, length).

    cu_seqlens: int32 (documents + 1,), offsets into the batch * length tokens. Tokens before the first and after the
    last offset form documents too. Offsets that do not ascend give wrong documents, but never overlapping ones, so no
    input can cause an out-of-range access or a kernel that waits forever.
    """
    starts, ends = _document_bounds_like(cu_seqlens, batch, length)
    if starts.numel():
        bounds = cu_seqlens.shape[0]
        grid = (-(-length // TOKENS), batch, 1)  # not triton.cdiv: 2 us
        numbers = (bounds, length, TOKENS)
        pointers = (cu_seqlens.contiguous(), starts, ends)
        launch(pointers, ("documents", grid, numbers), lambda: (documents_kernel, grid, numbers, {}))
    return starts, ends


def keys_of_queries(
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    used: Tensor | None,
    batch: int,
    q_len: int,
    kv_len: int,
    causal: bool,
    left: int,
    right: int,
    covering: bool,
) -> tuple[Tensor, Tensor]:
    """With cu_seqlens_k: the keys [start, end) that each query sees, relative to its row: two int32 (batch, q_len).

    They include causal mask and window. Both ascend, whatever the offsets, and so do those of the queries that see
    each key. So the forward and dQ may take them for bounds of documents, and dK/dV those of `queries_of_keys`.

    cu_seqlens, cu_seqlens_k: (documents + 1,), offsets into the batch * q_len queries and the batch * kv_len keys.
    used: (documents,), how many keys of each are in use, from its first; None for all.
    covering: queries before the first and after the last offset form documents, too, with the keys there; else they
    see none.
    """
    starts, ends = _keys_of_queries_like(cu_seqlens, cu_seqlens_k, used, batch, q_len)
    if starts.numel():
        left, right = (ANY if each < 0 else min(each, ANY) for each in (left, 0 if causal else right))
        grid = (-(-q_len // TOKENS), batch, 1)
        numbers = (cu_seqlens.shape[0], q_len, kv_len, left, right, covering, TOKENS)
        used = None if used is None else used.contiguous()
        pointers = (cu_seqlens.contiguous(), cu_seqlens_k.contiguous(), used, starts, ends)
        launch(pointers, ("keys", grid, numbers), lambda: (keys_of_queries_kernel, grid, numbers, {}))
    return starts, ends


def queries_of_keys(tensors: Tensors, kv_len: int) -> Tensors:
    """The reverse of `keys_of_queries`, for dK and dV: a copy of the tensors whose document_starts and _ends are the
    queries [start, end) that see each key, int32 (batch, kv_len)."""
    starts, ends = tensors.document_starts, tensors.document_ends
    assert starts is not None
    assert ends is not None
    batch, q_len = starts.shape
    over, begun = (starts.new_empty(batch, kv_len) for _ in range(2))
    if over.numel():
        grid, numbers = (-(-kv_len // TOKENS), batch, 1), (q_len, kv_len, TOKENS)
        pointers = (starts, ends, over, begun)
        launch(pointers, ("queries", grid, numbers), lambda: (queries_of_keys_kernel, grid, numbers, {}))
    return tensors._replace(document_starts=over, document_ends=begun)


def by_query(tensors: Tensors, options: Options, q: Tensor, k: Tensor) -> tuple[Tensors, Options]:
    """For the Hopper kernels: turns documents and windows that are not causal, or have key padding, into bounds by
    query: the keys [start, end) that each query sees, which include window, padding and causal mask. All else stays
    as it is. Bounds of `keys_of_queries` are by query already; padding is added to them.

    A window without documents keeps its sides, from which the kernels compute the same bounds; unless there are fewer
    keys than queries, of which some may lie before the first key.

    No query sees beyond the keys, and bounds ascend whatever the offsets: the Hopper kernels synchronise by them."""
    starts, ends, lengths = tensors.document_starts, tensors.document_ends, tensors.kv_lengths
    left, right = options.left, 0 if options.causal else options.right
    bounded = starts is not None or left >= 0 or (right >= 0 and not options.causal)
    if not bounded or (options.causal and lengths is None):
        return tensors, options
    batch, q_len, kv_len = q.shape[0], q.shape[2], k.shape[2]
    narrower = lengths is not None or left >= 0 or right >= 0  # a query sees less than its document
    left, right = (ANY if each < 0 else min(each, ANY) for each in (left, right))
    if starts is None and q_len <= kv_len:
        return tensors, options._replace(causal=False, left=left, right=right)
    if narrower:
        first, last = (q.new_empty(batch, q_len, dtype=torch.int32) for _ in range(2))
        grid, numbers = (-(-q_len // TOKENS), batch, 1), (q_len, kv_len, left, right, TOKENS)
        launch(
            (first, last, starts, ends, lengths),
            ("by query", grid, numbers),
            lambda: (by_query_kernel, grid, numbers, {}),
        )
        tensors = tensors._replace(document_starts=first, document_ends=last)
    return tensors, options._replace(causal=False, left=-1, right=-1, ragged=True)


def block_lists(
    mask: Tensor, q_len: int, kv_len: int, causal: bool, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """A block mask as lists, without the blocks that the causal mask or the window hides.

    mask: bool (batch or 1, heads or 1, query blocks, key blocks), blocks of 128 x 128.

    Returns:
        int32 (batch or 1, heads or 1, query blocks, 1 + key blocks): for each query block the number of key blocks to
        visit, then their indices, ascending. An empty list names one block beyond the end.
        int32 (batch or 1, heads or 1, key blocks, 1 + 2 * query blocks): the same with queries and keys exchanged,
        then for each visited query block the position of this key block in that query block's list.
    """
    of_queries, of_keys = results = _block_lists_like(mask)
    batch, heads, q_blocks, k_blocks = mask.shape
    left = left if 0 <= left < kv_len else ANY
    right = 0 if causal else right if 0 <= right < q_len else ANY
    if mask.numel():
        grid = (q_blocks + k_blocks, heads, batch)
        numbers = (*mask.stride(), q_blocks, k_blocks, kv_len - q_len, left, right, CHUNK)
        pointers = (mask.view(torch.uint8), of_queries, of_keys)
        launch(pointers, ("blocks", grid, numbers), lambda: (block_lists_kernel, grid, numbers, {}))
    return results


def list_strides(lists: Tensor | None) -> tuple[int, int, int]:
    """Strides of block lists by batch, head and list; 0 for a shared batch or head, and all 0 for None."""
    if lists is None:
        return 0, 0, 0
    batch, head = (0 if lists.shape[dim] == 1 else lists.stride(dim) for dim in (0, 1))
    return batch, head, lists.shape[3]


def _document_bounds_like(cu_seqlens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    return cu_seqlens.new_empty(batch, length), cu_seqlens.new_empty(batch, length)


def _keys_of_queries_like(
    cu_seqlens: Tensor, cu_seqlens_k: Tensor, used: Tensor | None, batch: int, q_len: int, *rest: object
) -> tuple[Tensor, Tensor]:
    starts = cu_seqlens.new_empty(batch, q_len, dtype=torch.int32)
    return starts, torch.empty_like(starts)


def _block_lists_like(mask: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    batch, heads, q_blocks, k_blocks = mask.shape
    return (
        mask.new_zeros(batch, heads, q_blocks, 1 + k_blocks, dtype=torch.int32),
        mask.new_zeros(batch, heads, k_blocks, 1 + 2 * q_blocks, dtype=torch.int32),
    )


document_bounds = operator(document_bounds, _document_bounds_like)
keys_of_queries = operator(keys_of_queries, _keys_of_queries_like)
block_lists = operator(block_lists, _block_lists_like)


@triton.jit(do_not_specialize=["bounds", "length"])
def documents_kernel(Bounds, Starts, Ends, bounds, length, TOKENS: tl.constexpr):
    """Write Starts and Ends of `document_bounds`. Grid (ceil(length / TOKENS), batch).

    The document index never decreases from one token to the next, even if the offsets do not ascend: where the
    bisections of two tokens diverge, the later token takes the upper half. So a document is a run of tokens with one
    index. A run whose ends contradict the offsets is split into documents of one token, because the Hopper kernels
    synchronise by these bounds and would deadlock on inconsistent ones.
    """
    row_start = tl.program_id(1) * length
    row_end = row_start + length
    tokens = row_start + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    document = document_of(Bounds, bounds, tokens)
    start = tl.load(Bounds + document, mask=document >= 0, other=row_start)
    end = tl.load(Bounds + document + 1, mask=document + 1 < bounds, other=row_end)
    start, end = tl.maximum(start, row_start), tl.minimum(end, row_end)
    # The tokens on both sides of both ends, in one bisection, since it is bound by memory latency.
    place = tl.arange(0, 4)[:, None]
    around = tl.where(place < 2, start[None, :], end[None, :]) - tl.where(place % 2 == 0, 1, 0)
    found = document_of(Bounds, bounds, around) - document[None, :]
    agrees = tl.where(place == 0, (found < 0) | (start == row_start)[None, :], found == 0)
    agrees = tl.where(place == 3, (found > 0) | (end == row_end)[None, :], agrees)
    whole = (tl.min(agrees.to(tl.int32), 0) > 0) & (start <= tokens) & (tokens < end)
    mask = tokens < row_end
    tl.store(Starts + tokens, tl.where(whole, start, tokens) - row_start, mask=mask)
    tl.store(Ends + tokens, tl.where(whole, end, tokens + 1) - row_start, mask=mask)


@triton.jit
def document_of(Bounds, bounds, tokens):
    """Index of the last offset <= each token, by bisection; -1 if there is none."""
    low = tokens * 0 - 1
    high = low + bounds + 1
    span = bounds + 1
    while span > 1:
        middle = (low + high) // 2
        inside = (middle > low) & (middle < high)
        begun = inside & (tl.load(Bounds + middle, mask=inside, other=0) <= tokens)
        low = tl.where(begun, middle, low)
        high = tl.where(inside & (begun == 0), middle, high)
        span = (span + 1) // 2
    return low


@triton.jit(do_not_specialize=["bounds", "q_len", "kv_len", "left", "right"])
def keys_of_queries_kernel(
    OfQueries, OfKeys, Used, Starts, Ends, bounds, q_len, kv_len, left, right,
    COVERING: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write Starts and Ends of `keys_of_queries`. Grid (ceil(q_len / TOKENS), batch)."""
    row, rows = tl.program_id(1), tl.num_programs(1)
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    document = document_of(OfQueries, bounds, row * q_len + index)
    begun, over = document >= 0, document + 1 >= bounds
    keys = rows * kv_len
    start, end = largest_offsets(OfKeys, bounds, document)
    if COVERING:
        start, end = tl.where(begun, start, 0), tl.where(over, keys, end)
    # Among the keys, before anything is added to them: sums of any offsets might overflow, and no longer ascend.
    start = tl.minimum(tl.maximum(start, 0), keys).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), keys).to(tl.int32)
    if Used is not None:
        number = tl.load(Used + document, mask=begun & (over == 0), other=keys)
        end = start + tl.minimum(tl.maximum(number, 0), end - start).to(tl.int32)
    # Only the keys in this row, relative to its first.
    start = tl.minimum(tl.maximum(start - row * kv_len, 0), kv_len)
    end = tl.minimum(tl.maximum(end - row * kv_len, 0), kv_len)
    queries = tl.load(OfQueries + document + 1, mask=over == 0, other=rows * q_len)
    queries = tl.minimum(queries, rows * q_len).to(tl.int32)
    last_query = tl.minimum(queries - row * q_len, q_len) - 1
    position = end - 1 - last_query + index  # of the query, among the keys
    # Empty ranges lie within the document, too: both bounds must ascend.
    first = tl.minimum(tl.maximum(start, position - left), end)
    last = tl.maximum(tl.minimum(end, position + 1 + right), first)
    tl.store(Starts + row * q_len + index, first, mask=index < q_len)
    tl.store(Ends + row * q_len + index, last, mask=index < q_len)


@triton.jit
def largest_offsets(Offsets, bounds, documents):
    """For each document the largest offset up to its begin, and up to its end: the offsets themselves where they
    ascend, else their running maximum. documents: indices, -1 for the first offset as both, bounds - 1 for the last.

    A `cummax` before this kernel is another launch: 1.004 to 1.03 of a call's forward (kernels/log/hopper_masks.md).
    """
    last = tl.minimum(tl.max(documents) + 1, bounds - 1)
    ascend = 1
    for begin in range(0, last, OFFSETS):
        places = begin + tl.arange(0, OFFSETS)
        offset = tl.load(Offsets + places, mask=places < last, other=0)
        following = tl.load(Offsets + places + 1, mask=places < last, other=0)
        ascend = tl.minimum(ascend, tl.min((offset <= following).to(tl.int32)))
    if ascend == 1:
        start = tl.load(Offsets + tl.maximum(documents, 0))
        end = tl.load(Offsets + tl.minimum(documents + 1, bounds - 1))
    else:
        start = tl.load(Offsets + documents * 0)
        end = start
        for place in range(last + 1):
            offset = tl.load(Offsets + place)
            start = tl.where(place <= documents, tl.maximum(start, offset), start)
            end = tl.where(place <= documents + 1, tl.maximum(end, offset), end)
    return start, end


@triton.jit(do_not_specialize=["q_len", "kv_len"])
def queries_of_keys_kernel(Starts, Ends, Over, Begun, q_len, kv_len, TOKENS: tl.constexpr):
    """Write the bounds of `queries_of_keys`. Grid (ceil(kv_len / TOKENS), batch)."""
    row = tl.program_id(1)
    key = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    over = document_of(Ends + row * q_len, q_len, key) + 1  # queries whose keys end up to here
    begun = document_of(Starts + row * q_len, q_len, key) + 1
    tl.store(Over + row * kv_len + key, over, mask=key < kv_len)
    tl.store(Begun + row * kv_len + key, begun, mask=key < kv_len)


@triton.jit(do_not_specialize=["q_len", "kv_len", "left", "right"])
def by_query_kernel(
    First, Last, Starts, Ends, Lengths, q_len, kv_len, left, right, TOKENS: tl.constexpr
):  # fmt: skip
    """Write the bounds of `by_query` to First and Last. Grid (ceil(q_len / TOKENS), batch). Starts, Ends: of
    documents, None without. Lengths: as kv_lengths, None without."""
    row = tl.program_id(1)
    query = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside, place = query < q_len, row * q_len + query
    if Starts is None:
        position = query + (kv_len - q_len)
        start, end = tl.zeros_like(query), tl.zeros_like(query) + kv_len
    else:
        position = query
        start = tl.load(Starts + place, mask=inside, other=0)
        end = tl.load(Ends + place, mask=inside, other=0)
    most = kv_len
    if Lengths is not None:
        most = tl.maximum(tl.minimum(tl.load(Lengths + row), kv_len), 0)
    start, end = tl.maximum(start, position - left), tl.minimum(end, position + 1 + right)
    start, end = tl.minimum(start, most), tl.minimum(end, most)
    tl.store(First + place, start, mask=inside)
    tl.store(Last + place, tl.maximum(end, start), mask=inside)


@triton.jit(do_not_specialize=["q_blocks", "k_blocks", "offset", "left", "right"])
def block_lists_kernel(
    Mask,
    OfQueries,
    OfKeys,
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    q_blocks,
    k_blocks,
    offset,
    left,
    right,
    CHUNK: tl.constexpr,
):
    """Write the lists of `block_lists`. Grid (q_blocks + k_blocks, heads, batch): one list per program. offset:
    kv_len - q_len."""
    index, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    Mask += batch * stride_b + head * stride_h
    pair = batch * tl.num_programs(1) + head
    of_keys = 1 + 2 * q_blocks.to(tl.int64)  # entries in a list
    OfKeys += pair * k_blocks * of_keys
    if index < q_blocks:
        List = OfQueries + (pair * q_blocks + index) * (1 + k_blocks)
        Mask += index.to(tl.int64) * stride_q
        position = index * BLOCK_MASK_SIZE + offset
        Places = OfKeys + 1 + q_blocks + index
        write_list(Mask, List, Places, of_keys, stride_k, k_blocks, position, left, right, CHUNK)
    else:
        index -= q_blocks
        Mask += index.to(tl.int64) * stride_k
        position = index * BLOCK_MASK_SIZE - offset
        write_list(
            Mask, OfKeys + index * of_keys, None, 0, stride_q, q_blocks, position, right, left, CHUNK
        )  # fmt: skip


@triton.jit
def write_list(
    Mask, List, Places, stride_places, stride, blocks, position, before, after, CHUNK: tl.constexpr
):  # fmt: skip
    """Write one list: the number of blocks of the other axis to visit, then their indices. With Places also each
    visited block's position in the list, at Places + block * stride_places.

    position: where this block begins, in positions of the other axis; each of its elements sees from `before`
    positions before its own to `after` positions after it.
    """
    count = 0
    for begin in range(0, blocks, CHUNK):
        block = begin + tl.arange(0, CHUNK)
        visited = tl.load(Mask + block.to(tl.int64) * stride, mask=block < blocks, other=0).to(tl.int32)
        first = block * BLOCK_MASK_SIZE
        visited = tl.where(first < position + BLOCK_MASK_SIZE + after, visited, 0)
        visited = tl.where(first + BLOCK_MASK_SIZE > position - before, visited, 0)
        place = count + tl.cumsum(visited, 0)
        tl.store(List + place, block, mask=visited != 0)
        if Places is not None:
            tl.store(Places + block * stride_places, place - 1, mask=visited != 0)
        count += tl.sum(visited)
    tl.store(List, count)
    if count == 0:
        tl.store(List + 1, blocks)
