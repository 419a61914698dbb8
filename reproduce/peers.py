"""Attentions that take part in `attention` besides the registered ones: other forms of the baseline, one kernel that
stores the probabilities, library attention with padding, FlashAttention-4 with repeatable gradients, approximations.

Each is made anew for a workload: its mask is built once, and what is compiled is compiled for that shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import AttentionError, fusion, get_attention, resolve_attention
from kernels.library import compiled_flex_attention

from .standard import CUT, cut_causal, masked_from, standard_attention
from .standard import NAME as STANDARD

if TYPE_CHECKING:
    from .attention import Inputs, Workload

OURS, BASELINE = "flash", "standard"
PORTABLE = "flash, portable"  # the Triton kernels, also on a Hopper GPU
COMPILED = f"{STANDARD}+compiled"
STORED_P = "stored_p"
EFFICIENT_MASK, CUDNN_MASK, FLEX_MASK = "sdpa_efficient+mask", "sdpa_cudnn+mask", "flex+mask"
DETERMINISTIC = "fa4+deterministic"
LINFORMER, LINEAR = "linformer", "linear"
APPROXIMATE = (LINFORMER, LINEAR)
MASK_NAMES = {"plain": "plain", "padding": "key padding", "padding+dropout": "key padding and dropout"}
RANK = 256  # Linformer's projected length, as in FlashAttention's comparison
# (inputs, number of the turn) -> out
Attend = Callable[["Inputs", int], torch.Tensor]


def standard() -> Attend:
    return functools.partial(_standard, standard_attention)


def compiled() -> Attend:
    torch.compiler.reset()  # else after eight shapes it would stay eager
    return functools.partial(_standard, fusion.compiled(standard_attention, dynamic=False))


def _standard(function: Callable[..., torch.Tensor], inputs: Inputs, number: int) -> torch.Tensor:
    return function(*inputs.qkv, inputs.bias(), inputs.dropout_p)


def standard_cut() -> Attend:
    """Standard attention that reads its mask where it hides something alone, which takes knowing what it looks like:
    the padding from the shortest sequence's end on; a causal mask as `cut_causal` does."""
    # All inputs of a workload have the same lengths, and reading them waits for the device.
    shortest: list[int] = []

    def attend(inputs: Inputs, number: int) -> torch.Tensor:
        (q, k, v), bias = inputs.qkv, inputs.bias()
        if inputs.workload.causal:
            return cut_causal(q, k, v, bias, inputs.dropout_p)
        if not shortest:
            shortest.append(int(inputs.kv_lengths.min()))
        return masked_from(q, k, v, bias[..., shortest[0] :], shortest[0], inputs.dropout_p)

    return attend


def stored_p() -> Attend:
    from kernels.history.stored_p import stored_p_attention

    def attend(inputs: Inputs, number: int) -> torch.Tensor:
        dropout = {"dropout_p": inputs.dropout_p, "dropout_seed": number}
        return stored_p_attention(*inputs.qkv, kv_lengths=inputs.kv_lengths, **dropout)

    return attend


def sdpa_with_mask(backend: SDPBackend) -> Attend:
    """torch's SDPA with the padding as its attn_mask, which its flash kernels do not take."""

    def attend(inputs: Inputs, number: int) -> torch.Tensor:
        q, k, v = inputs.qkv
        mask = inputs.bias().expand(*q.shape[:3], -1)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=inputs.dropout_p)

    return attend


def flex_with_mask() -> Attend:
    """FlexAttention with the padding as its block mask, made once as in training."""
    from torch.nn.attention.flex_attention import create_block_mask

    masks: list[object] = []

    def attend(inputs: Inputs, number: int) -> torch.Tensor:
        q, lengths = inputs.qkv[0], inputs.kv_lengths
        if not masks:  # all inputs of a workload have the same lengths
            visible = lambda batch, head, row, column: column < lengths[batch]  # noqa: E731
            size = (q.shape[0], None, q.shape[2], q.shape[2])
            masks.append(create_block_mask(visible, *size, device=q.device))
        return compiled_flex_attention()(*inputs.qkv, block_mask=masks[0])

    return attend


def fa4_deterministic() -> Attend:
    fa4 = get_attention("fa4")
    repeatable = functools.partial(fa4.keywords["flash_attn_func"], deterministic=True)
    attend = functools.partial(fa4, flash_attn_func=repeatable)
    return lambda inputs, number: attend(*inputs.qkv, causal=inputs.workload.causal)


def linformer() -> Attend:
    """Linformer (Wang et al. 2020): keys and values projected to RANK rows. Its projections get no gradients here,
    which favours it."""
    projections: list[torch.Tensor] = []

    def attend(inputs: Inputs, number: int) -> torch.Tensor:
        q, k, v = inputs.qkv
        if not projections:
            shape = (2, RANK, q.shape[2])
            projections.extend(torch.randn(shape, dtype=q.dtype, device=q.device) / math.sqrt(RANK))
        return standard_attention(q, projections[0] @ k, projections[1] @ v)

    return attend


def linear() -> Attend:
    """Linear attention (Katharopoulos et al. 2020) with the features elu(x) + 1."""

    def attend(inputs: Inputs, number: int) -> torch.Tensor:
        q, k, v = inputs.qkv
        q, k = F.elu(q) + 1, F.elu(k) + 1
        # Divided by the length, so that the sums stay within float16.
        k = k / k.shape[2]
        return (q @ (k.mT @ v)) / (q @ k.sum(2)[..., None])

    return attend


MAKE: dict[str, Callable[[], Attend]] = {
    STANDARD: standard,
    COMPILED: compiled,
    CUT: standard_cut,
    STORED_P: stored_p,
    EFFICIENT_MASK: functools.partial(sdpa_with_mask, SDPBackend.EFFICIENT_ATTENTION),
    CUDNN_MASK: functools.partial(sdpa_with_mask, SDPBackend.CUDNN_ATTENTION),
    FLEX_MASK: flex_with_mask,
    DETERMINISTIC: fa4_deterministic,
    LINFORMER: linformer,
    LINEAR: linear,
}


def suits(name: str, workload: Workload) -> bool:
    """Whether the contender is meant for the workload."""
    if workload.figure == "stored":
        return name in (STANDARD, COMPILED, STORED_P, "flash")
    if name == STORED_P:
        return False
    if name == CUT:
        return workload.causal or workload.mask != "plain"
    if name in (EFFICIENT_MASK, CUDNN_MASK, FLEX_MASK):
        return workload.mask != "plain" and not (name == FLEX_MASK and "dropout_p" in workload.features)
    return name not in APPROXIMATE or (workload.figure == "fa1" and workload.mask == "plain")


def refuse(name: str, workload: Workload, dtype: torch.dtype, device: torch.device) -> None:
    """Raise AttentionError if the contender cannot take the workload."""
    if name in (COMPILED, EFFICIENT_MASK, CUDNN_MASK, FLEX_MASK):
        if device.type != "cuda":
            raise AttentionError(f"{name} needs a CUDA device, not {device.type}")
    elif name == STORED_P:
        from kernels.history.stored_p import refuses

        if reason := refuses(device, dtype, workload.head_dim, workload.length):
            raise AttentionError(f"{name}: {reason}")
    elif name not in (STANDARD, CUT, *APPROXIMATE):
        request = {"device": device, "dtype": dtype, "head_dim": workload.head_dim}
        resolve_attention(name.partition("+")[0], **request, **workload.features)
