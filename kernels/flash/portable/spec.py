"""The parameters that the portable kernels pass to their helpers: Spec, compile-time, and Rules, run-time."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from ...philox import drop_share, drop_threshold
from .tiles import Tile


@dataclass(frozen=True)
class Spec:
    """Compile-time parameters, passed to a kernel as one argument; its fields are constants there."""

    HEAD_DIM: tl.constexpr
    BLOCK_D: tl.constexpr  # HEAD_DIM rounded up to a power of two
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    GROUP: tl.constexpr  # query heads per key head
    CAUSAL: tl.constexpr
    LEFT: tl.constexpr  # window: keys visible before a query's position; -1 for all
    RIGHT: tl.constexpr  # likewise after it
    SOFTCAP: tl.constexpr  # 0: off
    ALIBI: tl.constexpr
    DOCUMENTS: tl.constexpr
    RAGGED: tl.constexpr  # bounds are by query in the forward and dQ, by key in dK/dV; see flash/masks.py
    PADDED: tl.constexpr
    DROPOUT_P: tl.constexpr  # dropped share, a multiple of 2^-16
    DROP_BELOW: tl.constexpr  # a 16-bit half of a Philox word below this drops


@functools.cache
def specify(
    tile: Tile,
    head_dim: int,
    causal: bool,
    group: int = 1,
    dropout_p: float = 0.0,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    alibi: bool = False,
    documents: bool = False,
    ragged: bool = False,
    padded: bool = False,
) -> Spec:
    """The compile-time argument of a kernel with a tile. group: query heads per key head."""
    return Spec(
        HEAD_DIM=tl.constexpr(head_dim),
        BLOCK_D=tl.constexpr(max(16, 1 << (head_dim - 1).bit_length())),
        BLOCK_M=tl.constexpr(tile.block_m),
        BLOCK_N=tl.constexpr(tile.block_n),
        GROUP=tl.constexpr(group),
        CAUSAL=tl.constexpr(causal),
        LEFT=tl.constexpr(left),
        RIGHT=tl.constexpr(right),
        SOFTCAP=tl.constexpr(softcap),
        ALIBI=tl.constexpr(alibi),
        DOCUMENTS=tl.constexpr(documents),
        RAGGED=tl.constexpr(ragged),
        PADDED=tl.constexpr(padded),
        DROPOUT_P=tl.constexpr(drop_share(dropout_p)),
        DROP_BELOW=tl.constexpr(drop_threshold(dropout_p)),
    )


class Rules(NamedTuple):
    """Run-time parameters of one batch and query head. Those of features that SPEC turns off are arbitrary."""

    q_len: tl.tensor
    kv_len: tl.tensor
    kv_end: tl.tensor  # keys from here on are padding
    scale: tl.tensor
    slope: tl.tensor  # ALiBi's
    seed: tl.tensor  # dropout's
    batch: tl.tensor
    head: tl.tensor
    DocumentStart: tl.tensor  # pointers to begin and end (exclusive) of the document of each token,
    DocumentEnd: tl.tensor  # in this batch's row; see RAGGED


@triton.jit
def rules_of(
    batch,
    head,
    Seed,
    Slopes,
    DocumentStart,
    DocumentEnd,
    KvLengths,
    q_len,
    kv_len,
    scale,
):
    """The Rules of a batch and query head, from the kernel's arguments."""
    kv_end, slope, seed, starts, ends = kv_len, scale, batch, batch, batch
    if KvLengths is not None:
        kv_end = tl.minimum(tl.load(KvLengths + batch), kv_len)
    if Slopes is not None:
        slope = tl.load(Slopes + head).to(tl.float32)
    if Seed is not None:
        seed = tl.load(Seed)
    if DocumentStart is not None:
        starts = DocumentStart + batch.to(tl.int64) * q_len
        ends = DocumentEnd + batch.to(tl.int64) * q_len
    return Rules(q_len, kv_len, kv_end, scale, slope, seed, batch, head, starts, ends)
