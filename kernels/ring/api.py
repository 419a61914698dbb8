"""Ring attention as a function: its checks, its operators, and autograd through them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..arguments import check_features, check_inputs, check_scale, in_autocast_dtype
from ..operators import below_autograd, in_backward, operator
from ..registry import AttentionError, used_features
from . import gathered, passes
from .blocks import Layout
from .compute import Whole, compute_of
from .documents import own_offsets, spans_of
from .gathered import gathers_keys
from .group import RingGroup


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    attention: str = "flash",
    tier: str = "auto",
    gather_keys: bool | None = None,
    cu_seqlens: Tensor | None = None,
    return_lse: bool = False,
    **features: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v for this rank's part of the queries, over the keys and values of all ranks.

    Every rank of the group calls it with its own part, all of one shape. Each rank then has its part of the output,
    and after the backward the gradient of its parts, to which the other ranks' losses have contributed. Equal runs
    give equal bits; where keys are gathered, only if the group's reduce-scatter does.

    Memory beyond inputs and outputs: a float32 tensor like q, what one call of attention returns, and the keys and
    values of two ranks; in the backward three more float32 tensors like k and v. No rank holds the keys of all. Where
    they are gathered, each does, for a moment twice, and in the backward also their gradients twice, in float32.

    Args:
        q: (batch, heads, length / ranks, head_dim), float16, bfloat16 or float32, and with attention="naive" float64.
        k, v: (batch, kv_heads, length / ranks, head_dim); kv_heads divides heads.
        group: the ranks that share the sequence; None: all of the default group.
        causal: the parts are then those of `shard_positions`. Without the mask any equal parts will do.
        scale: of the scores; None: 1/sqrt(head_dim).
        attention: what computes the blocks, flash or naive. tier: which of flash's kernels, see `flash.dispatch`.
        gather_keys: the ranks exchange all keys and values at once (`gathered`), instead of a rank's at a time. None:
            where a sequence is so short that a ring would wait for the host (`gathers_keys`). Not with cu_seqlens.
        cu_seqlens: offsets of packed documents in the batch * length tokens of the whole sequences, as
            `kernels.features` describes them, the same on every rank. Needs causal. The host waits for the device.
        features: refused, unless they have the value that means "not used".

    Returns:
        out like q; with return_lse also the natural log-sum-exp of the scaled scores (batch, heads, length / ranks),
        float32 or wider.

    Raises:
        AttentionError: one line, for what cannot be computed.

    Source: Liu et al. 2023, Ring Attention with Blockwise Transformers (arXiv 2310.01889). The package has the rest.
    """
    if used := sorted(used_features(features)):
        raise AttentionError(f"ring_attention does not support {used[0]}: only attention on one GPU does")
    if not dist.is_initialized():
        raise AttentionError(
            "ring_attention needs torch.distributed.init_process_group, as torchrun's ranks do"
        )
    q, k, v = in_autocast_dtype(q, k, v)
    check_inputs(q, k, v, causal)
    check_features(q, k, cu_seqlens=cu_seqlens)
    if q.shape[2] != k.shape[2] or q.shape[2] % 2:
        raise AttentionError(
            f"ring_attention needs as many queries as keys on each rank, an even number, got {q.shape[2]} and "
            f"{k.shape[2]}"
        )
    if cu_seqlens is not None and not causal:
        raise AttentionError("ring_attention takes cu_seqlens with causal=True only")
    if cu_seqlens is not None and gather_keys:
        raise AttentionError("ring_attention takes cu_seqlens with gather_keys=False only")
    if attention == "flash":
        from ..flash.api import check_supported  # imports triton

        check_supported(q, k, v)
    ring = RingGroup(group)
    own = spans = None
    if cu_seqlens is not None:
        batch, length = q.shape[0], q.shape[2] * ring.size
        # As for flash, tokens before the first offset or after the last one form documents too.
        cu_seqlens = F.pad(F.pad(cu_seqlens, (1, 0)), (0, 1), value=batch * length)
        spans = spans_of(cu_seqlens, batch, length, ring.size)
        own = own_offsets(cu_seqlens, batch, length, ring.rank, ring.size)
    if gather_keys is None:
        batch, heads, length, head_dim = q.shape
        gather_keys = cu_seqlens is None and gathers_keys(batch, heads, length, head_dim, ring.size)
    scale = check_scale(scale, q.shape[3])
    asked = Asked(own, spans, ring.group.group_name, causal, scale, attention, tier, gather_keys)
    out, lse = ring_forward(q, k, v, *asked)
    return (out, lse) if return_lse else out


class Asked(NamedTuple):
    """The last arguments of the operators, whose schema is flat."""

    cu_seqlens: Tensor | None  # of packed documents, `own_offsets` and `spans_of`
    spans: Tensor | None
    group: str  # the name of the process group
    causal: bool
    scale: float
    attention: str
    tier: str
    gather_keys: bool

    @property
    def order(self) -> ModuleType:
        """The module with the two passes."""
        return gathered if self.gather_keys else passes

    def over(self, length: int) -> passes.Pass:
        """What this asks of a pass over `length` tokens of each rank."""
        ring = RingGroup(dist.distributed_c10d._resolve_process_group(self.group))  # type: ignore[arg-type]
        layout = Layout(ring.rank, ring.size, length, self.causal, self.spans)
        return passes.Pass(ring, layout, compute_of(self.attention, self.tier), self.scale, self.cu_seqlens)


_around: Callable[[], AbstractContextManager[object]] = nullcontext


@contextmanager
def passes_within(around: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Have each pass run in an `around()`: a rank that waits for others does so there.

    torch.compile does not see it. With CUDA graphs it is called while they are recorded, not when they are replayed.
    """
    global _around
    before, _around = _around, around
    try:
        yield
    finally:
        _around = before


def ring_forward(q: Tensor, k: Tensor, v: Tensor, *asked: Any) -> tuple[Tensor, Tensor]:
    """The forward operator: out like q, and lse. asked: the fields of Asked."""
    how = Asked(*asked)
    with _around():
        return how.order.forward(how.over(q.shape[2]), q, k, v)


def ring_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *asked: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward operator: dq like q, dk and dv contiguous."""
    how = Asked(*asked)
    with _around():
        return how.order.backward(how.over(q.shape[2]), Whole(d_out, d_lse, out, lse), q, k, v)


class RingAttention(torch.autograd.Function):
    """`ring_forward` with its gradient in q, k and v."""

    @staticmethod
    def forward(ctx, q, k, v, *asked):
        out, lse = below_autograd(ring_forward, q, k, v, *asked)
        cu_seqlens, spans, *ctx.options = asked
        ctx.save_for_backward(out, lse, q, k, v, cu_seqlens, spans)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        out, *saved = ctx.saved_tensors
        # Every rank takes part in the exchange, also one whose loss ignores its output.
        d_out = torch.zeros_like(out) if d_out is None else d_out
        gradients = in_backward(ring_backward, d_out, d_lse, out, *saved, *ctx.options)
        return *gradients, *(None,) * len(Asked._fields)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


ring_forward = operator(
    ring_forward,
    lambda q, k, v, *asked: (torch.empty_like(q), q.new_empty(q.shape[:3], dtype=_lse_dtype(q))),
    RingAttention.apply,
    rest=(Asked,),
)
ring_backward = operator(
    ring_backward,
    lambda d_out, d_lse, out, lse, q, k, v, *asked: (
        torch.empty_like(q),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
    ),
    no_gradient=lambda: AttentionError("ring_attention has no second derivative"),
    rest=(Asked,),
)
