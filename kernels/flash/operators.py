"""Flash's forward and backward as PyTorch operators, which torch.compile does not look into, and their autograd."""

import torch
from torch import Size, Tensor

from ..operators import below_autograd, in_backward, operator
from ..registry import AttentionError
from .call import Options, Tensors, unflatten
from .dispatch import hopper, kernels_for_call
from .portable import launch as portable
from .portable.tiles import are_forced


def flash_forward(
    q: Tensor, k: Tensor | None, v: Tensor | None, *asked: object
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward operator: out like q, lse, out_low.

    lse: float32 (batch, heads, q_len), natural log-sum-exp of the scaled scores.
    q, k, v: if k and v are None, q is all three, packed (batch, length, 3, heads, head_dim).
    asked: the fields of Tensors and Options.
    out_low: with precise_delta the rounding error of out, like out; otherwise empty.
    """
    tensors, options = unflatten(asked)
    out, lse, out_low = results = _empty_results(q, k, options.precise_delta)
    q, k, v = _unpacked(q, k, v)
    fits = lambda: hopper().fits_forward(q, k, v)  # noqa: E731
    kernels, options = kernels_for_call("forward", q, k, tensors, options, are_forced(), fits)
    if kernels == "hopper":
        hopper().forward(q, k, v, out, out_low, lse, tensors, options)
    else:
        portable.forward(q, k, v, out, out_low, lse, tensors, options)
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
    *asked: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward operator: (dq like q, dk like k, dv like v, delta like lse).

    d_out, d_lse: gradients of out and of lse; d_lse may be None. out, lse: lse contiguous.
    q, k, v, asked: as in `flash_forward`. If q is packed, so is dq, and dk and dv are empty.
    out_low: needed with precise_delta.
    """
    tensors, options = unflatten(asked)
    dq, dk, dv, delta = results = _empty_gradients(lse, q, k, v)
    if k is None:
        dq, dk, dv = parts(dq)
    q, k, v = _unpacked(q, k, v)
    strides = d_out.stride()
    if strides[3] != 1 or 0 in strides:  # 0: an expanded gradient
        d_out = d_out.contiguous()
    if d_lse is not None:
        d_lse = d_lse.contiguous()
    fits = lambda: hopper().fits_backward(q, k, v, out, d_out)  # noqa: E731
    kernels, options = kernels_for_call("backward", q, k, tensors, options, are_forced(), fits)
    if kernels == "hopper":
        hopper().backward(d_out, d_lse, out, out_low, lse, q, k, v, dq, dk, dv, delta, tensors, options)
    else:
        portable.backward(d_out, d_lse, out, out_low, lse, q, k, v, dq, dk, dv, delta, tensors, options)
    return results


class FlashAttention(torch.autograd.Function):
    """`flash_forward` with the gradients of q, k, v and sinks. All else is passed as two tuples, since each argument
    of apply costs 0.3 us a call; the first of them has the sinks too."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, tensors, options):
        out, lse, out_low = results = below_autograd(flash_forward, q, k, v, *tensors, *options)
        ctx.options = options
        ctx.save_for_backward(out, lse, out_low if options.precise_delta else None, q, k, v, *tensors)
        ctx.mark_non_differentiable(out_low)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, d_out, d_lse, _):
        if d_out is None and d_lse is None:
            return (None,) * 6
        saved = ctx.saved_tensors
        if d_out is None:
            d_out = torch.zeros_like(saved[0])
        dq, dk, dv, delta = in_backward(flash_backward, d_out, d_lse, *saved, *ctx.options)
        if dq.dim() == 5:  # packed
            dk = dv = None
        d_sinks = None
        if ctx.needs_input_grad[3]:
            _, lse, _, _, _, _, *tensors = saved
            sinks = Tensors(*tensors).sinks
            assert sinks is not None
            # A sink is a score with value 0: P = exp(sink - lse), dS = P * (0 - delta). lse is -inf only where the
            # sink is too, and P = 0. With a huge sink, lse is rounded by more than float32's exp can take.
            p = torch.exp((sinks.float()[:, None] - lse.clamp_min(torch.finfo(lse.dtype).min)).clamp_max(0))
            d_sinks = -(p * delta).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, d_sinks, None, None

    @classmethod
    def apply(cls, *inputs):
        """The base's, but for its error under torch.func, which tells how to change this class. Costs 0.2 us."""
        try:
            return super().apply(*inputs)
        except RuntimeError as error:
            if not torch._C._are_functorch_transforms_active():
                raise
            no_transforms = "attention=flash has nothing under torch.func (vmap, grad); use attention=naive"
            raise AttentionError(no_transforms) from error

    @classmethod
    def of_operator(cls, q, k, v, *asked):
        """`flash_forward` under autograd, with the operator's arguments."""
        tensors, options = unflatten(asked)
        return cls.apply(q, k, v, tensors.sinks, tensors, options)


def parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (batch, heads, length, head_dim) of a packed (batch, length, 3, heads, head_dim), as views."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    return q, k, v


def _unpacked(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return parts(q) if k is None or v is None else (q, k, v)


def empty_like(x: Tensor) -> Tensor:
    """As torch.empty_like: dense, in the axis order of x's memory, so heads within tokens for a packed qkv."""
    like = torch.empty_like(x)
    # For overlapping views (Tensor.unfold) it may make another axis the last.
    return like if like.stride(-1) == 1 else x.new_empty(x.shape)


def _empty_results(q: Tensor, k: Tensor | None, precise_delta: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised out, lse and out_low."""
    if k is None:
        q, _, _ = parts(q)
    batch, heads, length, _ = q.shape
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    return empty_like(q), lse, empty_like(q) if precise_delta else q.new_empty(0)


def _empty_gradients(
    lse: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised dq, dk, dv and delta."""
    delta = torch.empty_like(lse)
    if k is None or v is None:
        return q.new_empty(q.shape), q.new_empty(0), q.new_empty(0), delta
    return empty_like(q), empty_like(k), empty_like(v), delta


def forward_flops(q: Size, k: Size | None, v: Size | None, *asked: object, out_shape: object = None) -> int:
    """FLOPs of `flash_forward` for FlopCounterMode, from shapes: two products of whole matrices, as torch counts its
    own attention, scores that a mask hides included."""
    return 2 * _product_flops(q, k)


def backward_flops(
    d_out: Size,
    d_lse: Size | None,
    out: Size,
    lse: Size,
    out_low: Size | None,
    q: Size,
    k: Size | None,
    *rest: object,
    out_shape: object = None,
) -> int:
    """Likewise for `flash_backward`: five products, one of them the scores once more, as torch counts its own. What
    kernels compute twice is not counted."""
    return 5 * _product_flops(q, k)


def _product_flops(q: Size, k: Size | None) -> int:
    """FLOPs of the product of a whole q and k (shapes), or of an equally large one. k None: q is packed."""
    if k is None:
        batch, length, _, heads, head_dim = q
        return 2 * batch * heads * length * length * head_dim
    batch, heads, length, head_dim = q
    return 2 * batch * heads * length * k[2] * head_dim


flash_forward = operator(
    flash_forward,
    lambda q, k, v, *asked: _empty_results(q, k, unflatten(asked)[1].precise_delta),
    FlashAttention.of_operator,
    rest=(Tensors, Options),
    flops=forward_flops,
)
flash_backward = operator(
    flash_backward,
    lambda d_out, d_lse, out, lse, out_low, q, k, v, *asked: _empty_gradients(lse, q, k, v),
    no_gradient=lambda: AttentionError("attention=flash has no second derivative; use attention=naive"),
    rest=(Tensors, Options),
    flops=backward_flops,
)
