"""Our kernels as the flash backend of torch's scaled_dot_product_attention, for models that call only that.

    kernels.register()
    torch.nn.attention.activate_flash_attention_impl("tilegpt")

From then on, SDPA runs them wherever it may run its own flash backend, forward and backward, until
`torch.nn.attention.restore_flash_attention_impl()`. On Hopper and Blackwell SDPA would prefer cuDNN's kernels to it,
so cuDNN's are switched off for that time, as by `torch.backends.cuda.enable_cudnn_sdp(False)`.

SDPA offers its flash backend no attn_mask and no float32. transformers' models with attn_implementation="sdpa" pass
is_causal=True and no mask where no token is padding, so in float16 or bfloat16 they run our kernels; a batch with
padding, or a model in float32, does not. Nor does one under torch.compile, where transformers always passes a mask: a
graph cannot ask whether positions begin again (a packed row), and before torch 2.14 none is left out at all. For
transformers there is `kernels.register_transformers`, which serves all of these. Unlike SDPA's backend, our kernels
refuse a head_dim below 16.
"""

from collections.abc import Callable

import torch

from ..arguments import check_scale
from ..launch import INTERPRETED
from ..registry import AttentionError
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
    out, lse = _by_batches(_attend, (dropout_p, is_causal, scale), state, q, k, v)
    unused, no_debug_mask = q.new_empty((), dtype=torch.uint64), q.new_empty(0)
    return out, lse, None, None, q.shape[2], k.shape[2], state.view(torch.uint64), unused, no_debug_mask


def _attend(options, seed, q, k, v):
    q, asked = _asked(q, seed, *options)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse, _ = flash_forward(q, k, v, *asked)
    return out, lse


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
    options = (dropout_p, is_causal, scale)
    return _by_batches(_differentiate, options, state.view(torch.int64), d_out, q, k, v, out, lse)


def _differentiate(options, seed, d_out, q, k, v, out, lse):
    q, asked = _asked(q, seed, *options)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    dq, dk, dv, _ = flash_backward(d_out, None, out, lse, None, q, k, v, *asked)
    scale = options[-1]
    return dq if scale is None or scale > 0 else _signed(dq, scale), dk, dv


def _by_batches(
    attend: Callable[..., tuple[Tensor, ...]],
    options: tuple[float, bool, float | None],
    state: Tensor,
    *tensors: Tensor,
) -> tuple[Tensor, ...]:
    """attend(options, seed, *tensors); in parts, each with its own seed, if a launch cannot have so many batches."""
    seed = state[0] if options[0] else None
    if tensors[0].shape[0] <= LARGEST_GRID:
        return attend(options, seed, *tensors)
    results = []
    for of_part in zip(*(x.split(LARGEST_GRID) for x in tensors), strict=True):
        results.append(attend(options, seed, *of_part))
        seed = None if seed is None else seed + 1
    return tuple(map(torch.cat, zip(*results, strict=True)))


def _asked(
    q: Tensor, seed: Tensor | None, dropout_p: float, causal: bool, scale: float | None
) -> tuple[Tensor, tuple[object, ...]]:
    """q, and the operators' arguments after q, k and v."""
    if scale is not None and scale <= 0:  # our kernels take positive scales only
        q, scale = _signed(q, scale), abs(scale) or 1.0
    return q, (*Tensors(seed), *Options(causal, check_scale(scale, q.shape[-1]), dropout_p))


def _signed(q: Tensor, scale: float) -> Tensor:
    """q times the sign of a scale that is 0 or negative."""
    return -q if scale < 0 else torch.zeros_like(q)
