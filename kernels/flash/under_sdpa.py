"""Our kernels as torch's flash attention, for models that call scaled_dot_product_attention or varlen_attn.

    kernels.register()
    torch.nn.attention.activate_flash_attention_impl("tilegpt")

From then on, they run wherever torch may run its own flash attention, forward and backward, until
`torch.nn.attention.restore_flash_attention_impl()`: under SDPA, with nested tensors too, and under
`torch.nn.attention.varlen.varlen_attn`, as torchtitan packs documents, though not with its block_table. On Hopper and
Blackwell SDPA would prefer cuDNN's kernels, so those are switched off for that time, as by
`torch.backends.cuda.enable_cudnn_sdp(False)`.

SDPA offers its flash backend no attn_mask and no float32. transformers' models with attn_implementation="sdpa" pass
is_causal=True and no mask where no token is padding, so in float16 or bfloat16 they run our kernels; a batch with
padding, or a model in float32, does not. Nor does one under torch.compile, where transformers always passes a mask: a
graph cannot ask whether positions begin again (a packed row), and before torch 2.14 transformers never omits one. For
transformers there is `kernels.register_transformers`, which serves all of these. Unlike SDPA's backend, our kernels
refuse a head_dim below 16. For 70,000 sequences, more than a grid's axis takes, torch 2.15 calls no flash attention.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..arguments import check_scale
from ..launch import INTERPRETED
from ..registry import AttentionError
from . import ragged
from .call import Options, Tensors
from .dispatch import refuses_inputs
from .operators import flash_backward, flash_forward

NAME = "tilegpt"
LARGEST_GRID = 65535  # of CUDA's second and third axes
Tensor = torch.Tensor


def register() -> None:
    """Register the kernels with PyTorch as the flash attention "tilegpt"; nothing changes until it is activated.

    Raises:
        AttentionError: this torch has no register_flash_attention_impl.
    """
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise AttentionError(
            f"torch {torch.__version__} has no register_flash_attention_impl: use 2.11 or later"
        )
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=activate)


class Override:
    """Keeps our implementations of torch's operators active until `remove` is called."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library = library
        self.cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)

    def remove(self) -> None:
        self.library._destroy()
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn)


def activate(dispatch_key: str = "CUDA") -> Override:
    """Replace torch's operators of flash attention, for tensors of one device type."""
    library = torch.library.Library("aten", "IMPL", dispatch_key)
    library.impl("_scaled_dot_product_flash_attention", _forward)
    library.impl("_scaled_dot_product_flash_attention_backward", _backward)
    library.impl("_flash_attention_forward", _varlen_forward)
    library.impl("_flash_attention_backward", _varlen_backward)
    if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):  # torch 2.12 and later
        library.impl("_flash_attention_forward_no_dropout_inplace", _varlen_forward_into)
    return Override(library)


class Asked(NamedTuple):
    """What a call of torch's operators asks besides tensors."""

    dropout_p: float
    causal: bool
    scale: float | None
    left: int = -1
    right: int = -1


def _forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _check(q, k, v, q.shape[1], return_debug_mask)
    state = _draw(q, dropout_p)
    out, lse = _by_batches(_attend, Asked(dropout_p, is_causal, scale), state, q, k, v)
    unused, no_debug_mask = q.new_empty((), dtype=torch.uint64), q.new_empty(0)
    return out, lse, None, None, q.shape[2], k.shape[2], state.view(torch.uint64), unused, no_debug_mask


def _backward(
    d_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, state, unused, *,
    scale=None,
):  # fmt: skip
    asked = Asked(dropout_p, is_causal, scale)
    return _by_batches(_differentiate, asked, state.view(torch.int64), d_out, q, k, v, out, lse)


def _varlen_forward(
    q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, num_splits=None, **others,
):  # fmt: skip
    """(tokens, heads, head_dim) with cum_seq_q and cum_seq_k, without them (batch, length, heads, head_dim).

    num_splits, how to share out the work, changes no result.
    """
    _check(q, k, v, q.shape[-2], return_debug_mask, **others)
    if (cum_seq_q is None) != (cum_seq_k is None) or (cum_seq_q is None and seqused_k is not None):
        raise AttentionError(f"{NAME} as varlen_attn: it needs cu_seq_q and cu_seq_k")
    numbers = [len(x) - 1 for x in (cum_seq_q, cum_seq_k) if x is not None]
    numbers += [] if seqused_k is None else [len(seqused_k)]
    if len(set(numbers)) > 1:  # the kernels would read beyond the shorter one
        raise AttentionError(
            f"{NAME} as varlen_attn: offsets and seqused_k of {numbers} sequences, which must be equal"
        )
    asked = _asked_of_window(dropout_p, is_causal, scale, window_size_left, window_size_right)
    state = _draw(q, dropout_p)
    if cum_seq_q is None:
        out, lse = _by_batches(_attend, asked, state, *(x.transpose(1, 2) for x in (q, k, v)))
        out = out.transpose(1, 2)
    else:
        positive, options = _options(q, asked)
        seed = state[0] if dropout_p else None
        out, lse = ragged.forward(positive, k, v, seed, (cum_seq_q, cum_seq_k, seqused_k), options)
    return out, lse, state.view(torch.uint64), q.new_empty((), dtype=torch.uint64), q.new_empty(0)


