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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import AttentionError
from kernels.layers.linear_cross_entropy import linear_cross_entropy
from model.gpt import LossFn, cross_entropy
from training.precision import compiled

from . import timing
from .experiment import Options, Sample
from .loss_figures import COMPILED, EAGER, LIGER, OURS, PHASES, draw, judge, table

__all__ = ["TINY", "Settings", "draw", "judge", "run", "table"]


@dataclass(frozen=True)
class Settings:
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
    compiler="aot_eager", seconds=0.0,
)  # fmt: skip

Inputs = tuple[Tensor, Tensor, Tensor]


def make_inputs(rows: int, options: Options) -> Inputs:
    """hidden (rows, width), the float32 weight (padded vocabulary, width) as initialised, targets (rows,)."""
    settings, device = options.settings, options.device
    hidden = torch.randn(rows, settings.width, device=device, dtype=getattr(torch, settings.dtype))
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


def contenders(settings: Settings) -> dict[str, LossFn]:
    """The losses to compare, ours first."""
    compiled_loss = compiled(cross_entropy, getattr(torch, settings.dtype), settings.compiler)
    return {OURS: linear_cross_entropy, EAGER: cross_entropy, COMPILED: compiled_loss, LIGER: liger}


def forward(loss: LossFn, inputs: Inputs, vocab_size: int, options: Options) -> Tensor:
    """The mean NLL, under autocast."""
    with torch.autocast(options.device.type, getattr(torch, options.settings.dtype)):
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
    """Run the experiment; see `experiment.py`."""
    torch.compiler.reset()  # before every shape: else the second would be compiled for a dynamic number of rows
    right = {}
    for name, loss in contenders(options.settings).items():
        found = options.sample(partial(check, name, loss, options), kind="check", contender=name)
        if found.get("passed"):
            right[name] = loss
    for rows in options.settings.rows:
        torch.compiler.reset()
        fit = {}
        for name, loss in right.items():
            found = options.sample(
                partial(memory, loss, rows, options), kind="memory", contender=name, rows=rows
            )
            if "peak_bytes" in found:
                fit[name] = loss
        if fit:
            options.sample(partial(time_all, fit, rows, options), kind="time", rows=rows)


def check(name: str, loss: LossFn, options: Options) -> Sample:
    """Errors of the loss and both gradients against float64; the limit is twice eager's errors."""
    settings = options.settings
    inputs = make_inputs(settings.check_rows, options)
    vocab_size = settings.padded_vocab if name == LIGER else settings.vocab_size
    found = both(loss, inputs, vocab_size, options)
    eager = both(cross_entropy, inputs, vocab_size, options)
    errors, limits = {}, {}
    for part, ours, theirs, reference in zip(
        ("loss", "d_hidden", "d_weight"), found, eager, exact(inputs, vocab_size), strict=True
    ):
        norm = reference.norm()
        errors[part] = float((ours.double() - reference).norm() / norm)
        rounding = 0.1 * torch.finfo(inputs[0].dtype).eps
        limits[part] = 2 * float((theirs.double() - reference).norm() / norm) + rounding
    passed = all(errors[part] <= limits[part] for part in errors)
    version = {"version": importlib.metadata.version("liger-kernel")} if name == LIGER else {}
    return {"errors": errors, "limits": limits, "passed": passed, **version}


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
    """Milliseconds of forward and backward in every round: {"ms": {contender: {phase: [...]}}, "late", "clocks"}."""
    settings, device = options.settings, options.device
    count = timing.input_sets(rows * settings.width * 2, device)
    sets = [make_inputs(rows, options) for _ in range(count)]

    def call_of(loss: LossFn) -> timing.Call:
        def call(number: int) -> Iterator[None]:
            inputs = sets[number % count]
            value = forward(loss, inputs, settings.vocab_size, options)
            yield
            torch.autograd.grad(value, inputs[:2])
            yield

        return call

    before = timing.clocks(device)
    timed = timing.time_alternating(
        {name: call_of(loss) for name, loss in losses.items()},
        device,
        seconds=settings.seconds,
        warmup=0 if options.tiny else 3,
        rounds=(1, 1) if options.tiny else (5, 100),
    )
    milliseconds = {
        name: dict(zip(PHASES, ([float(f"{ms:.5g}") for ms in each] for each in phases), strict=True))
        for name, phases in timed.ms.items()
    }
    return {"ms": milliseconds, "late": timed.late, "clocks": [before, timing.clocks(device)]}
