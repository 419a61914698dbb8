"""Sequences packed without a batch axis, (tokens, heads, head_dim), their queries and keys of unequal lengths.

As in FlashAttention's varlen functions, cu_seqlens_q and cu_seqlens_k say where the queries and the keys of each
sequence begin, and within a sequence queries are aligned bottom-right. Where both are one tensor, sequences are the
documents of a row, and every kernel serves. Otherwise a query sees an interval of keys and a key is seen by an
interval of queries, whose ends both ascend, and that is all the portable kernels ask of a document's bounds.
"""

import torch
from torch import Tensor

from .call import Options, Tensors
from .masks import document_bounds
from .operators import empty_like, flash_backward, flash_forward
from .portable import launch as portable

# cu_seqlens_q, cu_seqlens_k, keys in use of each sequence or None
Offsets = tuple[Tensor, Tensor, Tensor | None]


def forward(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, offsets: Offsets, options: Options
) -> tuple[Tensor, Tensor]:
    """out like q (queries, heads, head_dim), lse float32 (heads, queries)."""
    q, k, v = map(_as_row, (q, k, v))
    if _are_documents(offsets):
        tensors = Tensors(seed, None, None, *document_bounds(offsets[0].int(), 1, q.shape[2]))
    else:
        tensors = Tensors(seed, None, None, *_keys_of_queries(q.shape[2], k.shape[2], offsets, options))
        options = _unmasked(options)
    out, lse, _ = flash_forward(q, k, v, *tensors, *options)
    return out[0].transpose(0, 1), lse[0]


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    offsets: Offsets,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, like q, k and v."""
    d_out, q, k, v, out = map(_as_row, (d_out, q, k, v, out))
    lse = lse.contiguous()[None]
    if _are_documents(offsets):
        tensors = Tensors(seed, None, None, *document_bounds(offsets[0].int(), 1, q.shape[2]))
        dq, dk, dv, _ = flash_backward(d_out, None, out, lse, None, q, k, v, *tensors, *options)
    else:
        dq, dk, dv = map(empty_like, (q, k, v))
        nothing, delta, d_out = q.new_empty(0), torch.empty_like(lse), d_out.contiguous()
        starts, ends = _keys_of_queries(q.shape[2], k.shape[2], offsets, options)
        options = _unmasked(options)
        rest = (d_out, None, out, None, lse, q, k, v)
        portable.backward(
            *rest, dq, nothing, nothing, delta, Tensors(seed, None, None, starts, ends), options
        )
        tensors = Tensors(seed, None, None, *_queries_of_keys(k.shape[2], starts, ends))
        portable.backward(*rest, nothing, dk, dv, delta, tensors, options)
    dq, dk, dv = (x[0].transpose(0, 1) for x in (dq, dk, dv))
    return dq, dk, dv


def _as_row(x: Tensor) -> Tensor:
    """(tokens, heads, head_dim) -> (1, heads, tokens, head_dim)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.transpose(0, 1)[None]


def _are_documents(offsets: Offsets) -> bool:
    """Whether queries and keys share their offsets, as known without waiting for the device."""
    of_queries, of_keys, used = offsets
    return used is None and of_queries.data_ptr() == of_keys.data_ptr() and of_queries.shape == of_keys.shape


def _unmasked(options: Options) -> Options:
    """The options where bounds say everything. Only the portable kernels take bounds that are not documents."""
    return options._replace(causal=False, left=-1, right=-1, tier="triton")


def _keys_of_queries(queries: int, keys: int, offsets: Offsets, options: Options) -> tuple[Tensor, Tensor]:
    """The keys [start, end) that each query sees, both int32 (1, queries) and ascending."""
    of_queries, of_keys, used = offsets[0].long(), offsets[1].long(), offsets[2]
    index = torch.arange(queries, device=of_queries.device)
    sequence = torch.searchsorted(of_queries, index, right=True) - 1
    outside = (sequence < 0) | (sequence >= len(of_queries) - 1)  # of all sequences: sees nothing
    sequence = sequence.clamp(0, len(of_queries) - 2)
    start = of_keys[sequence]
    end = of_keys[sequence + 1] if used is None else start + used[sequence]
    position = end - of_queries[sequence + 1] + index  # of the query, among the keys
    first, last = start, end
    if options.left >= 0:
        first = torch.maximum(start, position - options.left)
    if options.causal or options.right >= 0:
        last = torch.minimum(end, position + 1 + (0 if options.causal else options.right))
    last = torch.maximum(last, first)  # empty, yet not before the sequence's first key: ends must ascend
    first, last = (
        torch.where(outside, torch.where(index < of_queries[0], 0, keys), x) for x in (first, last)
    )
    return first.to(torch.int32)[None], last.to(torch.int32)[None]


def _queries_of_keys(keys: int, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The queries [first, last) that see each key, both int32 (1, keys)."""
    index = torch.arange(keys, dtype=torch.int32, device=starts.device)[None]
    last = torch.searchsorted(starts, index, right=True, out_int32=True)
    return torch.searchsorted(ends, index, right=True, out_int32=True), last
