"""Our kernels as the flash backend of torch's scaled_dot_product_attention, for models that call only that.

    kernels.register()
    torch.nn.attention.activate_flash_attention_impl("tilegpt")

From then on, SDPA runs them wherever it would have run its own flash backend, forward and backward, until
`torch.nn.attention.restore_flash_attention_impl()`. Unlike that backend, they refuse a head_dim below 16.
"""

import torch

from ..arguments import check_scale
from ..launch import INTERPRETED
from ..registry import AttentionError
from .call import Options, Tensors
from .dispatch import refuses_inputs
from .operators import flash_backward, flash_forward

NAME = "tilegpt"
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

    def remove(self) -> None:
        self.library._destroy()


def activate(dispatch_key: str = "CUDA") -> Override:
    """Replace the two operators behind SDPA's flash backend, for tensors of one device type."""
    library = torch.library.Library("aten", "IMPL", dispatch_key)
    library.impl("_scaled_dot_product_flash_attention", _forward)
    library.impl("_scaled_dot_product_flash_attention_backward", _backward)
    return Override(library)


def _forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    reason = refuses_inputs(q.device, q.dtype, q.shape[-1], INTERPRETED)
    if reason is not None or return_debug_mask:
        raise AttentionError(f"{NAME} under SDPA: {reason or 'it has no debug mask'}")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    # The seed comes from the global generator, as in SDPA. Two words, because torch expects to save two.
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if dropout_p:
        state.random_()
    asked = _asked(state, dropout_p, is_causal, scale, q.shape[-1])
    out, lse, _ = flash_forward(q, k, v, *asked)
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
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    asked = _asked(state.view(torch.int64), dropout_p, is_causal, scale, q.shape[-1])
    dq, dk, dv, _ = flash_backward(d_out, None, out, lse, None, q, k, v, *asked)
    return dq, dk, dv


def _asked(
    state: Tensor, dropout_p: float, causal: bool, scale: float | None, head_dim: int
) -> tuple[object, ...]:
    """The operators' arguments after q, k and v."""
    seed = state[0] if dropout_p else None
    return *Tensors(seed), *Options(causal, check_scale(scale, head_dim), dropout_p)
