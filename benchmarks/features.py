"""Flash against other libraries' attention with the same feature, and at other head_dims.

Softcap, ALiBi, sinks, dropout, key padding, and windows over twice as many keys as queries; forward and backward at
16k tokens and a hidden width of 2048 (FlashAttention-2's Figures 4-7). Key padding is timed without the causal mask,
under which only queries that are padding too would see it. Contenders: flash with its fastest kernels and with the
portable ones; every other registered backend that supports the feature, except those that store the scores; and what
a library has but our signature does not pass on. That is SDPA with key padding as its attn_mask; cuDNN above
head_dim 128; FlexAttention with sinks, by its log-sum-exp, and with padding, by a block mask; and FlashAttention-4
with softcap, sinks, windows, the number of keys of each sequence, and ALiBi as a modification of its scores, each
with and without repeatable gradients. All read the same packed tensors (batch, length, heads, head_dim).
precise_delta, which no library has, is timed against ours without it.

Results are checked against float64 first, with sinks their gradient too. Other libraries' dropout draws other random
numbers than ours: it is checked without any, and then for keeping the mean of the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from kernels import ATTENTION, resolve_attention
from reproduce import plots, timing
from reproduce.attention import DROPOUT, compare, gradients, race
from reproduce.experiment import Options, Results, Sample, Timing
from reproduce.peers import DETERMINISTIC, OURS, PORTABLE
from reproduce.timing import gain, timed, waited

from .aims import Aim, judged, over_fastest, shown
from .feature_contenders import (
    BEYOND,
    FA4,
    FLEX,
    HEAD_DIM,
    PADDING,
    PRECISE,
    WIDTH,
    WINDOW,
    WITHOUT,
    Attend,
    Inputs,
    Workload,
    contenders,
    registered,
)

REPEATABLE = (FLEX, DETERMINISTIC)  # others whose gradients are the same in every run, as ours are
NAMES = {"softcap": "softcap", "alibi_slopes": "ALiBi", "sinks": "sinks", "dropout_p": "dropout"}
NAMES |= {PADDING: "key padding", WINDOW: f"window of {WIDTH} over twice as many keys"}
NAMES |= {HEAD_DIM: "another head_dim", PRECISE: "precise_delta"}
# Of pictures, whose titles have a third of a line.
SHORT = {HEAD_DIM: "", WINDOW: "window over 2x keys, "}
SELECTION = ("features", "head_dims", "other_head_dims")
NEEDED = ("features", "lengths", "head_dims", "other_head_dims")


@dataclass(frozen=True)
class Settings(Timing):
    dtype: str = "bfloat16"
    tokens: int = 16384
    hidden: int = 2048
    # As arguments of an attention; and head_dim, for attention without any at others.
    features: tuple[str, ...] = tuple(NAMES)
    # The most useful first.
    lengths: tuple[int, ...] = (4096, 1024, 16384)
    head_dims: tuple[int, ...] = (64, 128, 256)
    other_head_dims: tuple[int, ...] = (32, 80, 96, 160, 192)
    # Where every query sees every key too; elsewhere the mask is causal.
    full: tuple[int, ...] = (4096,)
    # Of the check against float64; twice that with key padding and at other head_dims.
    check_length: int = 1024


TINY = Settings(
    dtype="float16", tokens=64, hidden=64, lengths=(64,), head_dims=(32,), other_head_dims=(16,), full=(),
    check_length=64, processes=1, rounds=1, seconds=0.0,
)  # fmt: skip


def workloads(settings: Settings) -> list[Workload]:
    """The workloads to run."""
    return [
        Workload(feature, settings.tokens // length, settings.hidden // head_dim, length, head_dim, causal)
        for length in settings.lengths
        for feature in settings.features
        for head_dim in (settings.other_head_dims if feature == HEAD_DIM else settings.head_dims)
        for causal in _causal(feature, length in settings.full)
    ]


def _causal(feature: str, full: bool) -> tuple[bool, ...]:
    """Whether causal, of a workload's masks; windows and other head_dims have no full one."""
    if feature == PADDING:
        return (False,)
    return (True, False) if full and feature not in (WINDOW, HEAD_DIM) else (True,)


def run(options: Options) -> None:
    for workload in workloads(options.settings):
        attends = contenders(workload.feature)
        where = {key: getattr(workload, key) for key in ("feature", "head_dim", "causal")}
        measure = partial(check, attends=attends, workload=workload, options=options)
        right = {name: attends[name] for name in options.right(attends, measure, "contender", **where)}
        options.timed(partial(time_all, right, workload, options), kind="time", **asdict(workload))


