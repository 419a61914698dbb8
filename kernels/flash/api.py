"""Flash attention as a function: the checks of its arguments, and what its operators get."""

from typing import Any

import torch
from torch.nn import functional as F

from ..arguments import check_dropout, check_features, check_inputs, check_scale, in_autocast_dtype, seed_on
from ..launch import INTERPRETED
from ..registry import AttentionError, with_packed
from ..versions import kernels_lack
from .call import Options, Tensors
from .dispatch import ALIBI_RAGGED, refuses_inputs
from .masks import block_lists, document_bounds, keys_of_queries
from .operators import FlashAttention, flash_forward, parts

Tensor = torch.Tensor
if lacking := kernels_lack():  # for callers without `resolve_attention`
    raise AttentionError(f"attention=flash needs {lacking}")
NO_TENSORS = Tensors()
# Place -> options of calls that have passed the checks, which take 7 us.
_passed: dict[tuple[object, ...] | None, Options] = {}
LIMIT = 4096


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
    return_lse: bool = False,
    precise_delta: bool = False,
    tier: str = "auto",
    _packed: Tensor | None = None,  # given in place of q, k and v; it then gets the gradient
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v without materialising the scores; arguments and result as `naive_attention`.

    q, k and v may have any strides whose last is 1, so views of a packed qkv are not copied. Autocast casts them to
    its dtype, as for torch's own attention. float32 is computed in full precision, without tensor cores. Tiles that a
    mask hides entirely are not visited. Gradients are bitwise repeatable. v may have another head_dim, which out then
    has too: the narrower of q, k and v are padded to the wider, and cost as much. There is no second derivative, and
    nothing under torch.func (vmap, grad): `naive` has both.

    Memory beyond inputs and outputs: 4 bytes per query and head for the log-sum-exp, and 4 more during the backward;
    with documents 8 bytes per token (with cu_seqlens_k per query, in the backward per key too; on the Hopper kernels
    8 more per query and key where documents or a window are not causal, or beside padding); with a block mask 12
    bytes per mask element. The Hopper backward up to head_dim 128 sums dQ in float32, 256 or 512 bytes per query and
    head while it runs; with grouped heads it also holds dk and dv of every query head, in q's dtype.

    dropout_seed: under a CUDA graph a tensor on the device; a number, or a CPU tensor, is captured as a constant.
    precise_delta: also keep the output's rounding error, as large as the output, so that delta = rowsum(dO * O) does
    not inherit a rounding that can be biased (arXiv 2510.04212).
    tier: the kernels that may run: "triton", "hopper" (see `dispatch`), or "auto", the Hopper ones where they apply;
        `kernels.why_portable` says why not.

    Raises:
        AttentionError: names the argument that is not supported.
    """
    q, k, v = in_autocast_dtype(q, k, v)
    qkv = (q, k, v) if _packed is None else (_packed, None, None)
    place, eager = None, not torch.compiler.is_compiling()
    plain = dropout_seed is alibi_slopes is sinks is kv_lengths is block_mask is None
    if eager and plain and cu_seqlens is cu_seqlens_k is None:
        if window is None:  # in a key 5.0 equals 5, but is refused
            numbers = (causal, scale, dropout_p, softcap, tier, precise_delta)
            place = _place_of(q, k, v, _packed is None, *numbers)
        if (options := _passed.get(place)) is not None:
            out, lse, _ = FlashAttention.apply(*qkv, None, NO_TENSORS, options)
            return (out, lse) if return_lse else out
    if _packed is not None:
        q, k, v = parts(_packed.detach())
    value_dim = None
    if k.shape != v.shape and k.shape[:-1] == v.shape[:-1] and k.shape[-1:] == q.shape[-1:]:
        head_dim, value_dim, place = q.shape[-1], v.shape[-1], None
        scale, width = check_scale(scale, head_dim), max(head_dim, value_dim)
        q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        qkv = (q, k, v)  # F.pad would also copy what needs no padding
    check_inputs(q, k, v)
    check_dropout(dropout_p, dropout_seed)
    check_features(
        q, k, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, kv_lengths=kv_lengths, block_mask=block_mask,
    )  # fmt: skip
    check_supported(q, k, v, alibi_slopes)
    left, right = window or (-1, -1)
    starts = ends = key_blocks = query_blocks = None
    if cu_seqlens is not None and cu_seqlens_k is not None:
        if alibi_slopes is not None:  # the kernels' positions are the row's
            raise AttentionError(f"attention=flash {ALIBI_RAGGED}; attention=naive does")
        call = q.shape[0], q.shape[2], k.shape[2], causal, left, right
        starts, ends = keys_of_queries(cu_seqlens, cu_seqlens_k, None, *call, covering=True)
        causal, left, right = False, -1, -1  # the bounds contain them
    elif cu_seqlens is not None:
        starts, ends = document_bounds(cu_seqlens, q.shape[0], q.shape[2])
    if block_mask is not None:
        key_blocks, query_blocks = block_lists(block_mask, q.shape[2], k.shape[2], causal, left, right)
    seed = seed_on(q.device, dropout_seed) if dropout_p else None
    # One number per head or batch, read as contiguous by the kernels.
    alibi_slopes, sinks, kv_lengths = (
        x if x is None else x.contiguous() for x in (alibi_slopes, sinks, kv_lengths)
    )
    tensors = Tensors(seed, alibi_slopes, sinks, starts, ends, kv_lengths, key_blocks, query_blocks)
    options = Options(
        causal, check_scale(scale, q.shape[-1]), dropout_p, left, right, softcap or 0.0, tier, precise_delta,
        ragged=cu_seqlens_k is not None,
    )  # fmt: skip
    if eager:  # what the operator would call, without the dispatcher: saves 8 us
        out, lse, _ = FlashAttention.apply(*qkv, tensors.sinks, tensors, options)
    else:
        out, lse, _ = flash_forward(*qkv, *tensors, *options)
    if place is not None:
        if len(_passed) >= LIMIT:
            _passed.clear()
        _passed[place] = options
    out = out if value_dim is None else out[..., :value_dim]
    return (out, lse) if return_lse else out


def _place_of(q: Tensor, k: Tensor, v: Tensor, *numbers: object) -> tuple[object, ...] | None:
    """What the checks of a call without other tensors depend on; None if it cannot be a key."""
    place = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.stride(), k.stride(), v.stride(), *numbers, *map(type, numbers),
    )  # fmt: skip
    try:
        hash(place)
    except TypeError:  # a symbolic length
        return None
    return place


def check_supported(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None) -> None:
    """Check what our kernels, unlike others, cannot take."""
    batch, heads, _, head_dim = q.shape
    if reason := refuses_inputs(q.device, q.dtype, head_dim, INTERPRETED):
        raise AttentionError(f"attention=flash: {reason}")
    if batch > 65535 or heads > 65535:  # grid axes of the launch
        raise AttentionError(f"attention=flash takes batch and heads up to 65535, got {(batch, heads)}")
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise AttentionError("attention=flash has no gradient for alibi_slopes; attention=naive does")
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        name, x = next((name, x) for name, x in (("q", q), ("k", k), ("v", v)) if x.stride(-1) != 1)
        raise AttentionError(f"{name}'s last stride must be 1, got {x.stride()}; pass {name}.contiguous()")


def flash_attention_packed(qkv: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of a packed qkv (batch, length, 3, heads, head_dim), as a linear layer produces it.

    The gradient is packed like qkv, which saves stacking dq, dk and dv: 1.7 of the 117 ms of a step of GPT-2 small on
    an H200 (LOG.md). out: (batch, heads, length, head_dim). options: as for `flash_attention`.
    """
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise AttentionError(f"qkv must be (batch, length, 3, heads, head_dim), got {tuple(qkv.shape)}")
    (qkv,) = in_autocast_dtype(qkv)
    return flash_attention(qkv, qkv, qkv, _packed=qkv, **options)


with_packed(flash_attention, flash_attention_packed)
