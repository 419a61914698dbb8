"""transformers' models on our kernels: a forward and a training step against its other attentions.

GPT-2 small and a Llama of about its size (RoPE, grouped heads, SwiGLU), random weights, each with
attn_implementation="tilegpt" (`kernels.register_transformers`), "sdpa" and, if it is installed,
"flash_attention_4"; every row of a batch whole, or of a length of its own and padded on the right. A contender's
loss and gradient are compared with those of "eager" first; those that pass take turns in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernels
from reproduce import plots, timing
from reproduce.experiment import Options, Results, Sample, Timing
from reproduce.timing import timed, took

from .aims import Aim, held, shown

OURS, ORACLE = "tilegpt", "eager"
FORWARD, STEP = "forward", "forward and backward"
NEEDED = ("models", "attentions")


@dataclass(frozen=True)
class Settings(Timing):
    # "gpt2" and "llama".
    models: tuple[str, ...] = ("gpt2", "llama")
    attentions: tuple[str, ...] = (OURS, "sdpa", "flash_attention_4")
    dtype: str = "bfloat16"
    batch: int = 16
    length: int = 1024
    width: int = 768
    layers: int = 12
    vocab_size: int = 50257
    # Measuring time per contender and workload.
    seconds: float = 2.0


TINY = Settings(
    attentions=(OURS, "sdpa"), dtype="float32", batch=2, length=16, width=64, layers=1, vocab_size=50, processes=1,
    rounds=1, seconds=0.0,
)  # fmt: skip


def build(name: str, attention: str, options: Options) -> Any:
    """One of the two models, its weights always the same, in training mode without dropout. Raises AttentionError
    for an attention that is not installed."""
    import transformers

    kernels.register_transformers()
    settings = options.settings
    heads = settings.width // 64 or 1
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=settings.width, n_head=heads, n_layer=settings.layers, n_positions=settings.length,
            vocab_size=settings.vocab_size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            hidden_size=settings.width, num_attention_heads=heads, num_key_value_heads=max(heads // 3, 1),
            num_hidden_layers=settings.layers, intermediate_size=8 * settings.width // 3,
            vocab_size=settings.vocab_size, tie_word_embeddings=True,
        )  # fmt: skip
    config.use_cache = False
    torch.manual_seed(0)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except ImportError as error:
        raise kernels.AttentionError(f"it needs its package ({error})") from None
    return model.to(options.device, options.dtype).train()


def batch_of(padded: bool, options: Options) -> dict[str, Tensor]:
    """input_ids, attention_mask and labels; a quarter of the tokens is padding on average if it is padded."""
    settings, draw = options.settings, torch.Generator().manual_seed(0)
    tokens = torch.randint(settings.vocab_size, (settings.batch, settings.length), generator=draw)
    real = torch.ones_like(tokens)
    if padded:
        lengths = torch.randint(
            settings.length // 2, settings.length + 1, (settings.batch, 1), generator=draw
        )
        real = (torch.arange(settings.length) < lengths).long()
    batch = {"input_ids": tokens, "attention_mask": real, "labels": tokens.masked_fill(real == 0, -100)}
    return {name: each.to(options.device) for name, each in batch.items()}


def run(options: Options) -> None:
    for name in options.settings.models:
        for padded in (False, True):
            key = {"model": name, "padded": padded}
            measure = partial(check, name=name, padded=padded, options=options)
            passed = options.right(options.settings.attentions, measure, "attention", **key)
            options.timed(partial(time_all, name, passed, padded, options), kind="time", **key)


def check(attention: str, name: str, padded: bool, options: Options) -> Sample:
    """Its errors relative to eager in float32: {"loss_error", "gradient_error"}; raises if they are not rounding."""
    batch = batch_of(padded, options)
    found = []
    for each, dtype in ((attention, None), (ORACLE, torch.float32)):
        model = build(name, each, options).to(dtype)
        loss = model(**batch).loss
        loss.backward()
        gradient = next(model.parameters()).grad.double()
        found.append((loss.detach().double(), gradient))
        del model
    (loss, gradient), (exact, exact_gradient) = found
    errors = {
        "loss_error": ((loss - exact).abs() / exact).item(),
        "gradient_error": ((gradient - exact_gradient).norm() / exact_gradient.norm()).item(),
    }
    if errors["loss_error"] > 1e-2 or errors["gradient_error"] > 5e-2:
        raise ValueError(f"{attention} differs from {ORACLE}: {errors}")
    return {**errors, "passed": True}


def time_all(name: str, attentions: list[str], padded: bool, options: Options) -> Sample:
    """`timing.race` of a forward, and of a forward and backward; waiting for the host counts."""
    batch = batch_of(padded, options)

    def calls(attention: str) -> timing.Call:
        model = build(name, attention, options)

        def call(number: int) -> Iterator[None]:
            with torch.no_grad():
                model(**batch)
            yield
            model.zero_grad(set_to_none=True)
            model(**batch).loss.backward()
            yield

        return call

    return timing.race({each: calls(each) for each in attentions}, options, (FORWARD, STEP), patience=1)


def _title(sample: Sample) -> str:
    return f"{sample['model']}, {'padded' if sample['padded'] else 'whole'} rows"


def draw(results: Results, path: Path) -> None:
    """A panel for each model and batch, with a bar of the training step for each attention."""
    panels = []
    for sample in timed(results, kind="time"):
        rows = {name: {"": took(sample, name, STEP).median} for name in sample["ms"]}
        panels.append(plots.bars(_title(sample), rows, across="ms of a forward and backward", backends=True))
    plots.draw(path, f"transformers' models on {results['device']}", panels, columns=2)


def aims(results: Results) -> list[Aim]:
    """No slower than the attention that a model would run otherwise."""
    found = []
    for sample in timed(results, kind="time"):
        if {OURS, "sdpa"} <= sample["ms"].keys():
            ours, theirs = took(sample, OURS, STEP), took(sample, "sdpa", STEP)
            met, level = held(ratio := ours / theirs)
            what, text = f"transformers' {_title(sample)}, a step", f"{shown(ratio, 1)} sdpa's time"
            found.append(Aim(what, text, "1.00x", met, level=level))
    return found
