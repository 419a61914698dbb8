"""Our kernels as the flash backend of torch's scaled_dot_product_attention, for models that call only that.

    kernels.register()
    torch.nn.attention.activate_flash_attention_impl("tilegpt")

From then on, SDPA runs them wherever it may run its own flash backend, forward and backward, until
`torch.nn.attention.restore_flash_attention_impl()`. On Hopper and Blackwell SDPA would prefer cuDNN's kernels to it,
so cuDNN's are switched off for that time, as by `torch.backends.cuda.enable_cudnn_sdp(False)`.

SDPA offers its flash backend no attn_mask and no float32. transformers' models with attn_implementation="sdpa" pass
is_causal=True and no mask where no token is padding, so in float16 or bfloat16 they run our kernels; a batch with
padding, or a model in float32, does not. Unlike that backend, our kernels refuse a head_dim below 16.
"""

from collections.abc import Callable

import torch

from ..arguments import check_scale
from ..registry import AttentionError
from . import refuses_inputs
from .api import INTERPRETED, flash_backward, flash_forward

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
    """Replace the two operators behind SDPA's flash backend, for tensors of one device type."""
    library = torch.library.Library("aten", "IMPL", dispatch_key)
    library.impl("_scaled_dot_product_flash_attention", _forward)
    library.impl("_scaled_dot_product_flash_attention_backward", _backward)
    return Override(library)


def _forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    reason = refuses_inputs(q.device, q.dtype, q.shape[-1], INTERPRETED)
    if q.shape[1] > LARGEST_GRID:
        reason = f"it takes up to {LARGEST_GRID} heads, not {q.shape[1]}"
    if reason is not None or return_debug_mask:
        raise AttentionError(f"{NAME} under SDPA: {reason or 'it has no debug mask'}")
    # The seed comes from the global generator, as in SDPA. Two words, because torch expects to save two.
    state = q.new_empty(2, dtype=torch.int64)
    if dropout_p:
        state.random_()

    def attend(part, q, k, v):
        q, positive = _with_positive_scale(q, scale)
        rules = _rules(state, part, dropout_p, is_causal, positive, q.shape[-1], sinks=(None,))
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return flash_forward(q, k, v, *rules, False)[:2]

    out, lse = _by_batches(attend, q, k, v)
    unused, no_debug_mask = q.new_empty((), dtype=torch.uint64), q.new_empty(0)
    return out, lse, None, None, q.shape[2], k.shape[2], state.view(torch.uint64), unused, no_debug_mask


def _backward(
    d_out,
    q,
    k,
    v,
    out,
    lse,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    state,
    unused,
    *,
    scale=None,
):
    state = state.view(torch.int64)

    def attend(part, d_out, q, k, v, out, lse):
        q, positive = _with_positive_scale(q, scale)
        rules = _rules(state, part, dropout_p, is_causal, positive, q.shape[-1])
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        dq, dk, dv, _ = flash_backward(d_out, None, out, lse, None, q, k, v, *rules)
        return _with_positive_scale(dq, scale)[0], dk, dv

    return _by_batches(attend, d_out, q, k, v, out, lse)


def _with_positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """q and a scale that give the same scores; our kernels take positive scales only. For dq, the gradient in q."""
    if scale is None or scale > 0:
        return q, scale
    return (torch.zeros_like(q), 1.0) if scale == 0 else (-q, -scale)


def _by_batches(attend: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """attend(0, *tensors); or attend(part, ...) of parts of as many batches as a launch can have, joined."""
    if tensors[0].shape[0] <= LARGEST_GRID:
        return attend(0, *tensors)
    parts = zip(*(x.split(LARGEST_GRID) for x in tensors), strict=True)
    results = [attend(part, *of_part) for part, of_part in enumerate(parts)]
    return tuple(map(torch.cat, zip(*results, strict=True)))


def _rules(
    state: Tensor,
    part: int,
    dropout_p: float,
    causal: bool,
    scale: float | None,
    head_dim: int,
    sinks: tuple[None, ...] = (),
) -> tuple[object, ...]:
    """The operators' arguments after q, k and v. Only the forward has sinks."""
    seed = None
    if dropout_p:
        seed = state[0] + part if part else state[0]
    absent = (None,) * 5
    return seed, None, *sinks, *absent, causal, check_scale(scale, head_dim), dropout_p, -1, -1, 0.0, "auto"
