"""Packed documents and sliding windows: (query, key) pairs that are masked out should cost nothing.

Forward and backward, causal, at 16k tokens and a hidden width of 2048 (FlashAttention-2's Figures 4-7). Contenders:
flash with its fastest kernels and with the portable ones; every other registered backend that supports the feature,
except naive, which stores the scores; and, outside our attention signature, PyTorch's FlexAttention with a document
block mask built beforehand, `torch.nn.attention.varlen`, and FlashAttention-4 itself, whose backend waits for each
call's offsets and takes no window. All read the same packed tensors (batch, length, heads, head_dim). Flash with the
causal mask alone is timed too, to compare the time with the share of pairs that remain visible. Results are checked
against float64 first, for each document size and window size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels import ATTENTION, AttentionError, get_attention, resolve_attention
from kernels.library import compiled_flex_attention
from reproduce import plots, timing
from reproduce.attention import compare, gradients, race
from reproduce.experiment import Options, Results, Sample, Timing
from reproduce.peers import OURS, PORTABLE
from reproduce.timing import timed, took, waited

from .aims import Aim, judged, over_fastest, shown

WHOLE = "flash, unbounded"
FLEX, VARLEN, FA4, FA4_ITSELF = "flex", "varlen", "fa4", "fa4 itself"
DOCUMENTS, WINDOW = "documents", "window"
NEEDED = ("lengths", "head_dims")


@dataclass(frozen=True)
class Settings(Timing):
    dtype: str = "bfloat16"
    tokens: int = 16384
    hidden: int = 2048
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    head_dims: tuple[int, ...] = (64, 128)
    # Mean length of a document (OpenWebText's is 1,128 GPT-2 tokens); keys before a query that its window includes.
    documents: tuple[int, ...] = (256, 1024)
    windows: tuple[int, ...] = (256, 1024)
    # FlexAttention is compiled again for every workload, which takes longer than timing all the others.
    flex_lengths: tuple[int, ...] = (4096,)
    # Minimum length of the check against float64; large documents and windows need more.
    check_length: int = 1024
    # Measuring time per contender and workload, after warm-up.
    seconds: float = 0.15


TINY = Settings(
    dtype="float16", tokens=64, hidden=64, lengths=(64,), head_dims=(32,), documents=(20,), windows=(20,),
    check_length=64, processes=1, rounds=1, seconds=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    bound: str
    size: int  # mean length of a document, or the window's
    batch: int
    heads: int
    length: int
    head_dim: int

    @property
    def features(self) -> dict[str, object]:
        """The feature that a backend must support, as an argument of `resolve_attention`."""
        return {"cu_seqlens": True} if self.bound == DOCUMENTS else {"window": (self.size, 0)}


def workloads(settings: Settings) -> list[Workload]:
    """The workloads to run."""
    bounds = [(DOCUMENTS, size) for size in settings.documents]
    bounds += [(WINDOW, size) for size in settings.windows]
    return [
        Workload(bound, size, settings.tokens // length, settings.hidden // head_dim, length, head_dim)
        for length in settings.lengths
        for head_dim in settings.head_dims
        for bound, size in bounds
        if size < length or bound == DOCUMENTS
    ]


def document_offsets(batch: int, length: int, mean: int) -> Tensor:
    """int32 (documents + 1,): seeded, exponentially distributed lengths of that mean; a row's end ends a document."""
    tokens = batch * length
    generator = torch.Generator().manual_seed(0)
    lengths = -mean * torch.rand(4 * tokens // mean + 64, generator=generator).log()
    ends = lengths.clamp(min=1).long().cumsum(0)
    edges = torch.cat([ends[ends < tokens], torch.arange(0, tokens + 1, length)])
    return edges.unique().to(torch.int32)


class Inputs:
    """New random tensors for a workload, each (batch, length, heads, head_dim), and its document offsets."""

    def __init__(self, workload: Workload, dtype: torch.dtype, device: torch.device) -> None:
        self.workload = workload
        shape = (workload.batch, workload.length, workload.heads, workload.head_dim)
        self.qkv = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
        self.d_out = torch.randn(shape, device=device, dtype=dtype)
        offsets = torch.arange(workload.batch + 1, dtype=torch.int32) * workload.length
        if workload.bound == DOCUMENTS:
            offsets = document_offsets(workload.batch, workload.length, workload.size)
        self.longest = int(offsets.diff().max())
        self.offsets = offsets.to(device)
        self.block_mask: object = None  # FlexAttention's

    def share(self) -> float:
        """The share of the pairs under the causal mask that the documents or the window leave visible."""
        workload = self.workload
        widths = self.offsets.diff().double()
        seen = (widths * (widths + 1) / 2).sum().item()
        if workload.bound == WINDOW:
            hidden = max(0, workload.length - workload.size - 1)
            seen -= workload.batch * hidden * (hidden + 1) / 2
        return seen / (workload.batch * workload.length * (workload.length + 1) / 2)


# (inputs, number of the turn, which is not used) -> out, like q
Attend = Callable[[Inputs, int], Tensor]


def contenders() -> dict[str, Attend]:
    """Every contender that may take part, ours first; `check` rejects those without the feature."""
    others = [name for name in ATTENTION if name not in (OURS, FLEX, "naive")]  # naive stores the scores
    return {
        OURS: _registered(OURS),
        PORTABLE: _registered(OURS, tier="triton"),
        **{name: _registered(name) for name in others},
        FLEX: _flex,
        VARLEN: _varlen,
        FA4_ITSELF: _fa4_itself,
        WHOLE: _unbounded(OURS),
    }


def _by_head(inputs: Inputs) -> list[Tensor]:
    return [x.transpose(1, 2) for x in inputs.qkv]


def _registered(backend: str, **options: object) -> Attend:
    """A registered backend, restricted to the workload's documents or window."""

    def attend(inputs: Inputs, number: int) -> Tensor:
        features = inputs.workload.features
        if "cu_seqlens" in features:
            features["cu_seqlens"] = inputs.offsets
        return get_attention(backend)(*_by_head(inputs), **features, **options).transpose(1, 2)

    return attend


def _unbounded(backend: str) -> Attend:
    return lambda inputs, number: get_attention(backend)(*_by_head(inputs)).transpose(1, 2)


def _flex(inputs: Inputs, number: int) -> Tensor:
    """FlexAttention: for a window the registered backend, which caches its mask; for documents a mask made here."""
    if inputs.workload.bound == WINDOW:
        return _registered(FLEX)(inputs, number)
    from torch.nn.attention.flex_attention import create_block_mask

    attention = compiled_flex_attention()
    if inputs.block_mask is None:
        workload = inputs.workload
        tokens = torch.arange(workload.batch * workload.length, device=inputs.offsets.device)
        document = torch.bucketize(tokens, inputs.offsets[1:], right=True).view(
            workload.batch, workload.length
        )

        def seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (row >= column) & (document[batch, row] == document[batch, column])

        shape = (workload.batch, None, workload.length, workload.length)
        inputs.block_mask = create_block_mask(seen, *shape, device=tokens.device)
    return attention(*_by_head(inputs), block_mask=inputs.block_mask).transpose(1, 2)


def _varlen(inputs: Inputs, number: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    left = inputs.workload.size if inputs.workload.bound == WINDOW else -1
    tokens = [x.flatten(0, 1) for x in inputs.qkv]
    ends = (inputs.offsets, inputs.offsets, inputs.longest, inputs.longest)
    return varlen_attn(*tokens, *ends, window_size=(left, 0)).view_as(inputs.qkv[0])


def _fa4_itself(inputs: Inputs, number: int) -> Tensor:
    """FlashAttention-4's own functions, with the offsets built beforehand or with the window."""
    functions = get_attention(FA4).keywords
    if inputs.workload.bound == WINDOW:
        window = (inputs.workload.size, 0)
        return functions["flash_attn_func"](*inputs.qkv, causal=True, window_size=window)[0]
    tokens = [x.flatten(0, 1) for x in inputs.qkv]
    ends = {"cu_seqlens_q": inputs.offsets, "cu_seqlens_k": inputs.offsets}
    longest = {"max_seqlen_q": inputs.longest, "max_seqlen_k": inputs.longest}
    out, _ = functions["flash_attn_varlen_func"](*tokens, causal=True, **ends, **longest)
    return out.view_as(inputs.qkv[0])


def run(options: Options) -> None:
    for workload in workloads(options.settings):
        attends = contenders()
        if workload.length not in options.settings.flex_lengths:
            attends.pop(FLEX, None)
        where = {key: getattr(workload, key) for key in ("bound", "size", "head_dim")}
        measure = partial(check, attends=attends, workload=workload, options=options)
        right = {name: attends[name] for name in options.right(attends, measure, "contender", **where)}
        options.timed(partial(time_all, right, workload, options), kind="time", **asdict(workload))


def check(name: str, attends: dict[str, Attend], workload: Workload, options: Options) -> Sample:
    """`attention.compare` of out and the gradients."""
    device, dtype = options.device, options.dtype
    if name in (FLEX, VARLEN) and device.type != "cuda":
        raise AttentionError(f"{name} needs a CUDA device, not {device.type}")
    request = {"device": device, "dtype": dtype, "head_dim": workload.head_dim}
    if name == FA4_ITSELF:
        resolve_attention(FA4, **request)
    elif name in ATTENTION and name != FLEX:
        resolve_attention(name, **request, **workload.features)
    # Long enough for the documents or the window to mask something.
    length = max(options.settings.check_length, 3 * workload.size)
    heads = -(-(2**15) // length) if device.type == "cuda" else 2  # for which `auto` takes the kernels timed
    inputs = Inputs(replace(workload, batch=2, heads=heads, length=length), dtype, device)
    naive = _unbounded("naive") if name == WHOLE else _registered("naive")
    found, theirs = gradients(attends[name], inputs), gradients(naive, inputs)
    inputs.qkv = [x.detach().double().requires_grad_() for x in inputs.qkv]
    inputs.d_out = inputs.d_out.double()
    return compare(found, theirs, gradients(naive, inputs), dtype)


def time_all(attends: dict[str, Attend], workload: Workload, options: Options) -> Sample:
    """The result of `attention.race`, and "share": the share of the causal pairs that are visible."""
    device = options.device
    if FLEX in attends:
        torch.compiler.reset()  # else the second shape would be compiled for dynamic shapes
    bytes_per_set = 8 * workload.batch * workload.heads * workload.length * workload.head_dim
    sets = [Inputs(workload, options.dtype, device) for _ in range(timing.input_sets(bytes_per_set, device))]
    return {**race(attends, sets, options), "share": sets[0].share()}


def _name(sample: Sample) -> str:
    bound = f"{sample['bound']} of {sample['size']}"
    return f"{sample['batch']} x {sample['heads']} x {sample['length']} x {sample['head_dim']}, {bound}"


def draw(results: Results, path: Path) -> None:
    """Time of forward and backward over that of causal flash alone, a panel for each length and head_dim.

    Contenders for which the device waited are not drawn.
    """
    whole = [sample for sample in timed(results, kind="time") if WHOLE in sample["ms"]]
    pairs = [(sample, name) for sample in whole for name in sample["ms"] if name != WHOLE]
    names = list(dict.fromkeys(name for sample, name in pairs if not waited(sample, name)))
    hidden = ", ".join(dict.fromkeys(name for sample, name in pairs if waited(sample, name)))
    shapes: dict[tuple[int, int], list[Sample]] = {}
    for sample in whole:
        shapes.setdefault((sample["length"], sample["head_dim"]), []).append(sample)
    title = f"Forward + backward with documents or windows over without, {results['device']}"
    title += f"\nnot shown where it waited for the host: {hidden}" if hidden else ""
    with plots.picture(path, max(1, len(shapes)), columns=2, title=title) as axes:
        for axis, ((length, head_dim), samples) in zip(axes, shapes.items(), strict=False):
            for place, name in enumerate(names):
                ratios = [_over_whole(sample, name) for sample in samples]
                at = [row + 0.8 * (place + 0.5) / len(names) - 0.4 for row in range(len(samples))]
                axis.barh(at, ratios, 0.8 / len(names), color=plots.colour(name, tuple(names)), label=name)
            for row, sample in enumerate(samples):
                seen, label = [sample["share"]] * 2, None if row else "pairs seen"
                axis.plot(seen, [row - 0.4, row + 0.4], "k:", label=label)
            axis.axvline(1, color="#888888", zorder=0.9)
            axis.set_yticks(range(len(samples)), [f"{s['bound']} of {s['size']}" for s in samples])
            axis.set_ylim(len(samples) - 0.5, -0.5)
            axis.grid(axis="y", visible=False)
            axis.set(xscale="log", xlabel="time over unbounded", title=f"{length}, head_dim {head_dim}")
            axis.xaxis.set_major_formatter("{x:g}")
        plots.legend_below(axes)


def _over_whole(sample: Sample, name: str) -> float:
    """Time of forward and backward over that of causal flash alone; NaN if not timed or if it waited for the host."""
    if name not in sample["ms"] or waited(sample, name):
        return math.nan
    return (took(sample, name) / took(sample, WHOLE)).median


def libraries(sample: Sample) -> list[str]:
    """The contenders that are another library's, with the documents or the window."""
    return [name for name in sample["ms"] if name not in (OURS, PORTABLE, WHOLE)]


def aims(results: Results) -> list[Aim]:
    """Pairs that are masked out should cost nothing, and no other implementation should take less."""
    found = []
    for sample in judged(results):
        where = f"{_name(sample)} (causal)"
        if sample["share"] <= 0.5 and WHOLE in sample["ms"] and not waited(sample, WHOLE):
            ratio = took(sample, OURS) / took(sample, WHOLE)
            what, why = f"{where}: time over no bound", f"{sample['share']:.0%} of the pairs are seen"
            found.append(Aim(what, shown(ratio, 1), "less than 1x", ratio.high < 1, why))
        found += over_fastest(where, sample, OURS, libraries(sample))
    return found
