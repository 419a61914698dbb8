"""Flash attention as a function: argument checks, the forward and backward operators, and autograd."""

import torch

from ..arguments import (
    BLOCK_MASK_SIZE,
    check_dropout,
    check_features,
    check_inputs,
    check_scale,
    in_autocast_dtype,
    seed_on,
)
from ..launch import INTERPRETED
from ..operators import below_autograd, in_backward, operator
from ..registry import AttentionError, with_packed
from . import refuses_inputs
from .dispatch import hopper, takes_hopper
from .masks import block_lists, document_bounds
from .portable.launch import launch_flash
from .portable.tiles import are_forced

Tensor = torch.Tensor


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
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
    return_lse: bool = False,
    precise_delta: bool = False,
    tier: str = "auto",
    _packed: Tensor | None = None,  # the tensor that q, k and v are views of; it then gets the gradient
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v without materialising the scores; arguments and result as `naive_attention`.

    q, k and v may have any strides whose last is 1, so views of a packed qkv are not copied. Autocast casts them to
    its dtype, as for torch's own attention. float32 is computed in full precision, without tensor cores. Tiles that a
    mask hides entirely are not visited. Gradients are bitwise repeatable.

    Memory beyond inputs and outputs: 4 bytes per query and head for the log-sum-exp, and 4 more during the backward;
    with documents 8 bytes per token; with a block mask 12 bytes per mask element. The Hopper backward sums dQ in
    float32, 4 * head_dim bytes per query and head while it runs; with grouped heads it also holds dk and dv of every
    query head, in q's dtype.

    dropout_seed: under a CUDA graph a tensor on the device; a number, or a CPU tensor, is captured as a constant.
    precise_delta: also keep the output's rounding error, as large as the output, so that delta = rowsum(dO * O) does
    not inherit a rounding that can be biased (arXiv 2510.04212).
    tier: the kernels that may run: "triton", "hopper" (see `dispatch`), or "auto", the Hopper ones where they apply.

    Raises:
        AttentionError: names the argument that is not supported.
    """
    q, k, v = in_autocast_dtype(q, k, v)
    check_inputs(q, k, v)
    check_dropout(dropout_p, dropout_seed)
    check_features(
        q, k, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        cu_seqlens=cu_seqlens, kv_lengths=kv_lengths, block_mask=block_mask,
    )  # fmt: skip
    reason = refuses_inputs(q.device, q.dtype, q.shape[-1], INTERPRETED)
    if reason is not None:
        raise AttentionError(f"attention=flash: {reason}")
    if max(q.shape[:2]) > 65535:  # grid axes of the launch
        raise AttentionError(f"attention=flash takes batch and heads up to 65535, got {tuple(q.shape[:2])}")
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise AttentionError("attention=flash has no gradient for alibi_slopes; attention=naive does")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(-1) != 1:
            raise AttentionError(
                f"{name}'s last stride must be 1, got {tensor.stride()}; pass {name}.contiguous()"
            )
    # One number per head or batch, read as contiguous by the kernels.
    alibi_slopes, sinks, kv_lengths = (
        x if x is None else x.contiguous() for x in (alibi_slopes, sinks, kv_lengths)
    )
    left, right = window or (-1, -1)
    seed = seed_on(q.device, dropout_seed) if dropout_p else None
    documents = blocks = (None, None)
    if cu_seqlens is not None:
        documents = document_bounds(cu_seqlens, q.shape[0], q.shape[2])
    if block_mask is not None:
        blocks = block_lists(block_mask, q.shape[2], k.shape[2], causal, left, right)
    tensors = (seed, alibi_slopes, *documents, kv_lengths, *blocks)
    rules = (causal, check_scale(scale, q.shape[-1]), dropout_p, left, right, softcap, tier, precise_delta)
    qkv = (q, k, v) if _packed is None else (_packed, None, None)
    if torch.compiler.is_compiling():
        out, lse, _ = flash_forward(*qkv, *tensors[:2], sinks, *tensors[2:], *rules)
    else:  # what the operator would call, without the dispatcher: saves 8 us
        out, lse, _ = _Flash.apply(*qkv, sinks, tensors, rules)
    return (out, lse) if return_lse else out


def flash_attention_packed(qkv: Tensor, **options: object) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attention` of a packed qkv (batch, length, 3, heads, head_dim), as a linear layer produces it.

    The gradient is packed like qkv, which saves stacking dq, dk and dv: 1.7 of the 117 ms of a step of GPT-2 small on
    an H200 (LOG.md). out: (batch, heads, length, head_dim). options: as for `flash_attention`.
    """
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise AttentionError(f"qkv must be (batch, length, 3, heads, head_dim), got {tuple(qkv.shape)}")
    (qkv,) = in_autocast_dtype(qkv)
    return flash_attention(*_parts(qkv.detach()), _packed=qkv, **options)


