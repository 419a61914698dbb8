"""Softcap, ALiBi, sinks and dropout: flash beside other libraries' attention with the same feature.

Forward and backward at 16k tokens and a hidden width of 2048 (FlashAttention-2's Figures 4-7). Contenders: flash with
its fastest kernels and with the portable ones; every other registered backend that supports the feature, except those
that store the scores; and what a library has but our signature does not pass on: FlexAttention with sinks, by its
log-sum-exp, and FlashAttention-4 with softcap, with sinks, and with ALiBi as a modification of its scores, each with
and without repeatable gradients. All read the same packed tensors (batch, length, heads, head_dim).

Results are checked against float64 first, with sinks their gradient too. Other libraries' dropout draws other random
numbers than ours: it is checked without any, and then for keeping the mean of the output.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import ATTENTION, fusion, get_attention, history, resolve_attention
from reproduce import plots, timing
from reproduce.attention import DROPOUT, HOLD_SCORES, compare, gradients, race
from reproduce.attention_figures import OURS, PORTABLE
from reproduce.experiment import Options, Results, Sample, Timing
from reproduce.peers import DETERMINISTIC
from reproduce.timing import gain, timed, waited

from .aims import Aim, over_fastest

FLEX, FA4 = "flex", "fa4"
REPEATABLE = (FLEX, DETERMINISTIC)  # others whose gradients are the same in every run, as ours are
NAMES = {"softcap": "softcap", "alibi_slopes": "ALiBi", "sinks": "sinks", "dropout_p": "dropout"}
# What a library has, but its registered backend refuses.
BEYOND = ((FLEX, "sinks"), (FA4, "softcap"), (FA4, "sinks"), (FA4, "alibi_slopes"))
SOFTCAP = 30.0
SELECTION = ("features",)
NEEDED = ("features", "lengths", "head_dims")


@dataclass(frozen=True)
class Settings(Timing):
    dtype: str = "bfloat16"
    tokens: int = 16384
    hidden: int = 2048
    # As arguments of an attention.
    features: tuple[str, ...] = tuple(NAMES)
    # The most useful first.
    lengths: tuple[int, ...] = (4096, 1024, 16384)
    head_dims: tuple[int, ...] = (64, 128)
    # Where every query sees every key too; elsewhere the mask is causal.
    full: tuple[int, ...] = (4096,)
    # Of the check against float64.
    check_length: int = 1024


TINY = Settings(
    dtype="float16", tokens=64, hidden=64, lengths=(64,), head_dims=(32,), full=(), check_length=64, processes=1,
    rounds=1, seconds=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    feature: str
    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool


def workloads(settings: Settings) -> list[Workload]:
    """The workloads to run."""
    return [
        Workload(feature, settings.tokens // length, settings.hidden // head_dim, length, head_dim, causal)
        for length in settings.lengths
        for feature in settings.features
        for head_dim in settings.head_dims
        for causal in (True, False)
        if causal or length in settings.full
    ]


class Inputs:
    """New random tensors for a workload, each (batch, length, heads, head_dim), and what its feature takes.

    qkv: the autograd leaves; sinks, which a model learns, are the last of them.
    """

    def __init__(self, workload: Workload, dtype: torch.dtype, device: torch.device) -> None:
        self.workload, self.dropout_p = workload, DROPOUT
        shape = (workload.batch, workload.length, workload.heads, workload.head_dim)
        self.qkv = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
        self.d_out = torch.randn(shape, device=device, dtype=dtype)
        if workload.feature == "sinks":
            self.qkv.append(torch.randn(workload.heads, device=device).requires_grad_())
        # 2^(-8/heads) to 2^-8, as in Press et al.
        self.slopes = 2.0 ** torch.linspace(-8 / workload.heads, -8, workload.heads, device=device)

    def by_head(self) -> list[Tensor]:
        return [x.transpose(1, 2) for x in self.qkv[:3]]

    def features(self, seed: int) -> dict[str, object]:
        """The feature as arguments of an attention."""
        name = self.workload.feature
        if name == "dropout_p":
            return {"dropout_p": self.dropout_p, "dropout_seed": seed}
        return {name: {"softcap": SOFTCAP, "alibi_slopes": self.slopes, "sinks": self.qkv[-1]}[name]}


# (inputs, number of the turn, which seeds dropout) -> out, like q
Attend = Callable[[Inputs, int], Tensor]


def contenders() -> dict[str, Attend]:
    """Every contender that may take part, ours first; `check` rejects those without the feature."""
    others = [name for name in ATTENTION if name not in (OURS, *HOLD_SCORES, *history.NAMES)]
    found = {OURS: _registered(OURS), PORTABLE: _registered(OURS, tier="triton")}
    found |= {name: _registered(name) for name in others}
    return {**found, FLEX: _flex, FA4: _fa4(), DETERMINISTIC: _fa4(deterministic=True)}


def _registered(backend: str, **options: object) -> Attend:
    def attend(inputs: Inputs, number: int) -> Tensor:
        how = {"causal": inputs.workload.causal, **inputs.features(number), **options}
        return get_attention(backend)(*inputs.by_head(), **how).transpose(1, 2)

    return attend


def _fa4(**options: object) -> Attend:
    def attend(inputs: Inputs, number: int) -> Tensor:
        fa4, workload, features = get_attention(FA4), inputs.workload, inputs.features(number)
        if workload.feature == "sinks":
            features = {"learnable_sink": inputs.qkv[-1]}
        elif workload.feature == "alibi_slopes":
            features = _fa4_alibi(workload.heads)
        call = partial(fa4.keywords["flash_attn_func"], **features, **options)
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
    """The registered backend; with sinks FlexAttention itself."""
    workload = inputs.workload
    if workload.feature != "sinks":
        return _registered(FLEX)(inputs, number)
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


def run(options: Options) -> None:
    """Run the experiment; see `experiment.py`."""
    for workload in workloads(options.settings):
        attends = contenders()
        where = {key: getattr(workload, key) for key in ("feature", "head_dim", "causal")}
        measure = partial(check, attends=attends, workload=workload, options=options)
        right = {name: attends[name] for name in options.right(attends, measure, "contender", **where)}
        options.timed(partial(time_all, right, workload, options), kind="time", **asdict(workload))


def check(name: str, attends: dict[str, Attend], workload: Workload, options: Options) -> Sample:
    """`attention.compare` of out and the gradients; for another library's dropout also how far its mean is off."""
    device, dtype, length = options.device, options.dtype, options.settings.check_length
    heads = -(-(2**15) // length) if device.type == "cuda" else 2  # for which `auto` takes the kernels timed
    small = replace(workload, batch=2, heads=heads, length=length)
    attend, naive, inputs = attends[name], _registered("naive"), Inputs(small, dtype, device)
    backend = name.partition("+")[0]
    if backend in ATTENTION:
        asked = {} if (backend, workload.feature) in BEYOND else inputs.features(0)
        resolve_attention(backend, device=device, dtype=dtype, head_dim=workload.head_dim, **asked)
    drops = workload.feature == "dropout_p" and name not in (OURS, PORTABLE)
    if drops:
        inputs.dropout_p = 0.0
    found, theirs = gradients(attend, inputs), gradients(naive, inputs)
    inputs.qkv = [x.detach().double().requires_grad_() for x in inputs.qkv]
    inputs.d_out = inputs.d_out.double()
    names = ("out", "dq", "dk", "dv", "dsinks")[: len(found)]
    compared = compare(found, theirs, gradients(naive, inputs), dtype, names)
    if drops:
        bias, limit = _dropout_bias(attend, Inputs(small, dtype, device))
        compared["errors"]["dropout"], compared["limits"]["dropout"] = bias, limit
        compared["passed"] = compared["passed"] and bias <= limit
    return compared


def _dropout_bias(attend: Attend, inputs: Inputs) -> tuple[float, float]:
    """|mean of out - 1| and its limit (6 sigma), for equal probabilities and v = 1: dropout must keep the mean 1."""
    q, k, v = inputs.qkv
    inputs.qkv = [torch.zeros_like(q), k, torch.ones_like(v)]
    rows = attend(inputs, 1)[..., 0].detach().double()
    length = inputs.workload.length
    seen = torch.arange(1, length + 1) if inputs.workload.causal else torch.full((length,), length)
    variance = DROPOUT / (1 - DROPOUT) * (1 / seen).mean().item() / rows.numel()
    return abs(float(rows.mean()) - 1), 6 * math.sqrt(variance) + torch.finfo(q.dtype).eps


def time_all(attends: dict[str, Attend], workload: Workload, options: Options) -> Sample:
    """`attention.race` of the contenders' forward and backward."""
    if FLEX in attends:
        torch.compiler.reset()  # else the second shape would be compiled for dynamic shapes
    bytes_per_set = 8 * workload.batch * workload.heads * workload.length * workload.head_dim
    number = timing.input_sets(bytes_per_set, options.device)
    return race(attends, [Inputs(workload, options.dtype, options.device) for _ in range(number)], options)


def draw(results: Results, path: Path) -> None:
    """The others' time of forward and backward over flash's, causal, a panel for each feature and head_dim.

    Contenders for which the device waited are not drawn.
    """
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for sample in timed(results, kind="time", causal=True):
        panel = panels.setdefault(f"{NAMES[sample['feature']]}, head_dim {sample['head_dim']}", {})
        for name in sample["ms"]:
            over = gain(sample, name, OURS)
            if over and name != OURS and not waited(sample, name) and not waited(sample, OURS):
                panel.setdefault(name, {})[sample["length"]] = over.median
    drawn = [plots.lines(title, lines, up="time over flash's") for title, lines in panels.items()]
    plots.draw(path, f"Forward + backward with a feature, causal, {results['device']}", drawn, columns=2)


def aims(results: Results) -> list[Aim]:
    """No other implementation of the feature should take less time, nor one whose gradients are repeatable."""
    found = []
    for sample in timed(results, kind="time"):
        if OURS not in sample["ms"] or waited(sample, OURS) or results["device"].startswith("CPU"):
            continue
        shape = " x ".join(str(sample[key]) for key in ("batch", "heads", "length", "head_dim"))
        where = f"{shape}, {NAMES[sample['feature']]} ({'causal' if sample['causal'] else 'full'})"
        others = [name for name in sample["ms"] if name not in (OURS, PORTABLE)]
        found += over_fastest(where, sample, OURS, others)
        alike = [name for name in others if name in REPEATABLE]
        if alike != others:
            found += over_fastest(where, sample, OURS, alike, "repeatable other")
    return found
