"""The arguments of every attention, and the checks that the backends share: each mistake gives one clear line.

Query i is aligned bottom-right: its position among the keys is i + kv_len - q_len.

    q                (batch, heads, q_len, head_dim)
    k, v             (batch, kv_heads, kv_len, head_dim); kv_heads divides heads, consecutive query heads share one.
                     Under autocast q, k and v are cast to its dtype, as for torch's own attention
    causal           a query sees no key after its own position
    scale            factor of the logits; None means 1/sqrt(head_dim)
    dropout_p        probability that an attention weight is set to 0, rounded to a multiple of 2^-16; the others are
                     divided by 1 minus that
    dropout_seed     int or 0-d int64 tensor, needed when dropout_p > 0. The mask is
                     `philox.dropout_mask(dropout_seed, ...)`; no global generator is read or advanced
    window           (left, right): a query sees at most so many keys before and after its position; -1 for no limit
    softcap          logits become softcap * tanh(logits / softcap) (Gemma 2); 0: off
    alibi_slopes     (heads,): subtract slope * |query position - key position| (Press et al. 2022), after softcap
    sinks            (heads,): a learnable logit per head that enters the softmax and has no value (gpt-oss)
    cu_seqlens       int32 (documents + 1,): ascending offsets of packed documents in the batch * length tokens, first
                     0, last batch * length. A token sees only its own document, within its own row
    kv_lengths       int32 (batch,): keys from this index on are padding, masked for every query (`naive` multiplies
                     them by 0, so they must be finite). Alignment still uses kv_len
    block_mask       bool (batch or 1, heads or 1, ceil(q_len / 128), ceil(kv_len / 128)): True for tiles that may be
                     seen (FlashAttention section 3.3), combined with every other mask
    return_lse       also return the log-sum-exp
    precise_delta    a backward free of the output's rounding error (arXiv 2510.04212); `naive` always is
"""

import math

import torch

from .registry import AttentionError, used_features