with_packed(flash_attention, flash_attention_packed)


def flash_forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    seed: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    document_starts: Tensor | None,
    document_ends: Tensor | None,
    kv_lengths: Tensor | None,
    key_blocks: Tensor | None,
    query_blocks: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    left: int,
    right: int,
    softcap: float,
    tier: str,
    precise_delta: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward operator: out like q, lse, out_low.

    lse: float32 (batch, heads, q_len), natural log-sum-exp of the scaled scores.
    q, k, v: if k and v are None, q is all three, packed (batch, length, 3, heads, head_dim).
    document_starts, document_ends: see `document_bounds`. key_blocks, query_blocks: see `block_lists`.
    out_low: with precise_delta the rounding error of out, like out; otherwise empty.
    """
    out, lse, out_low = results = _forward_like(q, k, precise_delta)
    if k is None:
        q, k, v = _parts(q)
    left, right = _sides(left, right, q, k)
    masks = (seed, alibi_slopes, sinks, document_starts, document_ends, kv_lengths, key_blocks)
    others = (seed, alibi_slopes, sinks, kv_lengths)
    has = _hopper_has(q, k, causal, left, right, softcap, document_starts, key_blocks, others)
    if takes_hopper(tier, q, has and not precise_delta, lambda: hopper().fits_forward(q, k, v)):
        bounds = {"left": left, "document_starts": document_starts, "key_blocks": key_blocks}
        hopper().forward(q, k, v, out, lse, causal=causal, scale=scale, **bounds)
    elif out.numel():
        pointers = (q, k, v, out, out_low if precise_delta else None, lse, *masks)
        given = (alibi_slopes is not None, document_starts is not None, kv_lengths is not None)
        rules = (causal, dropout_p, left, right, softcap, *given)
        launch_flash("forward", pointers, (q, k, v, out), key_blocks, q, k, scale, rules)
    return results


def flash_backward(
    d_out: Tensor,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    out_low: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    seed: Tensor | None,
    alibi_slopes: Tensor | None,
    document_starts: Tensor | None,
    document_ends: Tensor | None,
    kv_lengths: Tensor | None,
    key_blocks: Tensor | None,
    query_blocks: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    left: int,
    right: int,
    softcap: float,
    tier: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward operator: (dq like q, dk like k, dv like v, delta like lse).

    d_out, d_lse: gradients of out and of lse; d_lse may be None.
    q, k, v: as in `flash_forward`. If q is packed, so is dq, and dk and dv are empty.
    """
    dq, dk, dv, delta = results = _backward_like(q, k, v)
    if k is None:
        q, k, v = _parts(q)
        dq, dk, dv = _parts(dq)
    left, right = _sides(left, right, q, k)
    if d_out.stride(-1) != 1 or 0 in d_out.stride():  # strides of 0: an expanded gradient
        d_out = d_out.contiguous()
    if d_lse is not None:
        d_lse = d_lse.contiguous()
    masks = (seed, alibi_slopes, document_starts, document_ends, kv_lengths)
    others = (alibi_slopes, kv_lengths, out_low)
    has = _hopper_has(q, k, causal, left, right, softcap, document_starts, key_blocks, others)
    has = has and (seed is None or (left < 0 and document_starts is None and key_blocks is None))
    if takes_hopper(tier, q, has, lambda: hopper().fits_backward(q, k, v, out, d_out)):
        tensors = (d_out, d_lse, out, lse, q, k, v, dq, dk, dv, delta)
        options = {"left": left, "document_starts": document_starts, "document_ends": document_ends}
        options |= {"key_blocks": key_blocks, "query_blocks": query_blocks}
        options |= {"seed": seed, "dropout_p": dropout_p}
        hopper().backward(*tensors, causal=causal, scale=scale, **options)
        return results
    given = (alibi_slopes is not None, document_starts is not None, kv_lengths is not None)
    rules = (causal, dropout_p, left, right, softcap, *given)
    if dq.numel():
        pointers = (q, k, v, out, out_low, d_out, lse, d_lse, delta, dq, *masks, key_blocks)
        launch_flash("dq", pointers, (q, k, v, out, d_out, dq), key_blocks, q, k, scale, rules)
    if dk.numel():
        pointers = (q, k, v, d_out, lse, delta, dk, dv, *masks, query_blocks)
        launch_flash("dkdv", pointers, (q, k, v, d_out, dk, dv), query_blocks, q, k, scale, rules)
    return results


