"""`flash_attention`, the public function: it checks its arguments, and turns them into those of flash's operators."""

from typing import Any, Literal, Unpack, overload

import torch
from torch.nn import functional as F

from ..arguments import (
    Arguments,
    check_dropout,
    check_features,
    check_flag,
    check_inputs,
    check_scale,
    in_autocast_dtype,
    seed_on,
)
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
# Cache key -> Options of calls that have passed the checks; it saves the 7 us that these take.
_passed: dict[tuple[object, ...] | None, Options] = {}
LIMIT = 4096


class FlashArguments(Arguments, total=False):
    """Types, as in `Arguments`."""

    tier: str
    _packed: Tensor | None


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[FlashArguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[FlashArguments]
) -> Tensor: ...
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
    _packed: Tensor | None = None,  # of `flash_attention_packed`: in place of q, k and v; gets the gradient
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v without the matrix of scores (FlashAttention-2, arXiv 2307.08691). Causal unless told.

    Args:
        q: (batch, heads, q_len, head_dim), float16, bfloat16 or float32, on a GPU, or a CPU with Triton's interpreter
            (not bfloat16). Not (batch, length, heads, head_dim), which nothing can tell from it.
        k, v: (batch, kv_heads, kv_len, head_dim), where kv_heads divides heads and head_dim is 16 to 256. v may have
            another, which out then has too: the narrower are padded to the wider, and cost as much. Any strides whose
            last is 1, so views of a packed qkv are not copied. Autocast casts all three, as for torch's attention.
        causal: query i sees keys up to i + kv_len - q_len: the last query sees every key.
        scale: of the logits; None means 1/sqrt(head_dim).
        dropout_p: probability that an attention weight is set to 0.
        dropout_seed: int or 0-d int64 tensor, needed with dropout_p: no generator is used. In a CUDA graph a tensor
            on the device; a number, or a CPU tensor, is captured as a constant.
        window: (left, right): a query sees at most so many keys before and after its position; -1 for no limit.
        softcap: logits become softcap * tanh(logits / softcap).
        alibi_slopes: (heads,): logits less slope * |distance|. No gradient.
        sinks: (heads,): a logit per head that enters the softmax and has no value.
        cu_seqlens: int32 (documents + 1,), offsets of documents packed into the batch * q_len tokens, from 0 to that
            number: each sees itself alone. cu_seqlens_k: the keys', where they differ.
        kv_lengths: int32 (batch,): keys from there on are padding, and may hold anything.
        block_mask: bool (batch or 1, heads or 1, ceil(q_len / 128), ceil(kv_len / 128)): tiles that may be seen.
        return_lse: also return the natural log-sum-exp of the logits, whose gradient then joins in.
        precise_delta: also keep the output's rounding error, as large as the output, so that delta = rowsum(dO * O)
            does not inherit a rounding that can be biased (arXiv 2510.04212).
        tier: the kernels that may run: "triton", "hopper" (see `dispatch`), or "auto", the Hopper ones where they
            were faster; `kernels.why_portable` says why not.

    Returns:
        out (batch, heads, q_len, v's head_dim) in q's dtype, 0 for a query that sees no key. With return_lse also
        (batch, heads, q_len) float32, there -inf.

    float32 is computed in full precision, without tensor cores. Tiles that a mask hides entirely are not visited.
    Gradients are bitwise repeatable. There is no second derivative, and nothing under torch.func (vmap, grad):
    `naive` has both. What NaN in a token can reach: `kernels.arguments`.

    Memory beyond inputs and outputs: 4 bytes per query and head for the log-sum-exp, and 4 more during the backward;
    with documents 8 bytes per token (with cu_seqlens_k per query, in the backward per key too; on the Hopper kernels
    8 more per query and key where documents are not causal or beside padding, or a window is either and there are
    fewer keys than queries); with a block mask 12 bytes per mask element. The Hopper backward up to head_dim 128
    sums dQ in float32, 256 or 512 bytes per query and head while it runs; with grouped heads it also holds dk and dv
    of every query head, in q's dtype.

    Raises:
        AttentionError: names the argument that is not supported.
    """
    q, k, v = in_autocast_dtype(q, k, v)
    qkv = (q, k, v) if _packed is None else (_packed, None, None)
    cache_key, eager = None, not torch.compiler.is_compiling()
    plain = dropout_seed is alibi_slopes is sinks is kv_lengths is block_mask is None
    if eager and plain and cu_seqlens is cu_seqlens_k is None:
        if window is None:  # a window is not cached: as a key (5.0, 0) equals (5, 0), but it is to be refused
            numbers = (causal, scale, dropout_p, softcap, tier, precise_delta)
            cache_key = _cache_key(q, k, v, _packed is None, *numbers)
        if (options := _passed.get(cache_key)) is not None:
            out, lse, _ = FlashAttention.apply(*qkv, None, NO_TENSORS, options)
            return (out, lse) if return_lse else out
    if _packed is not None:
        q, k, v = parts(_packed.detach())
    value_dim = None
    if k.shape != v.shape and k.shape[:-1] == v.shape[:-1] and k.shape[-1:] == q.shape[-1:]:
        head_dim, value_dim, cache_key = q.shape[-1], v.shape[-1], None
        scale, width = check_scale(scale, head_dim), max(head_dim, value_dim)
        q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        qkv = (q, k, v)  # F.pad would also copy what needs no padding
    check_inputs(q, k, v, causal)
    check_flag("precise_delta", precise_delta)
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
        causal, left, right = False, -1, -1  # starts and ends account for causal mask and window
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
    if cache_key is not None:
        if len(_passed) >= LIMIT:
            _passed.clear()
        _passed[cache_key] = options
    out = out if value_dim is None else out[..., :value_dim]
    return (out, lse) if return_lse else out


def _cache_key(q: Tensor, k: Tensor, v: Tensor, *numbers: object) -> tuple[object, ...] | None:
    """What the checks of a call without other tensors depend on, as a key of `_passed`; None if it cannot be one."""
    cache_key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        q.stride(), k.stride(), v.stride(), *numbers, *map(type, numbers),
    )  # fmt: skip
    try:
        hash(cache_key)
    except TypeError:  # a symbolic length
        return None
    return cache_key


def check_supported(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None) -> None:
    """Raise AttentionError for inputs that other backends may take, but not our kernels."""
    batch, heads, _, head_dim = q.shape
    # Meta tensors are checked as if on a GPU: operators only compute shapes for them.
    where = (torch.device("cuda"), False) if q.device.type == "meta" else (q.device, INTERPRETED)
    if reason := refuses_inputs(where[0], q.dtype, head_dim, where[1]):
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