def checked(workload: Workload, settings: Settings, on_gpu: bool) -> Workload:
    """What is checked of a workload: on a GPU so much that `auto` takes the kernels that it takes when timed."""
    many = workload.feature in (PADDING, HEAD_DIM)  # for these it asks for longer rows, and more tiles
    length = settings.check_length * (2 if many else 1)
    heads = -(-(2**16 if many else 2**15) // length) if on_gpu else 2
    return replace(workload, batch=2, heads=heads, length=length)


def check(name: str, attends: dict[str, Attend], workload: Workload, options: Options) -> Sample:
    """`attention.compare` of out and the gradients; for another library's dropout also how far its mean is off."""
    device, dtype = options.device, options.dtype
    small = checked(workload, options.settings, device.type == "cuda")
    attend, naive, inputs = attends[name], registered("naive"), Inputs(small, dtype, device)
    backend = name.partition("+")[0]
    if backend in ATTENTION:
        beyond = backend in BEYOND.get(workload.feature, ())
        asked = {"head_dim": 64} if beyond else {"head_dim": workload.head_dim, **inputs.features(0)}
        resolve_attention(backend, device=device, dtype=dtype, **asked)
    drops = workload.feature == "dropout_p" and name not in (OURS, PORTABLE)
    if drops:
        inputs.dropout_p = 0.0
    found, theirs = gradients(attend, inputs), gradients(naive, inputs)
    if backend == FA4 and inputs.kv_lengths is not None:
        # 4.0.0b36 leaves the gradients of padded keys as its memory was; its own tests do not compare them either.
        padded = torch.arange(small.keys, device=device) >= inputs.kv_lengths[:, None]
        for gradient in found[2:]:
            gradient[padded] = 0
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
    """The others' time of forward and backward over flash's, causal where both masks were timed, a panel for each
    feature and head_dim; a row for a feature, and other head_dims last.

    Contenders for which the device waited are not drawn.
    """
    panels: dict[str, dict[str, dict[float, float]]] = {}
    rows = {name: (name == HEAD_DIM, row) for row, name in enumerate(NAMES)}
    for sample in sorted(timed(results, kind="time"), key=lambda s: (rows[s["feature"]], s["head_dim"])):
        if not sample["causal"] and sample["feature"] != PADDING:
            continue
        what = SHORT.get(sample["feature"], f"{NAMES[sample['feature']]}, ")
        full = "" if sample["causal"] else ", full"
        panel = panels.setdefault(f"{what}head_dim {sample['head_dim']}{full}", {})
        for name in sample["ms"]:
            over = gain(sample, name, OURS)
            if over and name != OURS and not waited(sample, name) and not waited(sample, OURS):
                label = "flash+without it" if name == WITHOUT else name  # dashed
                panel.setdefault(label, {})[sample["length"]] = over.median
    drawn = [plots.lines(title, lines, up="time over flash's") for title, lines in panels.items()]
    plots.draw(path, f"Forward + backward with a feature, {results['device']}", drawn)


def libraries(sample: Sample) -> list[str]:
    """The contenders that are another library's with the feature; none has precise_delta."""
    return [name for name in sample["ms"] if name not in (OURS, PORTABLE, WITHOUT)]


def aims(results: Results) -> list[Aim]:
    """No other implementation of the feature should take less time, nor one whose gradients are repeatable.

    What no library has is shown against ours without it.
    """
    found = []
    for sample in judged(results):
        shape = " x ".join(str(sample[key]) for key in ("batch", "heads", "length", "head_dim"))
        where = f"{shape}, {NAMES[sample['feature']]} ({'causal' if sample['causal'] else 'full'})"
        if sample["feature"] == PRECISE:
            if (cost := gain(sample, OURS, WITHOUT)) and not waited(sample, WITHOUT):
                found.append(
                    Aim(f"{where}: time over ours without it", shown(cost, 1), why="no library has it")
                )
            continue
        others = libraries(sample)
        found += over_fastest(where, sample, OURS, others)
        alike = [name for name in others if name in REPEATABLE]
        if alike != others:
            found += over_fastest(where, sample, OURS, alike, "repeatable other")
    return found


def unmeasured(samples: Iterable[Sample]) -> list[str]:
    """The features, by name, of which none of the samples has a time of ours."""
    timed_ones = {sample["feature"] for sample in samples if OURS in sample.get("ms", ())}
    return [name for feature, name in NAMES.items() if feature not in timed_ones]
