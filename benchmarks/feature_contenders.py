"""What `features` times: its workloads' inputs, and every attention that may have the feature."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernels import ATTENTION, fusion, get_attention, history
from reproduce import peers
from reproduce.attention import DROPOUT, HOLD_SCORES
from reproduce.peers import CUDNN_MASK, DETERMINISTIC, EFFICIENT_MASK, FLEX_MASK, OURS, PORTABLE
from reproduce.standard import score_bias

WITHOUT = "flash, without"  # ours without the feature, where no library has it
EFFICIENT, CUDNN, FLEX, FA4 = "sdpa_efficient", "sdpa_cudnn", "flex", "fa4"
PADDING, WINDOW, HEAD_DIM, PRECISE = "kv_lengths", "window", "head_dim", "precise_delta"
# What backends' libraries have beyond what these are registered with: a contender asks for it in its own way.
BEYOND = {
    "softcap": (FA4,),
    "alibi_slopes": (FA4,),
    "sinks": (FLEX, FA4),
    WINDOW: (FA4,),
    HEAD_DIM: (CUDNN,),
    PADDING: (EFFICIENT, CUDNN, FLEX, FA4),
}
SOFTCAP = 30.0
WIDTH = 1024  # keys before a query that its window includes


@dataclass(frozen=True)
class Workload:
    feature: str
    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool

    @property
    def keys(self) -> int:
        """How many there are: as many as queries, but twice as many with a window."""
        return 2 * self.length if self.feature == WINDOW else self.length


class Inputs:
    """New random tensors for a workload, each (batch, length, heads, head_dim), and what its feature takes.

    qkv: the autograd leaves; sinks, which a model learns, are the last of them.
    kv_lengths: None but for key padding; random, from half of the keys on, and the same for all inputs of a workload.
    bias: the padding as a mask that is added to the scores, made once.
    """

    def __init__(self, workload: Workload, dtype: torch.dtype, device: torch.device) -> None:
        self.workload, self.dropout_p = workload, DROPOUT
        lengths = (workload.length, workload.keys, workload.keys, workload.length)
        shapes = [(workload.batch, length, workload.heads, workload.head_dim) for length in lengths]
        *qkv, self.d_out = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        self.qkv = [x.requires_grad_() for x in qkv]
        if workload.feature == "sinks":
            self.qkv.append(torch.randn(workload.heads, device=device).requires_grad_())
        # 2^(-8/heads) to 2^-8, as in Press et al.
        self.slopes = 2.0 ** torch.linspace(-8 / workload.heads, -8, workload.heads, device=device)
        self.kv_lengths: Tensor | None = None
        self.bias: Tensor | None = None
        if workload.feature == PADDING:
            seeded, half = torch.Generator().manual_seed(0), workload.length // 2
            kv_lengths = torch.randint(half, workload.length + 1, (workload.batch,), generator=seeded)
            self.kv_lengths = kv_lengths.to(device, torch.int32)
            self.bias = score_bias(self.by_head()[0].detach(), False, self.kv_lengths)

    def by_head(self) -> list[Tensor]:
        return [x.transpose(1, 2) for x in self.qkv[:3]]

    def features(self, seed: int) -> dict[str, object]:
        """The feature as arguments of an attention."""
        name = self.workload.feature
        if name == HEAD_DIM:
            return {}
        if name == "dropout_p":
            return {"dropout_p": self.dropout_p, "dropout_seed": seed}
        values: dict[str, object] = {"softcap": SOFTCAP, "alibi_slopes": self.slopes, "sinks": self.qkv[-1]}
        values |= {PADDING: self.kv_lengths, PRECISE: True}
        values[WINDOW] = (min(WIDTH, self.workload.length), 0)
        return {name: values[name]}


# (inputs, number of the turn, which seeds dropout) -> out, like q
Attend = Callable[[Inputs, int], Tensor]


def contenders(feature: str) -> dict[str, Attend]:
    """Every contender that may take part, ours first; `features.check` rejects those without the feature.

    Other head_dims are timed without FlexAttention, which is compiled for every shape: there that takes longer than
    timing all the others.
    """
    ours: dict[str, Attend] = {OURS: registered(OURS), PORTABLE: registered(OURS, tier="triton")}
    if feature == PRECISE:
        return {**ours, WITHOUT: _without}
    others = [name for name in ATTENTION if name not in (OURS, FLEX, FA4, *HOLD_SCORES, *history.NAMES)]
    found = {**ours, **{name: registered(name) for name in others}}
    if feature == PADDING:
        found |= {name: partial(_as_in_attention, name) for name in (EFFICIENT_MASK, CUDNN_MASK)}
    if feature != HEAD_DIM:
        found[FLEX] = _flex
    return {**found, FA4: _fa4(), DETERMINISTIC: _fa4(deterministic=True)}


def registered(backend: str, **options: object) -> Attend:
    def attend(inputs: Inputs, number: int) -> Tensor:
        how = {"causal": inputs.workload.causal, **inputs.features(number), **options}
        return get_attention(backend)(*inputs.by_head(), **how).transpose(1, 2)

    return attend


def _without(inputs: Inputs, number: int) -> Tensor:
    return get_attention(OURS)(*inputs.by_head(), causal=inputs.workload.causal).transpose(1, 2)


def _as_in_attention(name: str, inputs: Inputs, number: int) -> Tensor:
    """A contender of `reproduce attention` that takes key padding, without the causal mask."""
    there = SimpleNamespace(qkv=inputs.by_head(), kv_lengths=inputs.kv_lengths, dropout_p=0.0)
    there.bias = lambda: inputs.bias
    return _made(name, inputs.workload)(there, number).transpose(1, 2)


@functools.cache
def _made(name: str, workload: Workload) -> Callable[[Any, int], Tensor]:
    """It keeps the mask of the workload's lengths."""
    return peers.MAKE[name]()


