"""Our kernels in the models of Hugging Face transformers, by its attention interface.

    kernels.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilegpt", dtype=torch.bfloat16)

Once a forward, transformers has an attention's own mask function make the mask that it hands to each layer. Here it
is an interval of keys for each query, never a tensor of q_len * kv_len: causal, a sliding window, documents packed
into a row (position_ids that begin again), padding (a document of its own), and a cache, dynamic or static. Grouped
heads, softcap, sinks and dropout go to the kernels as they are. What a model asks beyond that is refused in one line.

With both a cache and padding there is no gradient. The outputs of padded queries have no meaning, as with
flash_attention_2: a model that pools them, as SigLIP does if it gets an attention_mask, differs from eager.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.utils.import_utils import is_tracing

from .arguments import check_but_value_dim, check_scale, in_autocast_dtype
from .flash.api import flash_attention
from .flash.call import Options, Tensors
from .flash.operators import flash_forward
from .registry import AttentionError

NAME = "tilegpt"
MaskFunction = Callable[..., Any]  # (batch, head, query position, key position) -> whether it may be seen
PLAIN: tuple[MaskFunction, ...] = (
    masking_utils.causal_mask_function,
    masking_utils.bidirectional_mask_function,
)
# An argument that only other attentions serve -> how a refusal calls it.
REFUSED = {
    "position_bias": "position biases, as T5 has them",
    "output_attentions": "output_attentions: the weights are never in memory",
    "block_table": "paged attention (continuous batching)",
    "cache": "paged attention (continuous batching)",
}


class Mask(NamedTuple):
    """What queries may see, as arguments of `flash_attention`."""

    causal: bool
    window: tuple[int, int] | None = None
    cu_seqlens: Tensor | None = None
    kv_lengths: Tensor | None = None


def register() -> None:
    """Register the kernels with transformers as attn_implementation="tilegpt"."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _made_once)
    Mask.ndim = 4  # type: ignore[attr-defined]  # what transformers asks of a mask that it is given


def _made_once(**asked: Any) -> Mask | Tensor:
    """`mask_of`, unless generate has made the mask, for a static cache: the model then asks again, and gives it."""
    return given if isinstance(given := asked.get("attention_mask"), Mask) else mask_of(**asked)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention as transformers calls it: (batch, heads, length, head_dim) -> (batch, length, heads, head_dim).

    attention_mask: from `mask_of`. None if the model makes none; its module and arguments then say what is seen, as
        for flash_attention_2.
    s_aux: sinks. cu_seq_lens_q: offsets of the documents of a row, by DataCollatorWithFlattening.
    """
    _refuse_others(attention_mask, kwargs)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = Mask(causal)
        if sliding_window is not None:
            left = sliding_window - 1
            attention_mask = Mask(causal, (left, 0 if causal else left))
    if cu_seq_lens_q is not None and isinstance(attention_mask, Mask):
        attention_mask = attention_mask._replace(cu_seqlens=cu_seq_lens_q.to(torch.int32))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if isinstance(attention_mask, Tensor):
        out = _within(attention_mask, query, key, value, dropout, scaling, softcap, s_aux)
    else:
        # From torch's generator, so that activations computed again for a checkpoint draw the same.
        seed = torch.randint(2**62, (), device=query.device) if dropout else None
        options = {**attention_mask._asdict(), "scale": scaling, "softcap": softcap, "sinks": s_aux}
        out = cast(
            Tensor, flash_attention(query, key, value, dropout_p=dropout, dropout_seed=seed, **options)
        )
    return out.transpose(1, 2), None


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = PLAIN[0],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Mask | Tensor:
    """A mask as transformers asks for it.

    Query i is at position q_offset + i, key j at kv_offset + j. attention_mask: bool (batch, length), False for
    padding. local_size: of a sliding window, or of chunks. use_vmap: the model combined the mask with one of its own.

    Returns:
        A Mask; or, where queries and keys differ and a Mask cannot express it, the keys [begin, end) of each query as
        int32 (batch or 1, 1, q_length, 2), with four axes so that transformers takes it for a finished mask.
    """
    if use_vmap:
        _refuse("a mask function of the model's or your own (or_mask_function, and_mask_function)")
    causal = "allow_is_bidirectional_skip" not in kwargs  # only the makers of bidirectional masks pass it
    window = None
    if local_size is not None:
        window = (local_size - 1, 0) if causal else (local_size, local_size)
    padding = _padding(attention_mask, kv_offset, kv_length)
    begins = None
    if mask_function not in PLAIN:
        begins = _begins(mask_function, causal, batch_size, kv_offset, kv_length, device)
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if begins is None and padding is None and (aligned or (not causal and window is None)):
        return Mask(causal, window)
    if begins is None:
        begins = torch.zeros(1, kv_length, dtype=torch.bool, device=device)
    if aligned and q_length == kv_length:
        return Mask(causal, window, cu_seqlens=_offsets(begins, padding, batch_size))
    if causal:
        return _bounds(begins, padding, q_offset - kv_offset, q_length, local_size)
    if window is not None or padding is None:
        _refuse("a mask that is not causal, other than of padding, with more keys than queries")
    _check(padding[:, 0].all(), "padding on the left of keys that are not the queries' (pad on the right)")
    return Mask(causal, kv_lengths=padding.sum(1, dtype=torch.int32))


def _padding(attention_mask: Tensor | None, kv_offset: int, kv_length: int) -> Tensor | None:
    """Which keys are not padding, (batch, kv_length); None if all are known not to be. Keys beyond the mask, as in a
    static cache, count as padding."""
    if attention_mask is None:
        return None
    real = F.pad(attention_mask, (0, max(kv_offset + kv_length - attention_mask.shape[1], 0)))
    real = real[:, kv_offset : kv_offset + kv_length]
    if not is_tracing(real) and real.all():
        return None
    begun = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
    _check((begun <= 1).all(), "padding between tokens (attention_mask 1, 0, 1)")
    return real


def _begins(
    mask_function: MaskFunction,
    causal: bool,
    batch: int,
    offset: int,
    length: int,
    device: torch.device | str,
) -> Tensor | None:
    """Where a document or a chunk begins, bool (batch, length); None if known to be nowhere.

    The function that transformers composes shows it: where one begins, a query cannot see the key before its own.
    """
    rows = torch.arange(batch, device=device)[:, None]
    later = torch.arange(offset + 1, offset + length, device=device)[None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    if causal:
        ahead = mask_function(rows, head, later - 1, later)
        _check(~ahead.any(), "a mask in which some tokens see later ones (such as those of an image)")
    begins = ~mask_function(rows, head, later, later - 1).expand(batch, -1)
    if not is_tracing(begins) and not begins.any():
        return None
    return F.pad(begins, (1, 0))


def _offsets(begins: Tensor, padding: Tensor | None, batch: int) -> Tensor:
    """cu_seqlens (batch * length + 1,) of the documents that begin, and of padding as documents of its own. The rest
    are empty documents, so that nothing waits for the device to count."""
    first = _edges(begins, padding).expand(batch, -1).clone()
    first[:, 0] = True
    index = torch.arange(first.numel() + 1, dtype=torch.int32, device=first.device)
    return torch.where(F.pad(first.flatten(), (0, 1)), index, first.numel()).sort().values


def _bounds(
    begins: Tensor, padding: Tensor | None, ahead: int | Tensor, q_length: int, local_size: int | None
) -> Tensor:
    """The bounds (batch or 1, 1, q_length, 2) that `mask_of` returns. ahead: keys before the first query's own."""
    edges = _edges(begins, padding)
    own = ahead + torch.arange(q_length, device=edges.device)
    index = torch.arange(edges.shape[1], device=edges.device)
    start = torch.where(edges, index, 0).cummax(1).values[:, own]
    if local_size is not None:
        start = torch.maximum(start, own - (local_size - 1))
    return torch.stack([start, (own + 1).expand_as(start)], -1)[:, None].to(torch.int32)


