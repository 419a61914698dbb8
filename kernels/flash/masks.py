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
CHUNK = 128  # of offsets, or of blocks
PART = 16  # of a chunk of offsets
ANY = 1 << 30  # a window's side that hides nothing
Tensor = torch.Tensor


def document_bounds(cu_seqlens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """First and last + 1 token of each token's document, counted from the start of its row: int32 (batch, length).

    cu_seqlens: int32 (documents + 1,). A document begins wherever an offset is, whatever their order: so each token
    is in its own, and neither bound ever decreases. Offsets that are wrong give wrong documents, but no index out of
    range on the device, and no kernel that waits for ever.
    """
    starts, ends = _document_bounds_like(cu_seqlens, batch, length)
    if starts.numel():
        bounds = cu_seqlens.shape[0]
        grid = (-(-length // TOKENS), batch, 1)  # not triton.cdiv: 2 us
        numbers = (bounds, length, TOKENS, CHUNK, PART)
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
        visit, then which; and the same with queries and keys exchanged.
    """
    of_queries, of_keys = results = _block_lists_like(mask)
    batch, heads, q_blocks, k_blocks = mask.shape
    left, right = left if left >= 0 else ANY, 0 if causal else right if right >= 0 else ANY
    if mask.numel():
        grid = (q_blocks + k_blocks, heads, batch)
        numbers = (*mask.stride(), q_blocks, k_blocks, kv_len - q_len, left, right, CHUNK)
        pointers = (mask.view(torch.uint8), of_queries, of_keys)
        launch(pointers, ("blocks", grid, numbers), lambda: (block_lists_kernel, grid, numbers, {}))
    return results


def _document_bounds_like(cu_seqlens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    return cu_seqlens.new_empty(batch, length), cu_seqlens.new_empty(batch, length)


def _block_lists_like(mask: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    batch, heads, q_blocks, k_blocks = mask.shape
    return (
        mask.new_zeros(batch, heads, q_blocks, 1 + k_blocks, dtype=torch.int32),
        mask.new_zeros(batch, heads, k_blocks, 1 + q_blocks, dtype=torch.int32),
    )


document_bounds = operator(document_bounds, _document_bounds_like)
block_lists = operator(block_lists, _block_lists_like)


@triton.jit(do_not_specialize=["bounds", "length"])
def documents_kernel(
    Bounds, Starts, Ends, bounds, length, TOKENS: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Grid (ceil(length / TOKENS), batch). Offsets between a program's tokens are looked at PART at a time: all of a
    CHUNK would spill 5 KB."""
    row_start = tl.program_id(1) * length
    row_end = row_start + length
    first = row_start + tl.program_id(0) * TOKENS
    tokens = first + tl.arange(0, TOKENS)
    starts, ends = tokens * 0 + row_start, tokens * 0 + row_end
    for begin in range(0, bounds, CHUNK):
        index = begin + tl.arange(0, CHUNK)
        offsets = tl.load(Bounds + index, mask=index < bounds, other=row_start)
        starts = tl.maximum(starts, tl.max(tl.where(offsets <= first, offsets, row_start)))
        ends = tl.minimum(ends, tl.min(tl.where(offsets >= first + TOKENS, offsets, row_end)))
        if tl.max(((offsets > first) & (offsets < first + TOKENS)).to(tl.int32)) > 0:
            for part in range(begin, begin + CHUNK, PART):
                few = part + tl.arange(0, PART)[None, :]
                among = tl.load(Bounds + few, mask=few < bounds, other=row_start)
                begun = among <= tokens[:, None]
                starts = tl.maximum(starts, tl.max(tl.where(begun, among, row_start), 1))
                ends = tl.minimum(ends, tl.min(tl.where(begun, row_end, among), 1))
    tl.store(Starts + tokens, starts - row_start, mask=tokens < row_end)
    tl.store(Ends + tokens, ends - row_start, mask=tokens < row_end)


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
    index, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    Mask += batch * stride_b + head * stride_h
    pair = batch * tl.num_programs(1) + head
    if index < q_blocks:
        List = OfQueries + (pair * q_blocks + index) * (1 + k_blocks)
        Mask += index * stride_q
        write_list(Mask, List, stride_k, k_blocks, index * BLOCK_MASK_SIZE + offset, left, right, CHUNK)
    else:
        index -= q_blocks
        List = OfKeys + (pair * k_blocks + index) * (1 + q_blocks)
        Mask += index * stride_k
        write_list(Mask, List, stride_q, q_blocks, index * BLOCK_MASK_SIZE - offset, right, left, CHUNK)


@triton.jit
def write_list(Mask, List, stride, blocks, position, before, after, CHUNK: tl.constexpr):
    """How many, then which of the blocks of the other axis are to be visited.

    position: where this block begins, in places of the other axis; it sees from `before` places before each of its
    own places to `after` places behind.
    """
    count = 0
    for begin in range(0, blocks, CHUNK):
        block = begin + tl.arange(0, CHUNK)
        visited = tl.load(Mask + block * stride, mask=block < blocks, other=0).to(tl.int32)
        first = block * BLOCK_MASK_SIZE
        visited = tl.where(first < position + BLOCK_MASK_SIZE + after, visited, 0)
        visited = tl.where(first + BLOCK_MASK_SIZE > position - before, visited, 0)
        tl.store(List + count + tl.cumsum(visited, 0), block, mask=visited != 0)
        count += tl.sum(visited)
    tl.store(List, count)
