"""The arguments of every attention, and the checks that the backends share: each mistake gives one clear line.

Query i is aligned bottom-right: its position among the keys is i + kv_len - q_len.

    q                (batch, heads, q_len, head_dim)
    k, v             (batch, kv_heads, kv_len, head_dim); kv_heads divides heads, consecutive query heads share one.
                     Under autocast q, k and v are cast to its dtype, as for torch's own attention. With flash and
                     naive v may have a head_dim of its own, which out then has too
    causal           a query sees no key after its own position
    scale            factor of the logits, a number; None means 1/sqrt(head_dim). Multiply q by a learned one
    dropout_seed     int or 0-d int64 tensor, needed when dropout_p > 0. The mask is
                     `philox.dropout_mask(dropout_seed, ...)`; no global generator is read or advanced

The others are optional features: `kernels.features` has them in a table.

NaN and inf. What a query may not see has weight 0, but kernels multiply whole tiles, and 0 * NaN is NaN. So a NaN in
one token can reach the tokens that share its tile: earlier ones under a causal mask, and other documents of its row.
These are isolated, in the forward and the backward:

    the rows of a batch and its heads (with grouped heads, the groups that share a key head) from one another
    keys and values from `kv_lengths` on, whose gradients are 0, with packed documents too: so pass it where padding
    may hold anything.
    `naive` multiplies them by 0, so there they must be finite. A padded query is like any other: its q and the
    gradient of its output must be finite
"""

import itertools
import math
from numbers import Real
from typing import TypedDict

import torch

from .registry import AttentionError, used_features

BLOCK_MASK_SIZE = 128


class Arguments(TypedDict, total=False):
    """The arguments' types, but return_lse, which decides the type of the result."""

    causal: bool
    scale: float | None
    dropout_p: float
    dropout_seed: int | torch.Tensor | None
    window: tuple[int, int] | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    kv_lengths: torch.Tensor | None
    block_mask: torch.Tensor | None
    precise_delta: bool


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: object = True) -> None:
    """Check that q (batch, heads, q_len, head_dim) matches k and v (batch, kv_heads, kv_len, head_dim)."""
    check_but_value_dim(q, k, v, causal)
    if k.shape != v.shape:
        raise AttentionError(
            f"k and v must share a shape, got {tuple(k.shape)} and {tuple(v.shape)} (attention=flash and naive take "
            "both; else pad with zeros)"
        )


