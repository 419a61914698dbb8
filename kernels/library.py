"""PyTorch's attention functions behind our signature: the peers that our kernels are measured against.

`sdpa` lets torch.nn.functional.scaled_dot_product_attention choose; `sdpa_flash`, `sdpa_cudnn`,
`sdpa_efficient` and `sdpa_math` force one of its backends; `flex` is torch.nn.attention.flex_attention.

SDPA's `is_causal` is aligned top-left, ours bottom-right. With more keys than queries a mask is passed instead; with
more queries than keys the first queries, which see nothing, are cut off, and what is left is square. Packed documents
go another way: documents.py.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import documents, fusion
from .arguments import (
    check_dropout,
    check_inputs,
    check_scale,
    in_autocast_dtype,
    refuse_features,
)
from .registry import AttentionError, AttentionRequest, refusal_of_call, register_attention
from .versions import cuda_not

HALF = (torch.float16, torch.bfloat16)
NO_KERNEL = ("No available kernel", "No viable backend")  # SDPA's errors where the forced backend cannot run


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    dropout_p: float,
    backend: SDPBackend | None,
) -> torch.Tensor:
    q_len, kv_len = q.shape[2], k.shape[2]
    if causal and q_len > kv_len:
        seeing = _sdpa(q[:, :, q_len - kv_len :], k, v, causal, scale, dropout_p, backend)
        return with_blind_rows(seeing, q_len)
    if not q_len or not k.numel():
        backend = SDPBackend.MATH  # on CUDA the others take no empty tensors
    elif backend is SDPBackend.EFFICIENT_ATTENTION and q.shape[1] != k.shape[1]:
        group = q.shape[1] // k.shape[1]  # query heads per key head; this backend has no grouped heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    mask, is_causal = None, False
    if causal and q_len == kv_len:
        # Not is_causal = q_len == kv_len: with dynamic lengths that is symbolic in torch.compile, and SDPA rejects
        # it.
        is_causal = True
    elif causal and q_len > 1:  # a single query, as in decoding, sees every key
        if backend is SDPBackend.FLASH_ATTENTION and q.device.type == "cuda":
            raise AttentionError(
                "attention=sdpa_flash takes no mask, so causal needs q_len == kv_len; use attention=sdpa"
            )
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - q_len)
    options: dict[str, Any] = {
        "attn_mask": mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
    }
    if q.shape[1] != k.shape[1]:  # a constant, for the same reason
        options["enable_gqa"] = True
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, **options)


def with_blind_rows(out: torch.Tensor, q_len: int) -> torch.Tensor:
    """The output for q_len queries, of which the first see no key and give 0, from that for the others.

    Masked instead, such rows and those near them are wrong in cuDNN 9, which SDPA prefers on Hopper.
    """
    return F.pad(out, (0, 0, q_len - out.shape[2], 0))


def _sdpa_with_dropout(
    *arguments: Any, dropout_seed: int | torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """SDPA with torch's default generator, which it draws from, seeded for the duration of the call.

    A seed on the device costs a synchronisation.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # torch.manual_seed seeds the generators of all devices, but only those named above are restored.
        manual_seed = torch.manual_seed
        if device.type == "cpu":
            manual_seed = torch.default_generator.manual_seed
        elif device.type == "cuda":
            manual_seed = torch.cuda.default_generators[device.index].manual_seed
        assert dropout_seed is not None  # check_dropout
        manual_seed(int(dropout_seed))
        return _sdpa(*arguments)