def _fa4(**options: object) -> Attend:
    def attend(inputs: Inputs, number: int) -> Tensor:
        fa4, workload, features = get_attention(FA4), inputs.workload, inputs.features(number)
        function = "flash_attn_func"
        if workload.feature == "sinks":
            features = {"learnable_sink": inputs.qkv[-1]}
        elif workload.feature == "alibi_slopes":
            features = _fa4_alibi(workload.heads)
        elif workload.feature == WINDOW:
            features = {"window_size": features[WINDOW]}
        elif workload.feature == PADDING:
            function, features = "flash_attn_varlen_func", {"seqused_k": inputs.kv_lengths}
        call = partial(fa4.keywords[function], **features, **options)
        return fa4(*inputs.by_head(), causal=workload.causal, flash_attn_func=call).transpose(1, 2)

    return attend


@functools.cache
def _fa4_alibi(heads: int) -> dict[str, object]:
    """ALiBi with the slopes of `Inputs` as FlashAttention-4 takes it, by the names of its arguments. The slopes are
    computed: to read them from a tensor, it would wrap every index."""
    import cutlass
    from cutlass import cute

    @cute.jit
    def modified(score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        slope = cute.math.exp2((head_idx + 1).to(cutlass.Float32) * (-8.0 / heads), fastmath=True)
        distance = (q_idx - kv_idx).to(cutlass.Float32)
        return score - slope * cute.where(distance > 0.0, distance, -distance)

    @cute.jit
    def gradient(d_score, score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return d_score

    return {"score_mod": modified, "score_mod_bwd": gradient}


def _flex(inputs: Inputs, number: int) -> Tensor:
    """The registered backend; with sinks FlexAttention itself, with key padding that of `reproduce attention`."""
    workload = inputs.workload
    if workload.feature == PADDING:
        return _as_in_attention(FLEX_MASK, inputs, number)
    if workload.feature != "sinks":
        return registered(FLEX)(inputs, number)
    attend = _flex_with_sinks(workload.length, workload.causal, inputs.d_out.device)
    return attend(*inputs.by_head(), inputs.qkv[-1]).transpose(1, 2)


@functools.cache
def _flex_with_sinks(length: int, causal: bool, device: torch.device) -> Callable[..., Tensor]:
    """A function of q, k, v and sinks, compiled. A sink takes its share of the probability, and what is left of it
    multiplies the others, and so out."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, block_mask: Any) -> Tensor:
        out, more = flex_attention(q, k, v, block_mask=block_mask, return_aux=AuxRequest(lse=True))
        return (out * torch.sigmoid(more.lse - sinks[:, None])[..., None]).to(out.dtype)

    seen = lambda batch, head, row, column: row >= column  # noqa: E731
    mask = create_block_mask(seen, None, None, length, length, device=device) if causal else None
    return partial(fusion.compiled(attend, dynamic=False), block_mask=mask)