def _edges(begins: Tensor, padding: Tensor | None) -> Tensor:
    """Where keys begin that are not seen together with those before."""
    return begins if padding is None else begins | F.pad(padding[:, 1:] != padding[:, :-1], (1, 0))


def _within(
    bounds: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention within the bounds of `mask_of`. They need not be those of documents, as only the forward allows."""
    if dropout or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        _refuse("gradients where a cache meets padding or a static one (torch.no_grad() if none are needed)")
    q, k, v = in_autocast_dtype(q, k, v)
    check_but_value_dim(q, k, v)
    scale, value_dim = check_scale(scaling, q.shape[-1]), v.shape[-1]
    width = max(q.shape[-1], value_dim)  # they differ in multi-head latent attention
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    starts, ends = (x.expand(q.shape[0], -1).contiguous() for x in bounds[:, 0].unbind(-1))
    tensors = Tensors(sinks=sinks, document_starts=starts, document_ends=ends)
    options = Options(False, scale, softcap=softcap or 0.0, tier="triton")
    return flash_forward(q, k, v, *tensors, *options)[0][..., :value_dim]


def _refuse_others(attention_mask: object, asked: dict[str, Any]) -> None:
    """Refuse what only other attentions can."""
    if isinstance(attention_mask, Tensor) and attention_mask.dtype is not torch.int32:
        shape = tuple(attention_mask.shape)
        _refuse(f"a mask of your own, {attention_mask.dtype} {shape}: it takes those of two axes")
    for name, words in REFUSED.items():
        if asked.get(name) is not None and asked[name] is not False:
            _refuse(words)


def _check(condition: Tensor, otherwise: str) -> None:
    """Refuse unless the 0-d bool holds; in a compiled graph by an assertion on the device that nothing waits for."""
    if is_tracing(condition):
        torch._assert_async(condition, f"{NAME} does not support {otherwise}")
    elif not condition:
        _refuse(otherwise)


def _refuse(what: str) -> NoReturn:
    raise AttentionError(f'attn_implementation="{NAME}" does not support {what}; use "sdpa" or "eager"')
