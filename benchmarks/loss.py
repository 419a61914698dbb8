"""Time and peak memory of GPT-2's output head with its loss, forward and backward: ours, torch's and Liger-Kernel's.

Contenders: fused (`kernels.layers`), eager (`model.loss=torch`), compiled (torch.compile of eager) and,
if it is installed, liger (Liger-Kernel's function). All run under autocast with a float32 weight, as in GPT-2's
training; hidden has autocast's dtype, as our blocks produce it. Results are checked against float64, then peak memory
is measured, then those that passed take turns in one process to be timed. fused and liger compute the gradients in
their forward, so only the sum of both passes can be compared. On a CPU only --tiny runs: the fused loss holds up to
512 MiB of logits at a time, and a count of bytes would be meaningful only with many times as many.

Liger-Kernel does not support a padded vocabulary, so it predicts the padding as well, and is checked against that
function: passing only the weight's first 50,257 rows would misalign its rows of logits, and a bias of -inf would cost
another pass. Its weight is cast once beforehand, since it would cast a float32 weight twice per chunk, and it
accumulates in float32, as ours does.
"""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import AttentionError
from kernels.layers.linear_cross_entropy import linear_cross_entropy
from model.gpt import LossFn, cross_entropy
from reproduce import plots, timing
from reproduce.attention import compare, race
from reproduce.experiment import Options, Results, Sample, Timing, pick
from reproduce.timing import timed, took
from training.precision import compiled

from .aims import Aim, held, shown

OURS, EAGER, COMPILED, LIGER = "fused", "eager", "compiled", "liger"
PHASES = ("forward", "backward")
# The fused loss's peak memory may be at most 3 times the size of inputs and gradients, which it includes. With one
# 16-bit copy of the logits it would be 14 times at 65,536 rows, and 6 times at 16,384.
MOST_MEMORY = 3


@dataclass(frozen=True)
class Settings(Timing):
    # Tokens per forward: 64 and 16 sequences of 1024.
    rows: tuple[int, ...] = (65536, 16384)
    # Tokens in the check against float64: more than one chunk for every contender.
    check_rows: int = 8192
    width: int = 768
    # Token ids that can be predicted, and rows of the weight.
    vocab_size: int = 50257
    padded_vocab: int = 50304
    dtype: str = "bfloat16"
    # torch.compile's backend.
    compiler: str = "inductor"
    # Measuring time per contender.
    seconds: float = 2.0


TINY = Settings(
    rows=(48, 16), check_rows=32, width=32, vocab_size=120, padded_vocab=128, dtype="float16",
    compiler="aot_eager", processes=1, rounds=1, seconds=0.0,
)  # fmt: skip

Inputs = tuple[Tensor, Tensor, Tensor]


def make_inputs(rows: int, options: Options) -> Inputs:
    """hidden (rows, width), the float32 weight (padded vocabulary, width) as initialised, targets (rows,)."""
    settings, device = options.settings, options.device
    hidden = torch.randn(rows, settings.width, device=device, dtype=options.dtype)
    weight = 0.02 * torch.randn(settings.padded_vocab, settings.width, device=device)
    targets = torch.randint(settings.vocab_size, (rows,), device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Liger-Kernel's loss, over every row of weight; vocab_size is ignored."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError as error:
        raise AttentionError(f"not installed ({error}); pip install liger-kernel, then --again") from None
    # bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype
    rest = (None, None, -1, 0.0, 0.0, "mean", None, False, torch.float32)
    return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight.to(hidden.dtype), targets, *rest)[0]


def contenders(options: Options) -> dict[str, LossFn]:
    """The losses to compare, ours first."""
    compiled_loss = compiled(cross_entropy, options.dtype, options.settings.compiler)
    return {OURS: linear_cross_entropy, EAGER: cross_entropy, COMPILED: compiled_loss, LIGER: liger}


def forward(loss: LossFn, inputs: Inputs, vocab_size: int, options: Options) -> Tensor:
    """The mean NLL, under autocast."""
    with options.autocast():
        return loss(*inputs, vocab_size)


def both(loss: LossFn, inputs: Inputs, vocab_size: int, options: Options) -> tuple[Tensor, ...]:
    """The mean NLL and its gradients with respect to hidden and weight."""
    value = forward(loss, inputs, vocab_size, options)
    return value.detach(), *torch.autograd.grad(value, inputs[:2])


def exact(inputs: Inputs, vocab_size: int, chunk: int = 1024) -> tuple[Tensor, ...]:
    """What `both` returns, in float64, with at most `chunk` rows of logits at a time."""
    hidden, weight = (x.detach().double().requires_grad_() for x in inputs[:2])
    total = hidden.new_zeros(())
    for rows, targets in zip(hidden.split(chunk), inputs[2].split(chunk), strict=True):
        part = F.cross_entropy(rows @ weight[:vocab_size].T, targets, reduction="sum") / len(hidden)
        part.backward()
        total += part.detach()
    return total, hidden.grad, weight.grad


