"""Packed documents and block masks in the form the kernels read, each made by one small kernel.

Anew in each call, though the layers of a model pass the same tensors: to remember them would be wrong when the replay
of a CUDA graph writes to one, which leaves no trace that Python could see. Under torch.compile they are made once.
"""

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..operators import operator
from .rules import BLOCK_MASK_SIZE

TOKENS = 256  # of a program
CHUNK = 128  # of blocks
ANY = 1 << 30  # a window's side that hides nothing
Tensor = torch.Tensor


def document_bounds(cu_seqlens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """First and last + 1 token of each token's document, counted from the start of its row: int32 (batch, length).

    cu_seqlens: int32 (documents + 1,). Tokens before the first offset and behind the last are documents too. Offsets
    that do not ascend give wrong documents, but none that overlap: an index out of range on the device, and a kernel
    that waits for ever, are nothing that numbers can cause.
    """
    starts, ends = _document_bounds_like(cu_seqlens, batch, length)
    if starts.numel():
        bounds = cu_seqlens.shape[0]
        grid = (-(-length // TOKENS), batch, 1)  # not triton.cdiv: 2 us
        numbers = (bounds, length, TOKENS)
        pointers = (cu_seqlens.contiguous(), starts, ends)
        launch(pointers, ("documents", grid, numbers), lambda: (documents_kernel, grid, numbers, {}))
    return starts, ends


def block_lists(
    mask: Tensor, q_len: int, kv_len: int, causal: bool, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """A block mask as lists, without what the causal mask and the window hide anyway.

    mask: bool (batch or 1, heads or 1, query blocks, key blocks), of 128 x 128 each.

    Returns:
        int32 (batch or 1, heads or 1, query blocks, 1 + key blocks): for each 128 queries the number of key blocks to
        visit, then which, in ascending order. Where there is none, the first is one beyond the last block.
        int32 (batch or 1, heads or 1, key blocks, 1 + 2 * query blocks): the same with queries and keys exchanged,
        and then, for each visited query block, where in its own list this key block stands.
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
    """Of lists of blocks, from one batch, head and list to the next; 0 where they share a mask, or there are none."""
    if lists is None:
        return 0, 0, 0
    return *(0 if lists.shape[dim] == 1 else lists.stride(dim) for dim in (0, 1)), lists.shape[3]


def _document_bounds_like(cu_seqlens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    return cu_seqlens.new_empty(batch, length), cu_seqlens.new_empty(batch, length)


def _block_lists_like(mask: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    batch, heads, q_blocks, k_blocks = mask.shape
    return (
        mask.new_zeros(batch, heads, q_blocks, 1 + k_blocks, dtype=torch.int32),
        mask.new_zeros(batch, heads, k_blocks, 1 + 2 * q_blocks, dtype=torch.int32),
    )


document_bounds = operator(document_bounds, _document_bounds_like)
block_lists = operator(block_lists, _block_lists_like)


@triton.jit(do_not_specialize=["bounds", "length"])
def documents_kernel(Bounds, Starts, Ends, bounds, length, TOKENS: tl.constexpr):
    """Grid (ceil(length / TOKENS), batch).

    From a token to the next the index of its document does not decrease, even where the offsets do not ascend: where
    the bisections of two tokens part, the later one goes up. So a document is a run of tokens with one index. One
    that does not begin and end where the offsets say falls to pieces of one token: the Hopper kernels wait for one
    another by bounds that agree.
    """
    row_start = tl.program_id(1) * length
    row_end = row_start + length
    tokens = row_start + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    document = document_of(Bounds, bounds, tokens)
    start = tl.load(Bounds + document, mask=document >= 0, other=row_start)
    end = tl.load(Bounds + document + 1, mask=document + 1 < bounds, other=row_end)
    start, end = tl.maximum(start, row_start), tl.minimum(end, row_end)
    # The tokens around both ends, at once: the bisections wait for memory.
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
    """The last of ascending offsets that is at most each token; -1 where there is none."""
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
    """Grid (q_blocks + k_blocks, heads, batch): a list a program. offset: kv_len - q_len."""
    index, head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    Mask += batch * stride_b + head * stride_h
    pair = batch * tl.num_programs(1) + head
    of_keys = 1 + 2 * q_blocks.to(tl.int64)  # numbers in a list
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
    """How many, then which of the blocks of the other axis are to be visited; at a block's own of Places, where it is
    in the list.

    position: where this block begins, in places of the other axis; it sees from `before` places before each of its
    own places to `after` places behind.
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