def _varlen_forward_into(out, *arguments, **options):
    result, lse, *_ = _varlen_forward(*arguments, **options)
    out.copy_(result)
    return lse


def _varlen_backward(
    d_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, state, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    asked = _asked_of_window(dropout_p, is_causal, scale, window_size_left, window_size_right)
    state = state.view(torch.int64)
    if cum_seq_q is None:
        heads_first = (x.transpose(1, 2) for x in (d_out, q, k, v, out))
        gradients = _by_batches(_differentiate, asked, state, *heads_first, lse)
        return tuple(x.transpose(1, 2) for x in gradients)
    positive, options = _options(q, asked)
    seed = state[0] if dropout_p else None
    offsets = cum_seq_q, cum_seq_k, None
    dq, dk, dv = ragged.backward(d_out, positive, k, v, out, lse, seed, offsets, options)
    return _signed(dq, scale), dk, dv


def _check(q: Tensor, k: Tensor, v: Tensor, heads: int, return_debug_mask: bool, **others: object) -> None:
    reason = refuses_inputs(q.device, q.dtype, q.shape[-1], INTERPRETED)
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:  # varlen_attn does not check, nor do the kernels
        reason = f"q, k and v must share a head_dim, got {q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}"
    if heads > LARGEST_GRID:
        reason = f"it takes up to {LARGEST_GRID} heads, not {heads}"
    if return_debug_mask:
        reason = "it has no debug mask"
    if unknown := [name for name, value in others.items() if value is not None]:
        reason = f"it does not support {unknown[0]}"
    if reason is not None:
        raise AttentionError(f"{NAME} as torch's flash attention: {reason}")


def _draw(q: Tensor, dropout_p: float) -> Tensor:
    """A seed from the global generator, as in SDPA. Two words, because torch expects to save two."""
    state = q.new_empty(2, dtype=torch.int64)
    return state.random_() if dropout_p else state


def _attend(asked: Asked, seed: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, options = _options(q, asked)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse, _ = flash_forward(q, k, v, *Tensors(seed), *options)
    return out, lse


def _differentiate(
    asked: Asked,
    seed: Tensor | None,
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    q, options = _options(q, asked)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    dq, dk, dv, _ = flash_backward(d_out, None, out, lse, None, q, k, v, *Tensors(seed), *options)
    return _signed(dq, asked.scale), dk, dv


def _by_batches(
    attend: Callable[..., tuple[Tensor, ...]], asked: Asked, state: Tensor, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """attend(asked, seed, *tensors); in parts, each with its own seed, if a launch cannot take that many batches."""
    seed = state[0] if asked.dropout_p else None
    if tensors[0].shape[0] <= LARGEST_GRID:
        return attend(asked, seed, *tensors)
    results = []
    for of_part in zip(*(x.split(LARGEST_GRID) for x in tensors), strict=True):
        results.append(attend(asked, seed, *of_part))
        seed = None if seed is None else seed + 1
    return tuple(map(torch.cat, zip(*results, strict=True)))


def _asked_of_window(
    dropout_p: float, causal: bool, scale: float | None, left: int | None, right: int | None
) -> Asked:
    left, right = (-1 if side is None else side for side in (left, right))
    return Asked(dropout_p, causal or right == 0, scale, left, right)


def _options(q: Tensor, asked: Asked) -> tuple[Tensor, Options]:
    """q, and the operators' options; their scale is positive, and q takes its sign."""
    scale, positive = asked.scale, asked.scale
    if scale is not None and scale <= 0:
        positive = abs(scale) or 1.0
    options = Options(
        asked.causal, check_scale(positive, q.shape[-1]), asked.dropout_p, asked.left, asked.right
    )
    return _signed(q, scale), options


def _signed(x: Tensor, scale: float | None) -> Tensor:
    """x times the sign of the scale."""
    if scale is None or scale > 0:
        return x
    return -x if scale < 0 else torch.zeros_like(x)