def run(options: Options) -> None:
    torch.compiler.reset()  # before every shape: else the second would be compiled for a dynamic number of rows
    losses = contenders(options)
    right = options.right(losses, lambda name: check(name, losses[name], options), "contender")
    for rows in options.settings.rows:
        torch.compiler.reset()
        fit = {}
        for name in right:
            measure = partial(memory, losses[name], rows, options)
            if "peak_bytes" in options.sample(measure, kind="memory", contender=name, rows=rows):
                fit[name] = losses[name]
        if fit:
            options.timed(partial(time_all, fit, rows, options), kind="time", rows=rows)


def check(name: str, loss: LossFn, options: Options) -> Sample:
    """`attention.compare` of the loss and both gradients, with eager in naive's place."""
    settings = options.settings
    inputs = make_inputs(settings.check_rows, options)
    vocab_size = settings.padded_vocab if name == LIGER else settings.vocab_size
    found, eager = (both(each, inputs, vocab_size, options) for each in (loss, cross_entropy))
    names = ("loss", "d_hidden", "d_weight")
    version = {"version": importlib.metadata.version("liger-kernel")} if name == LIGER else {}
    return compare(found, eager, exact(inputs, vocab_size), inputs[0].dtype, names) | version


def memory(loss: LossFn, rows: int, options: Options) -> Sample:
    """Peak bytes of inputs, forward and backward; also the bytes of inputs and gradients, and of 16-bit logits."""
    device = options.device
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # avoids fragmentation, so that a large contender fits

    def once() -> None:
        both(loss, make_inputs(rows, options), options.settings.vocab_size, options)

    once()  # compiles and tunes, so that the memory for that is not part of the peak
    peak = timing.peak_bytes(once, device)
    hidden, weight, targets = make_inputs(rows, options)
    return {
        "peak_bytes": peak,
        "inputs_and_gradients_bytes": 2 * (hidden.nbytes + weight.nbytes) + targets.nbytes,
        "logits_bytes": 2 * rows * len(weight),
    }


def time_all(losses: dict[str, LossFn], rows: int, options: Options) -> Sample:
    """`attention.race` of the contenders' forward and backward."""
    settings = options.settings
    count = timing.input_sets(rows * settings.width * 2, options.device)
    every = [make_inputs(rows, options) for _ in range(count)]
    sets = [SimpleNamespace(inputs=inputs, qkv=inputs[:2], d_out=None) for inputs in every]

    def call_of(loss: LossFn) -> Callable[[Any, int], Tensor]:
        return lambda one, number: forward(loss, one.inputs, settings.vocab_size, options)

    return race({name: call_of(loss) for name, loss in losses.items()}, sets, options)


def memory_of(results: Results, rows: int, name: str) -> Sample:
    """The memory sample of a timed contender."""
    return pick(results, kind="memory", rows=rows, contender=name)[0]


def draw(results: Results, path: Path) -> None:
    """Time by phase and peak memory of every contender, a pair of panels for each number of rows."""
    panels = []
    for sample in timed(results, kind="time"):
        names, title = sample["ms"], f"{sample['rows']} rows"
        times = {name: {phase: took(sample, name, phase).median for phase in PHASES} for name in names}
        memory = {name: memory_of(results, sample["rows"], name) for name in names}
        gib = {name: {"": each["peak_bytes"] / 2**30} for name, each in memory.items()}
        gib["the logits alone"] = {"": memory[next(iter(names))]["logits_bytes"] / 2**30}
        panels += [plots.bars(title, times, across="ms")]
        panels += [plots.bars(title, gib, across="GiB at the peak", shade=plots.COLOURS[2])]
    plots.draw(path, f"Head and loss on {results['device']}", panels, columns=2)


def aims(results: Results) -> list[Aim]:
    """As fast as torch.compile, and never the full logits in memory."""
    found = []
    for sample in timed(results, kind="time"):
        if OURS not in sample["ms"]:
            continue
        where = f"{sample['rows']} rows"
        ratios = {name: took(sample, name) / took(sample, OURS) for name in sample["ms"]}
        if ratio := ratios.get(COMPILED):
            what = f"{where}: torch.compile's time over ours"
            met, level = held(took(sample, OURS) / took(sample, COMPILED))
            found.append(Aim(what, shown(ratio, 1), "1x at least", met, level=level))
        if ratio := ratios.get(LIGER):
            why = "it predicts the vocabulary's padding too, so it is no like for like"
            found.append(Aim(f"{where}: Liger-Kernel's time over ours", ratio.shown(), why=why))
        memory = memory_of(results, sample["rows"], OURS)
        ratio, logits = (
            memory[key] / memory["inputs_and_gradients_bytes"] for key in ("peak_bytes", "logits_bytes")
        )
        why = f"the logits alone, in 16 bits, are {logits:.1f}x"
        what, aim = f"{where}: peak memory over inputs and gradients", f"{MOST_MEMORY}x at most"
        found.append(Aim(what, f"{ratio:.1f}x", aim, ratio <= MOST_MEMORY, why))
    return found
