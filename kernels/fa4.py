"""FlashAttention-4, Dao-AILab's package `flash-attn-4`, behind our signature, if it is installed.

The strongest peer our kernels are measured against on Hopper. As called here, its backward accumulates dQ in
arbitrary order and is not bitwise repeatable; ours is.

On Hopper its backward (4.0.0b36) writes dQ in rows padded to a multiple of 16 and reads them as padded to 32: at the
head_dims 8, 16, 40 and 80 dQ was off by about 1 on an H200 (2026-11-26), and 112 with a full mask did not compile. At
32, 64, 96, 128, 192 and 256 it was right.
"""

import functools
from collections.abc import Callable

import torch

from . import documents
from .arguments import check_inputs, check_scale, in_autocast_dtype, refuse_features
from .library import HALF, needs_cuda, with_blind_rows
from .registry import AttentionError, AttentionFn, AttentionRequest, register_attention


def _refuses(request: AttentionRequest) -> str | None:
    if lacking := needs_cuda(request):
        return lacking
    if request.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {request.dtype}"
    if lacking := _head_dim_lacks(request.head_dim):
        return lacking
    try:
        import flash_attn.cute  # noqa: F401
    except ImportError as error:
        return _missing(error)
    return request.beyond({"cu_seqlens"})


def _head_dim_lacks(head_dim: int) -> str | None:
    if head_dim % 32 == 0 and head_dim <= 256:
        return None
    return (
        f"it takes a head_dim that is a multiple of 32, up to 256, not {head_dim}: at others its dQ is wrong"
    )


def _missing(error: ImportError) -> str:
    return f"it needs the package flash-attn-4 (pip install flash-attn-4): {error}"


@register_attention("fa4", refuses=_refuses, lazy=True, breaks=lambda request: True)
def load() -> AttentionFn:
    """Lazy: the package takes seconds to import. It compiles each kernel on first use."""
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise AttentionError(f"attention=fa4: {_missing(error)}") from error
    return functools.partial(
        fa4_or_documents,
        flash_attn_func=torch.compiler.disable(flash_attn_func),
        flash_attn_varlen_func=flash_attn_varlen_func,
    )


def fa4_or_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    flash_attn_func: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    flash_attn_varlen_func: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **features: object,
) -> torch.Tensor:
    """`fa4`, and `flash_attn.cute.flash_attn_varlen_func` for packed documents."""
    if lacking := _head_dim_lacks(q.shape[-1]):  # in every call: a wrong gradient raises no error
        raise AttentionError(f"attention=fa4 cannot be used here: {lacking}")
    if cu_seqlens is None:
        return fa4(q, k, v, flash_attn_func=flash_attn_func, causal=causal, scale=scale, **features)

    def attend(q, k, v, ends, longest, causal, scale):
        options = {"max_seqlen_q": longest, "max_seqlen_k": longest, "softmax_scale": scale, "causal": causal}
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, **options)[0]

    q, k, v, scale = documents.checked("fa4", (q, k, v), cu_seqlens, causal, scale, features)
    from .varlen import by_document  # imports the compiler

    return by_document(attend, q, k, v, cu_seqlens, causal, scale)


def fa4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    flash_attn_func: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    causal: bool = True,
    scale: float | None = None,
    **features: object,
) -> torch.Tensor:
    """`flash_attn.cute.flash_attn_func`; arguments, result and errors as `naive_attention`, others refused."""
    features.pop("dropout_seed", None)  # without dropout_p it means nothing, and with it the call is refused
    refuse_features("fa4", features)
    q, k, v = in_autocast_dtype(q, k, v)
    check_inputs(q, k, v, causal)
    q_len = q.shape[2]
    if causal and q_len > k.shape[2]:
        q = q[:, :, q_len - k.shape[2] :]
    by_length = (x.transpose(1, 2) for x in (q, k, v))
    out, _ = flash_attn_func(*by_length, softmax_scale=check_scale(scale, q.shape[-1]), causal=causal)
    out = out.transpose(1, 2)
    return with_blind_rows(out, q_len) if out.shape[2] < q_len else out
