"""Sequences packed without a batch axis, (tokens, heads, head_dim), their queries and keys of unequal lengths.

As in FlashAttention's varlen functions, cu_seqlens_q and cu_seqlens_k say where the queries and the keys of each
sequence begin, and within a sequence queries are aligned bottom-right. Where both are one tensor, of as many queries
as keys, sequences are the documents of a row, and every kernel serves. Otherwise they are `cu_seqlens` and
`cu_seqlens_k` of a single row, but queries that belong to no sequence see nothing.
"""

from torch import Tensor

from .call import Options, Tensors
from .masks import document_bounds, keys_of_queries
from .operators import flash_backward, flash_forward

# cu_seqlens_q, cu_seqlens_k, keys in use of each sequence or None
Offsets = tuple[Tensor, Tensor, Tensor | None]


def forward(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, offsets: Offsets, options: Options
) -> tuple[Tensor, Tensor]:
    """out like q (queries, heads, head_dim), lse float32 (heads, queries)."""
    q, k, v = map(_as_row, (q, k, v))
    bounds, options = _bounds(q.shape[2], k.shape[2], offsets, options)
    out, lse, _ = flash_forward(q, k, v, *Tensors(seed, None, None, *bounds), *options)
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
    bounds, options = _bounds(q.shape[2], k.shape[2], offsets, options)
    asked = (*Tensors(seed, None, None, *bounds), *options)
    dq, dk, dv, _ = flash_backward(d_out, None, out, lse.contiguous()[None], None, q, k, v, *asked)
    dq, dk, dv = (x[0].transpose(0, 1) for x in (dq, dk, dv))
    return dq, dk, dv


def _as_row(x: Tensor) -> Tensor:
    """(tokens, heads, head_dim) -> (1, heads, tokens, head_dim)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.transpose(0, 1)[None]


def _bounds(
    queries: int, keys: int, offsets: Offsets, options: Options
) -> tuple[tuple[Tensor, Tensor], Options]:
    """The bounds of documents that the kernels get, and the options that go with them."""
    of_queries, of_keys, used = offsets
    # Of more tokens of one than of the other, some belong to no sequence.
    if queries == keys and _are_documents(offsets):
        return document_bounds(of_queries.int(), 1, queries), options
    masks = options.causal, options.left, options.right
    bounds = keys_of_queries(of_queries, of_keys, used, 1, queries, keys, *masks, covering=False)
    return bounds, options._replace(causal=False, left=-1, right=-1, ragged=True)


def _are_documents(offsets: Offsets) -> bool:
    """Whether queries and keys share their offsets, as known without waiting for the device."""
    of_queries, of_keys, used = offsets
    return used is None and of_queries.data_ptr() == of_keys.data_ptr() and of_queries.shape == of_keys.shape