# Looked up by name: a SDPBackend cannot be pickled, and a model with its attention should be.
_SDPA: dict[str, SDPBackend | None] = {
    "sdpa": None,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    name: str,
    causal: bool = True,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    **features: object,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention, with the backend that `name` forces, or its own choice.

    Arguments, result and errors as `naive_attention`, other features refused. The dropout mask is torch's own. Under
    torch.compile it comes from the default generator's state, which trainers seed, not from dropout_seed.
    """
    refuse_features(name, features)
    q, k, v = in_autocast_dtype(q, k, v)
    check_inputs(q, k, v, causal)
    check_dropout(dropout_p, dropout_seed)
    arguments = (q, k, v, causal, check_scale(scale, q.shape[-1]), dropout_p, _SDPA[name])
    try:
        # Seeding would break the graph under torch.compile; there the default generator's current state is used.
        if dropout_p == 0.0 or torch.compiler.is_compiling():
            return _sdpa(*arguments)
        return _sdpa_with_dropout(*arguments, dropout_seed=dropout_seed, device=q.device)
    except RuntimeError as error:
        # What depends on lengths, on dropout's probability or on PyTorch's version was not refused earlier.
        if not any(words in str(error) for words in NO_KERNEL):
            raise
        call = f"{q.dtype} q {tuple(q.shape)} and k {tuple(k.shape)} on {q.device.type}"
        raise AttentionError(
            f"attention={name} has no kernel for {call} (PyTorch's warnings say why); use attention=sdpa"
        ) from error


def sdpa_or_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    name: str,
    cu_seqlens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """`sdpa`, within packed documents if there are any, and then without dropout."""
    if cu_seqlens is None:
        return sdpa(q, k, v, name=name, **options)
    backend = _SDPA[name]
    only = nullcontext() if backend is None else sdpa_kernel(backend)
    return documents.sdpa(q, k, v, cu_seqlens, name=name, only=only, **options)


def _beyond(request: AttentionRequest, supported: set[str], masks: bool = True) -> str | None:
    """A reason to refuse; with packed documents no other feature is supported. Offsets of the keys need a mask, which
    torch's FlashAttention does not take on a GPU."""
    if "cu_seqlens" not in request.features:
        return request.beyond(supported)
    reason = request.beyond({"cu_seqlens", "cu_seqlens_k"} if masks else {"cu_seqlens"})
    return reason and f"{reason} with cu_seqlens (packed documents)"


def _refuses_any(request: AttentionRequest) -> str | None:
    return _beyond(request, {"dropout_p"})


def _refuses_flash(request: AttentionRequest) -> str | None:
    if request.device.type == "cuda":
        if request.dtype not in HALF:
            return f"it takes float16 and bfloat16, not {request.dtype}"
        if request.head_dim > 256:
            return f"it takes head_dim up to 256, not {request.head_dim}"
    elif "dropout_p" in request.features:
        return f"it has no dropout on {request.device.type}"
    return _beyond(request, {"dropout_p"}, masks=request.device.type != "cuda")


def _refuses_efficient(request: AttentionRequest) -> str | None:
    if lacking := needs_cuda(request):
        return lacking
    if request.dtype not in (*HALF, torch.float32):
        return f"it takes float16, bfloat16 and float32, not {request.dtype}"
    multiple = 4 if request.dtype is torch.float32 else 8
    if request.head_dim % multiple:
        return (
            f"it takes a head_dim that is a multiple of {multiple} in {request.dtype}, not {request.head_dim}"
        )
    return _beyond(request, {"dropout_p"})


def _refuses_cudnn(request: AttentionRequest) -> str | None:
    if lacking := needs_cuda(request):
        return lacking
    if request.dtype not in HALF:
        return f"it takes float16 and bfloat16, not {request.dtype}"
    if request.head_dim % 8 or request.head_dim > 128:
        return f"it takes a head_dim that is a multiple of 8, up to 128, not {request.head_dim}"
    return request.beyond({"dropout_p"})


def _breaks(request: AttentionRequest) -> bool:
    return "cu_seqlens" in request.features  # by torch's varlen_attn, see varlen.by_document


def needs_cuda(request: AttentionRequest) -> str | None:
    return None if request.device.type == "cuda" else f"it needs {cuda_not(request.device.type)}"


for _name, _refuses in (
    ("sdpa", _refuses_any),
    ("sdpa_flash", _refuses_flash),
    ("sdpa_cudnn", _refuses_cudnn),
    ("sdpa_efficient", _refuses_efficient),
    ("sdpa_math", _refuses_any),
):
    register_attention(_name, refuses=_refuses, breaks=_breaks)(
        functools.partial(sdpa_or_documents, name=_name)
    )


def _refuses_flex(request: AttentionRequest) -> str | None:
    if lacking := needs_cuda(request):
        return lacking
    if request.dtype not in (*HALF, torch.float32):  # it accumulates in float32
        return f"it takes float16, bfloat16 and float32, not {request.dtype}"
    if request.head_dim < 16:
        return f"it takes a head_dim of at least 16, not {request.head_dim}"
    return _beyond(request, {"window", "softcap", "alibi_slopes", "return_lse"})


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """FlexAttention compiled; uncompiled it would materialise the scores. `flex` calls this instead of holding the
    result, since a compiled function cannot be pickled."""
    from torch.nn.attention.flex_attention import flex_attention

    return fusion.compiled(flex_attention, dynamic=False)


def _flex_attention(q: torch.Tensor) -> Callable[..., Any]:
    """The form that serves q: within a compiled model it is compiled with that. On a CPU, where only direct calls get
    here, not compiled, as torch 2.13 does that wrongly at lengths such as 40, in a compiled model too."""
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling() or q.device.type == "cpu":
        return flex_attention
    return compiled_flex_attention()


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool = False,
    **features: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """torch's FlexAttention; arguments, result and errors as `naive_attention`, other features refused."""
    features.pop("dropout_seed", None)  # without dropout_p it means nothing, and with it the call is refused
    refuse_features("flex", features)
    q, k, v = in_autocast_dtype(q, k, v)
    check_inputs(q, k, v, causal)
    from torch.nn.attention.flex_attention import AuxRequest

    q_len, kv_len = q.shape[2], k.shape[2]
    offset = kv_len - q_len

    def score_mod(score, batch, head, row, column):
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if alibi_slopes is not None:
            score = score - alibi_slopes[head] * (row + offset - column).abs()
        return score

    left, right = window or (-1, -1)
    mask = _flex_mask(q_len, kv_len, causal, left, right, q.device) if causal or window else None
    out = _flex_attention(q)(
        q,
        k,
        v,
        score_mod=score_mod if softcap or alibi_slopes is not None else None,
        block_mask=mask,
        scale=check_scale(scale, q.shape[-1]),
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True) if return_lse else None,
    )
    return (out[0], out[1].lse) if return_lse else out


@functools.lru_cache(maxsize=64)
def _flex_mask(q_len: int, kv_len: int, causal: bool, left: int, right: int, device: torch.device) -> object:
    """FlexAttention's BlockMask for causal and window, cached: building one costs more than using it."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch, head, row, column):
        distance = column - (row + kv_len - q_len)
        seen = distance <= (0 if causal else kv_len)
        if left >= 0:
            seen = seen & (distance >= -left)
        if right >= 0:
            seen = seen & (distance <= right)
        return seen

    return create_block_mask(visible, None, None, q_len, kv_len, device=device)


@register_attention("flex", refuses=_refuses_flex)
def flex_or_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flex`, within packed documents if there are any."""
    try:
        if cu_seqlens is None:
            return flex(q, k, v, **options)
        return documents.flex(q, k, v, cu_seqlens, attend=_flex_attention, **options)
    except NotImplementedError as error:  # on a CPU it has no backward
        raise refusal_of_call("flex", q, cu_seqlens=cu_seqlens, **options) or error from error
