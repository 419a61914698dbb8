"""How attention splits over the ranks of a DTensor mesh: by batch, and by heads as in tensor parallelism.

    kernels.register_sharding()
    out = flash_attention(q, k, v)          # DTensors, with Shard(0) or Shard(1) on a dimension of the mesh

As for SDPA, no rank needs another's keys, so sharded inputs are computed where they are. What is per head (sinks,
ALiBi's slopes) is sharded with the heads, what is per row (kv_lengths, document bounds) with the batch. Where
one is a DTensor, all tensors must be. Grouped key heads are split only if every rank gets whole groups. Dropout's
mask is drawn by row and head of the whole, so with dropout every rank gathers q, k and v and computes all of it.
"""

from collections.abc import Sequence
from typing import Any, cast

from torch._ops import OpOverload
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .call import unflatten
from .masks import block_lists, document_bounds, keys_of_queries
from .operators import flash_backward, flash_forward

# (placements of the results, of the arguments; None for one that is not a tensor), on one dimension of the mesh
Way = tuple[list[Any], list[Any]]
BATCH, HEADS = "batch", "heads"


def register() -> None:
    """Register the ways with DTensor."""
    register_sharding(cast(OpOverload, flash_forward))(of_forward)
    register_sharding(cast(OpOverload, flash_backward))(of_backward)
    register_sharding([cast(OpOverload, each) for each in (document_bounds, keys_of_queries, block_lists)])(
        replicated
    )


def of_forward(q: Any, k: Any, v: Any, *asked: Any) -> Sequence[Way]:
    """The ways of `flash_forward`; q, k, v: what DTensor knows of them."""
    low = unflatten(asked)[1].precise_delta
    return [
        ([_of(q, by), _of_scores(by), _of(q, by) if low else Replicate()], _inputs(by, q, k, v, asked))
        for by in _ways(q, k, asked)
    ]


def of_backward(
    d_out: Any, d_lse: Any, out: Any, lse: Any, out_low: Any, q: Any, k: Any, v: Any, *asked: Any
) -> Sequence[Way]:
    """The ways of `flash_backward`."""
    ways = []
    for by in _ways(q, k, asked):
        gradients = [_of(q, by), *(Replicate() if k is None else _of(x, by) for x in (k, v)), _of_scores(by)]
        given = [
            _of_scores(by),
            None if d_lse is None else _of_scores(by),
            _of_scores(by),
            _of_scores(by),
            None if out_low is None else _of_scores(by),
        ]
        ways.append((gradients, [*given, *_inputs(by, q, k, v, asked)]))
    return ways


def _ways(q: Any, k: Any, asked: Any) -> list[str | None]:
    """What may be split."""
    tensors, _ = unflatten(asked)
    if tensors.seed is not None:
        return [None]
    heads, kv_heads = (q.shape[3],) * 2 if k is None else (q.shape[1], k.shape[1])
    sizes = [q.mesh.size(each) for each in range(q.mesh.ndim)]
    # Over several dimensions of the mesh at once DTensor splits no axis into more parts than it has elements.
    whole = all(kv_heads % size == 0 for size in sizes) and (
        kv_heads % q.mesh.size() == 0 or kv_heads < q.mesh.size()
    )
    return [None, BATCH, *([HEADS] if whole or heads == kv_heads else [])]


def _of(x: Any, by: str | None) -> Any:
    """The placement of q, k or v (batch, heads, length, head_dim), or packed (batch, length, 3, heads, head_dim)."""
    if by == HEADS:
        return Shard(3 if len(x.shape) == 5 else 1)
    return Shard(0) if by == BATCH else Replicate()


def _of_scores(by: str | None) -> Any:
    """The placement of anything (batch, heads, ...)."""
    return {BATCH: Shard(0), HEADS: Shard(1), None: Replicate()}[by]


def _inputs(by: str | None, q: Any, k: Any, v: Any, asked: Any) -> list[Any]:
    """The placements of q, k, v and what is asked."""
    tensors, options = unflatten(asked)
    of_heads, of_batch = (Shard(0) if by == each else Replicate() for each in (HEADS, BATCH))

    def of_blocks(lists: Any) -> Any:  # (batch or 1, heads or 1, ...)
        axis = {BATCH: 0, HEADS: 1, None: 0}[by]
        return Replicate() if by is None or lists.shape[axis] == 1 else Shard(axis)

    places = {
        "alibi_slopes": of_heads, "sinks": of_heads, "document_starts": of_batch, "document_ends": of_batch,
        "kv_lengths": of_batch, "seed": Replicate(),
    }  # fmt: skip
    return [
        *(None if x is None else _of(x, by) for x in (q, k, v)),
        *(
            None if x is None else of_blocks(x) if name.endswith("_blocks") else places[name]
            for name, x in tensors._asdict().items()
        ),
        *(None for _ in options),
    ]


def replicated(*asked: Any) -> Sequence[Way]:
    """The way of an operator that makes masks, whose two results are small."""
    return [([Replicate()] * 2, [Replicate() if hasattr(each, "shape") else None for each in asked])]