def _sides(left: int, right: int, q: Tensor, k: Tensor) -> tuple[int, int]:
    """A window's sides, -1 for a side that masks nothing; the kernels would add positions to it and might overflow
    int32. Called inside the operators: outside, torch.compile would specialise a graph for each result."""
    return left if left < k.shape[2] - 1 else -1, right if right < q.shape[2] - 1 else -1


def _hopper_has(
    q: Tensor,
    k: Tensor,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    documents: Tensor | None,
    blocks: Tensor | None,
    others: tuple[Tensor | None, ...],
) -> bool:
    """Whether the Hopper kernels support what is asked. others: tensors of features that they lack."""
    if softcap or are_forced() or any(tensor is not None for tensor in others):
        return False
    if left >= 0 or documents is not None:
        return causal and q.shape[2] == k.shape[2] and blocks is None
    if blocks is not None and causal:  # the diagonal must start at a block boundary
        return (k.shape[2] - q.shape[2]) % BLOCK_MASK_SIZE == 0
    return causal or right < 0


class _Flash(torch.autograd.Function):
    """`flash_forward` with its gradient in q, k, v and sinks. The other inputs are passed as two tuples: each
    argument of apply costs 0.3 us a call."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, tensors, rules):
        seed, alibi_slopes, *masks = tensors
        results = below_autograd(flash_forward, q, k, v, seed, alibi_slopes, sinks, *masks, *rules)
        out, lse, out_low = results
        *ctx.rules, precise_delta = rules
        ctx.save_for_backward(sinks, out, lse, out_low if precise_delta else None, q, k, v, *tensors)
        ctx.mark_non_differentiable(out_low)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, d_out, d_lse, _):
        if d_out is None and d_lse is None:
            return (None,) * 6
        sinks, out, lse, *tensors = ctx.saved_tensors
        if d_out is None:
            d_out = torch.zeros_like(out)
        dq, dk, dv, delta = in_backward(flash_backward, d_out, d_lse, out, lse, *tensors, *ctx.rules)
        if tensors[2] is None:  # k is None: the gradient is packed
            dk = dv = None
        d_sinks = None
        if sinks is not None:
            # A sink is a score with value 0: P = exp(sink - lse), dS = P * (0 - delta). lse is -inf only where the
            # sink is too, and P = 0.
            p = torch.exp(sinks.float()[:, None] - lse.clamp_min(torch.finfo(lse.dtype).min))
            d_sinks = -(p * delta).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, d_sinks, None, None

    @classmethod
    def of_operator(cls, q, k, v, seed, alibi_slopes, sinks, *rest):
        """`flash_forward` under autograd, with the operator's arguments."""
        return cls.apply(q, k, v, sinks, (seed, alibi_slopes, *rest[:5]), rest[5:])


def _parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (batch, heads, length, head_dim) of a packed (batch, length, 3, heads, head_dim), as views."""
    return qkv.permute(2, 0, 3, 1, 4).unbind()


def _forward_like(q: Tensor, k: Tensor | None, precise_delta: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised out, lse and out_low."""
    if k is None:
        q, _, _ = _parts(q)
    return empty_like(q), _empty_rows(q), empty_like(q) if precise_delta else q.new_empty(0)


def _backward_like(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised dq, dk, dv and delta."""
    if k is None:
        return q.new_empty(q.shape), q.new_empty(0), q.new_empty(0), _empty_rows(_parts(q)[0])
    return empty_like(q), empty_like(k), empty_like(v), _empty_rows(q)


def empty_like(x: Tensor) -> Tensor:
    """As torch.empty_like: dense, in the axis order of x's memory, so heads within tokens for a packed qkv."""
    like = torch.empty_like(x)
    # For overlapping views (Tensor.unfold) it may make another axis the last.
    return like if like.stride(-1) == 1 else x.new_empty(x.shape)


def _empty_rows(q: Tensor) -> Tensor:
    batch, heads, length, _ = q.shape
    return q.new_empty((batch, heads, length), dtype=torch.float32)


flash_forward = operator(flash_forward, lambda q, k, *rest: _forward_like(q, k, rest[-1]), _Flash.of_operator)
flash_backward = operator(
    flash_backward,
    lambda d_out, d_lse, out, lse, low, q, k, v, *rest: _backward_like(q, k, v),
    no_gradient=lambda: AttentionError("attention=flash has no second derivative; use attention=naive"),
)
