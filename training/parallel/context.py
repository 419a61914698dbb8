"""Context parallelism: ranks share each sequence. Each computes its part; kernels.ring attends to all of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kernels import AttentionError, AttentionFn, resolve_attention
from kernels.ring import gathers_keys, ring_attention
from kernels.ring.blocks import chunks_of
from model.gpt import GPT
from model.part import Part, attentions, compute_whole

from ..config import Config, ConfigError, nearest_multiples
from .mesh import Layout

if TYPE_CHECKING:
    from ..distributed import World

ATTENTIONS = ("flash", "naive")  # whose blocks a ring can merge


def check_context(config: Config, ranks: World) -> None:
    """Raise ConfigError for what cannot be computed by ranks that share each sequence."""
    share, model = config.parallel.context, config.model
    if share == 1:
        if config.parallel.gather_keys:
            raise ConfigError("parallel.gather_keys is read with parallel.context=2 or more; leave it out.")
        return
    asked = f"parallel.context={share}"
    if not ranks.launched:
        raise ConfigError(
            f"{asked} shares each sequence among the ranks of torchrun, and this is one process: start it with "
            f"torchrun --standalone --nproc_per_node={share} train.py, or use parallel.context=1."
        )
    if ranks.size % share:
        divisors = (n for n in range(1, ranks.size + 1) if ranks.size % n == 0)
        able = [n for n in divisors if n == 1 or model.seq_len % (2 * n) == 0]
        near = min(able, key=lambda n: abs(n - share))
        raise ConfigError(
            f"{asked} does not divide the {ranks.size} ranks; nearest: parallel.context={near}."
        )
    if model.seq_len % (2 * share):
        raise ConfigError(
            f"{asked} cuts each sequence into {2 * share} chunks, of which model.seq_len={model.seq_len} is not a "
            f"multiple; nearest: {nearest_multiples(model.seq_len, 2 * share)}."
        )
    if model.dropout:
        raise ConfigError(f"{asked} has no dropout; use model.dropout=0.")
    if used := [name for name, value in model.attention_features.items() if value]:
        raise ConfigError(f"{asked} has no {used[0]}; leave model.{used[0]} out.")
    if config.parallel.gather_keys and config.data.document_mask:
        raise ConfigError("parallel.gather_keys has no data.document_mask; leave one of them out.")
    if config.attention.precise_delta:
        raise ConfigError(f"{asked} has no precise_delta; use attention.precise_delta=false.")


def attention_of(config: Config, name: str, **request: Any) -> tuple[str, AttentionFn]:
    """As kernels.resolve_attention, but ranks that share sequences get, or are told to use, one of ATTENTIONS."""
    if config.parallel.context == 1:
        return resolve_attention(name, **request)
    ours = "flash" if request["device"].type == "cuda" else "naive"
    without = "" if request["tier"] == "auto" else " without attention.tier"
    if name not in ("auto", *ATTENTIONS):
        asked = f"parallel.context={config.parallel.context}"
        raise AttentionError(f"{asked} has no attention={name}; use attention={ours}{without}")
    if name == "auto" and request["tier"] == "auto":  # any other tier is one of flash
        name = ours
    try:
        return resolve_attention(name, **request)
    except AttentionError as error:
        reason, use, nearest = str(error).rpartition("; use attention=")
        if not use or nearest.split()[0] in ATTENTIONS:
            raise
        raise AttentionError(f"{reason}{use}naive{without}") from None  # it refuses nothing but a tier


def resolve_gather_keys(config: Config, layout: Layout, micro_batch: int) -> bool:
    """Whether ranks that share a sequence all gather its keys and values, instead of passing them around a ring."""
    asked, model = config.parallel.gather_keys, config.model
    if layout.context_size == 1 or asked is not None:
        return bool(asked)
    ranks = layout.context_size
    shape = micro_batch, model.n_head, model.seq_len // ranks, model.head_dim
    return not config.data.document_mask and gathers_keys(*shape, ranks)


def in_ring(name: str, config: Config, layout: Layout, gather_keys: bool) -> AttentionFn:
    """The attention of that name between the ranks that share a sequence."""
    options = {"tier": config.attention.tier, "gather_keys": gather_keys}
    return partial(ring_attention, group=layout.context_group, attention=name, **options)


def part_of(layout: Layout) -> Part | None:
    """The part of each sequence that this rank computes; None: all of it."""
    if layout.context_size == 1:
        return None
    return Part(chunks_of(layout.context_rank, layout.context_size), 2 * layout.context_size)


def leave_ring(model: GPT, attention: AttentionFn) -> None:
    """Have a trained model compute whole sequences again, each rank for itself."""
    compute_whole(model)
    for each in attentions(model):
        each.attention = attention