BLOCK_MASK_SIZE = 128


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check that q (batch, heads, q_len, head_dim) matches k and v (batch, kv_heads, kv_len, head_dim)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            shape = tuple(tensor.shape)
            raise AttentionError(f"{name} must be (batch, heads, length, head_dim), got shape {shape}")
        if not tensor.is_floating_point():
            raise AttentionError(f"{name} must be floating point, got {tensor.dtype}")
        if tensor.dtype != q.dtype:
            raise AttentionError(f"q, k and v must share a dtype, got {q.dtype} and {name} {tensor.dtype}")
        if tensor.device != q.device:
            raise AttentionError(f"q, k and v must share a device, got {q.device} and {name} {tensor.device}")
    if k.shape != v.shape:
        raise AttentionError(f"k and v must share a shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise AttentionError(
            f"q and k must share batch and head_dim, got shapes {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise AttentionError(f"kv_heads must divide heads, got {k.shape[1]} kv_heads and {q.shape[1]} heads")


def in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's dtype where it is enabled, as torch's own attention gets them; float64 stays."""
    device = tensors[0].device.type
    # For a device without autocast, such as meta, torch does not say whether it is on. is_autocast_available cannot
    # be traced by torch 2.11's torch.compile, which fails on it.
    if not torch.compiler.is_compiling() and not torch.amp.is_autocast_available(device):
        return tensors
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype is torch.float64 else x.to(dtype) for x in tensors)


def check_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale; None means 1/sqrt(head_dim). It must be positive and finite."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not 0 < scale < math.inf:
        raise AttentionError(f"scale must be positive and finite, got {scale}")
    return scale


def check_dropout(dropout_p: float, dropout_seed: int | torch.Tensor | None) -> None:
    """Check that dropout_p is in [0, 1) and, unless 0, has an int64 seed (converting others would alter it)."""
    if not 0.0 <= dropout_p < 1.0:
        raise AttentionError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    if dropout_p > 0.0 and dropout_seed is None:
        raise AttentionError(
            "dropout_p > 0 needs dropout_seed (an int or a 0-d int64 tensor): no global generator is used"
        )
    if isinstance(dropout_seed, torch.Tensor):
        if dropout_seed.ndim or dropout_seed.dtype is not torch.int64:
            got = f"{dropout_seed.dtype} of shape {tuple(dropout_seed.shape)}"
            raise AttentionError(f"dropout_seed must be an int or a 0-d int64 tensor, got {got}")
    # 1.5 would be truncated to 1, and "5" parsed as 5. NumPy integers have __index__; torch.compile knows only int.
    elif not (dropout_seed is None or isinstance(dropout_seed, int) or hasattr(dropout_seed, "__index__")):
        raise AttentionError(f"dropout_seed must be an int or a 0-d int64 tensor, got {dropout_seed!r}")
    # A varying int is symbolic under torch.compile: an int64, on which the comparison would add a guard.
    elif not torch.compiler.is_compiling() and not -(2**63) <= int(dropout_seed or 0) < 2**63:
        raise AttentionError(f"dropout_seed must fit int64, -2^63 to 2^63 - 1, got {dropout_seed}")


def seed_on(device: torch.device, seed: int | torch.Tensor) -> torch.Tensor:
    """A dropout seed as a 0-d int64 tensor on `device`."""
    if isinstance(seed, torch.Tensor) and (seed.device.type == device.type or torch.compiler.is_compiling()):
        return seed.to(device)
    # From the host by a fill kernel: a copy would synchronise with everything queued on the device.
    return torch.full((), int(seed), dtype=torch.int64, device=device)


def check_features(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    window: tuple[int, int] | None,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
    block_mask: torch.Tensor | None,
) -> None:
    """Check that the optional arguments match q, k and each other."""
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    is_pair = (
        isinstance(window, tuple | list) and len(window) == 2 and all(isinstance(x, int) for x in window)
    )
    if window is not None and (not is_pair or min(window) < -1):
        raise AttentionError(f"window must be (left, right), each a count of keys or -1, got {window}")
    if not 0 <= softcap < math.inf:
        raise AttentionError(f"softcap must be positive and finite, or 0 for none, got {softcap}")
    for name, tensor in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if tensor is not None:
            _check_tensor(name, tensor, q.device)
            if tensor.shape != (heads,) or not tensor.is_floating_point():
                got = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise AttentionError(f"{name} must be floating point ({heads},), one per head, got {got}")
    if kv_lengths is not None:
        _check_tensor("kv_lengths", kv_lengths, q.device, torch.int32)
        if kv_lengths.shape != (batch,):
            raise AttentionError(f"kv_lengths must be ({batch},), got {tuple(kv_lengths.shape)}")
        if cu_seqlens is not None:
            raise AttentionError("kv_lengths and cu_seqlens exclude each other: make padding a document")
    if cu_seqlens is not None:
        _check_tensor("cu_seqlens", cu_seqlens, q.device, torch.int32)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise AttentionError(f"cu_seqlens must be (documents + 1,), got {tuple(cu_seqlens.shape)}")
        if q_len != kv_len:
            raise AttentionError(f"cu_seqlens needs q_len == kv_len, got {q_len} and {kv_len}")
    if block_mask is not None:
        _check_tensor("block_mask", block_mask, q.device, torch.bool)
        shape, tiles = tuple(block_mask.shape), (-(-q_len // BLOCK_MASK_SIZE), -(-kv_len // BLOCK_MASK_SIZE))
        if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != tiles:
            raise AttentionError(
                f"block_mask must be (batch or 1, heads or 1, {tiles[0]}, {tiles[1]}), a bool for each "
                f"{BLOCK_MASK_SIZE} x {BLOCK_MASK_SIZE} tile, got {shape}"
            )


def refuse_features(name: str, features: dict[str, object]) -> None:
    """Check that all of `features`, the arguments that attention `name` lacks, have their "not used" value."""
    used = used_features(features)
    if used:
        raise AttentionError(f"attention={name} does not support {sorted(used)[0]}; attention=naive does")


def _check_tensor(
    name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise AttentionError(f"{name} must be a tensor, got {tensor!r}")
    if tensor.device != device:
        raise AttentionError(f"{name} must be on {device} as q is, got {tensor.device}")
    if dtype is not None and tensor.dtype != dtype:
        raise AttentionError(f"{name} must be {dtype}, got {tensor.dtype}")