def check_but_value_dim(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: object = True) -> None:
    """`check_inputs`, but v may have another head_dim."""
    check_flag("causal", causal)
    dtype, device = q.dtype, q.device  # reading an attribute of a tensor takes 0.1 us
    if not dtype.is_floating_point:
        raise AttentionError(f"q must be floating point, got {dtype}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            shape = tuple(tensor.shape)
            raise AttentionError(f"{name} must be (batch, heads, length, head_dim), got shape {shape}")
        if tensor.dtype != dtype:
            raise AttentionError(f"q, k and v must share a dtype, got {dtype} and {name} {tensor.dtype}")
        if tensor.device != device:
            raise AttentionError(f"q, k and v must share a device, got {device} and {name} {tensor.device}")
    (batch, heads, _, head_dim), (kv_batch, kv_heads, _, kv_head_dim) = q.shape, k.shape
    if (kv_batch, kv_head_dim) != (batch, head_dim):
        raise AttentionError(
            f"q and k must share batch and head_dim, got shapes {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise AttentionError(f"k and v must share a shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    if kv_heads == 0 or heads % kv_heads:
        raise AttentionError(f"kv_heads must divide heads, got {kv_heads} kv_heads and {heads} heads")


def in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's dtype where it is enabled, as torch's own attention gets them; float64 stays."""
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            raise AttentionError(f"q, k and v must be tensors, got {type(x).__name__}")
    device = tensors[0].device.type
    # For a device without autocast, such as meta, torch does not say whether it is on. is_autocast_available cannot
    # be traced by torch 2.11's torch.compile, which fails on it.
    if not torch.compiler.is_compiling() and not torch.amp.is_autocast_available(device):
        return tensors
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype is torch.float64 else x.to(dtype) for x in tensors)


def check_flag(name: str, flag: object) -> None:
    """Check that it is a bool of Python's: None, which is false, may be meant as the default, 1 as a count."""
    if not isinstance(flag, bool):
        raise AttentionError(f"{name} must be True or False, got {flag!r}")


def check_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale; None means 1/sqrt(head_dim). It must be positive and finite."""
    if scale is None:
        if head_dim == 0:
            raise AttentionError("q has head_dim 0, of which scale=None, 1/sqrt(head_dim), is none")
        return 1.0 / math.sqrt(head_dim)
    check_number("scale", scale)
    if not 0 < scale < math.inf:
        raise AttentionError(f"scale must be positive and finite, got {scale}")
    return scale


def check_dropout(dropout_p: float, dropout_seed: int | torch.Tensor | None) -> None:
    """Check that dropout_p is in [0, 1) and, unless 0, has an int64 seed (converting others would alter it)."""
    check_number("dropout_p", dropout_p)
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
    # 1.5 would be truncated to 1, and "5" parsed as 5.
    elif not (dropout_seed is None or _is_integer(dropout_seed)):
        raise AttentionError(f"dropout_seed must be an int or a 0-d int64 tensor, got {dropout_seed!r}")
    # A varying int is symbolic under torch.compile: an int64, on which the comparison would add a guard.
    elif not torch.compiler.is_compiling() and not -(2**63) <= int(dropout_seed or 0) < 2**63:
        raise AttentionError(f"dropout_seed must fit int64, -2^63 to 2^63 - 1, got {dropout_seed}")


def seed_on(device: torch.device, seed: int | torch.Tensor | None) -> torch.Tensor:
    """A dropout seed, which `check_dropout` has passed, as a 0-d int64 tensor on `device`."""
    assert seed is not None
    if isinstance(seed, torch.Tensor) and (seed.device.type == device.type or torch.compiler.is_compiling()):
        return seed.to(device)
    # From the host by a fill kernel: a copy would synchronise with everything queued on the device.
    return torch.full((), int(seed), dtype=torch.int64, device=device)


def check_features(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    window: tuple[int, int] | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    block_mask: torch.Tensor | None = None,
    **numbers: float | None,
) -> None:
    """Check that the optional arguments match q, k and each other. numbers: each positive; 0 or None if not used."""
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    for name, number in numbers.items():
        if number is not None:
            check_number(name, number)
            if not 0 <= number < math.inf:
                raise AttentionError(f"{name} must be positive and finite, or 0 for none, got {number}")
    for side in window if torch.compiler.is_compiling() and isinstance(window, tuple | list) else ():
        check_number("window", side)
    is_pair = isinstance(window, tuple | list) and len(window) == 2 and all(map(_is_integer, window))
    if window is not None and (not is_pair or min(window) < -1):
        raise AttentionError(f"window must be (left, right), each a count of keys or -1, got {window}")
    for name, tensor in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if tensor is not None:
            check_tensor(name, tensor, q.device)
            if tensor.shape != (heads,) or not tensor.is_floating_point():
                got = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise AttentionError(f"{name} must be floating point ({heads},), one per head, got {got}")
    if kv_lengths is not None:
        check_tensor("kv_lengths", kv_lengths, q.device, torch.int32)
        if kv_lengths.shape != (batch,):
            raise AttentionError(f"kv_lengths must be ({batch},), got {tuple(kv_lengths.shape)}")
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens, q.device, torch.int32)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise AttentionError(f"cu_seqlens must be (documents + 1,), got {tuple(cu_seqlens.shape)}")
        if cu_seqlens_k is None and q_len != kv_len:
            raise AttentionError(
                f"cu_seqlens needs q_len == kv_len, or cu_seqlens_k, got {q_len} and {kv_len}"
            )
    if cu_seqlens_k is not None:
        check_tensor("cu_seqlens_k", cu_seqlens_k, q.device, torch.int32)
        if cu_seqlens is None:
            raise AttentionError(
                "cu_seqlens_k, the offsets of the keys, needs cu_seqlens, those of the queries"
            )
        if cu_seqlens_k.shape != cu_seqlens.shape:
            shapes = f"{tuple(cu_seqlens_k.shape)} and {tuple(cu_seqlens.shape)}"
            raise AttentionError(f"cu_seqlens_k and cu_seqlens must have as many documents, got {shapes}")
    for name, offsets in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is not None:
            _check_offsets(name, offsets)
    if block_mask is not None:
        check_tensor("block_mask", block_mask, q.device, torch.bool)
        shape, tiles = tuple(block_mask.shape), (-(-q_len // BLOCK_MASK_SIZE), -(-kv_len // BLOCK_MASK_SIZE))
        if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != tiles:
            raise AttentionError(
                f"block_mask must be (batch or 1, heads or 1, {tiles[0]}, {tiles[1]}), a bool for each "
                f"{BLOCK_MASK_SIZE} x {BLOCK_MASK_SIZE} tile, got {shape}"
            )


def _check_offsets(name: str, offsets: torch.Tensor) -> None:
    """Check that they ascend, where they can be read: not on a GPU, for which the host would wait, nor traced."""
    if torch.compiler.is_compiling():  # first: it could not trace what follows
        return
    traced = type(offsets) is not torch.Tensor or torch._C._functorch.is_functorch_wrapped_tensor(offsets)
    if offsets.device.type == "cpu" and not (traced or torch.jit.is_tracing()):
        numbers = offsets.tolist()
        if any(a > b for a, b in itertools.pairwise(numbers)):
            raise AttentionError(f"{name} must ascend: offsets, not lengths; got {numbers}")


def refuse_features(name: str, features: dict[str, object], combined_with: str = "") -> None:
    """Check that all of `features`, the arguments that attention `name` lacks, have their "not used" value.

    combined_with: the argument that it cannot combine them with, if it has them otherwise.
    """
    used = used_features(features)
    if used:
        what = f"{sorted(used)[0]} with {combined_with}" if combined_with else sorted(used)[0]
        raise AttentionError(
            f"attention={name} does not support {what}; attention=naive does, and flash on a GPU"
        )


def check_number(name: str, number: object) -> None:
    """Check that it is a number, not a tensor, since our operators would give it no gradient. Under torch.compile
    it must be Python's: NumPy's become tensors there, whose values are unknown."""
    traced = torch.compiler.is_compiling()
    python = isinstance(number, int | float | torch.SymInt | torch.SymFloat)
    if python or (not traced and isinstance(number, Real)):
        return
    got = "a tensor, or NumPy's" if traced else type(number).__name__
    remedy = "; its .item() is one, without a gradient" if traced or hasattr(number, "item") else ""
    raise AttentionError(f"{name} must be a number of Python's, got {got}{remedy}")


def _is_integer(x: object) -> bool:
    """Whether x is an int or, like NumPy's integers, stands for one. torch.compile knows only int."""
    return isinstance(x, int) or (hasattr(x, "__index__") and not isinstance(x, torch.Tensor))


def check_tensor(
    name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise AttentionError(f"{name} must be a tensor, got {tensor!r}")
    if tensor.device != device:
        raise AttentionError(f"{name} must be on {device} as q is, got {tensor.device}")
    if dtype is not None and tensor.dtype != dtype:
        raise AttentionError(f"{name} must be {dtype}, got {tensor.dtype}")
