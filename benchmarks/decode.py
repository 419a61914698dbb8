"""The time of a generated token: ours against transformers' `generate` with sdpa, on the same weights of GPT-2 small.

A batch of prompts of one length is continued greedily, in the middle of the context: a token's time grows evenly with
what it attends to, so it is that of a whole context on average. Contenders: `generate_batch` with the split-KV kernel
or PyTorch's attention, each step launched from the host or as a CUDA graph; transformers with its dynamic cache, and
with its static one, which it compiles on a GPU. Their first tokens are compared with those of transformers' eager
attention in float32 before any is timed; they take turns. A token's time is what more tokens take more: reading the
prompt and recording CUDA graphs, which ours and the static cache do in each generation, are in the time to the first
tokens, beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import get_attention
from kernels.flash.decode import decode_attention
from model.config import GPTConfig
from model.decode import attend_masked, generate_batch
from model.gpt import GPT
from model.huggingface import to_huggingface
from reproduce import plots, timing
from reproduce.common import text_table
from reproduce.experiment import Options, Results, Sample, Timing
from reproduce.timing import fastest, timed, took

from .aims import Aim, held, shown

OURS = "split-KV, CUDA graph"
PEERS = "transformers, sdpa", "transformers, sdpa, static cache"
ORACLE = "transformers, eager"
FIRST, TOKEN = "first tokens", "token"
Generate = Callable[[Tensor, int], Tensor]  # prompts (B, T), how many tokens more -> (B, T + as many)
NEEDED = ("batches",)


@dataclass(frozen=True)
class Settings(Timing):
    batches: tuple[int, ...] = (1, 64)
    dtype: str = "bfloat16"
    layers: int = 12
    heads: int = 12
    width: int = 768
    vocab_size: int = 50257
    length: int = 1024
    # Tokens of a prompt: with these three a token attends to 528 on average, as one of a text from 32 to 1024 does.
    prompt: int = 472
    # The first tokens, which must agree in float32, and those that are timed.
    first: int = 8
    tokens: int = 96
    seconds: float = 0.0


TINY = Settings(
    batches=(2,), dtype="float32", layers=1, heads=2, width=32, vocab_size=50, length=16, prompt=4, first=4, tokens=4,
    processes=1, rounds=1,
)  # fmt: skip


def contenders(options: Options, dtype: torch.dtype) -> dict[str, Generate]:
    """Name -> its greedy generation, all with the same weights."""
    settings = options.settings
    config = GPTConfig(
        vocab_size=settings.vocab_size, seq_len=settings.length, n_layer=settings.layers, n_head=settings.heads,
        n_embd=settings.width,
    )  # fmt: skip
    ours = GPT(config, get_attention("sdpa"))
    theirs: Any = to_huggingface(ours)
    ours, theirs = (model.to(options.device, dtype).eval() for model in (ours, theirs))
    theirs.generation_config.pad_token_id = 0

    def batch(tokens: Tensor, n: int, **how: Any) -> Tensor:
        return torch.stack(generate_batch(ours, list(tokens), n, temperature=0.0, **how))

    def transformers(tokens: Tensor, n: int, attention: str = "sdpa", **how: Any) -> Tensor:
        theirs.set_attn_implementation(attention)
        return theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=n, min_new_tokens=n, do_sample=False,
            eos_token_id=None, **how,
        )  # fmt: skip

    on_gpu = options.device.type == "cuda"
    found: dict[str, Generate] = {
        "split-KV": partial(batch, attend=decode_attention),
        "PyTorch's attention": partial(batch, attend=attend_masked),
        PEERS[0]: transformers,
        PEERS[1]: partial(transformers, cache_implementation="static"),
        ORACLE: partial(transformers, attention="eager"),
    }
    if on_gpu:
        found[OURS] = partial(batch, attend=decode_attention, cuda_graph=True)
        found["PyTorch's attention, CUDA graph"] = partial(batch, attend=attend_masked, cuda_graph=True)
    return found


def prompts(batch: int, options: Options) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    shape = (batch, options.settings.prompt)
    return torch.randint(options.settings.vocab_size, shape, generator=draw).to(options.device)


def run(options: Options) -> None:
    for batch in options.settings.batches:
        options.sample(partial(check, batch, options), kind="check", batch=batch)
        options.timed(partial(time_all, batch, options), kind="time", batch=batch)


def check(batch: int, options: Options) -> Sample:
    """{"agree"}: the contenders whose first tokens are eager's; raises if one's are not."""
    tokens = prompts(batch, options)
    racing = contenders(options, torch.float32)
    # Compiling the static cache's step in float32 as well would take longer than all that is timed.
    racing[PEERS[1]] = partial(racing[PEERS[1]], disable_compile=True)
    found = {name: generate(tokens, options.settings.first) for name, generate in racing.items()}
    wrong = [name for name, text in found.items() if not torch.equal(text, found[ORACLE])]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: other tokens than transformers' eager attention")
    return {"agree": list(found)}


def time_all(batch: int, options: Options) -> Sample:
    """`timing.race` of generations, "first tokens" whole and "token" one of the others; the host's time counts."""
    settings, tokens = options.settings, prompts(batch, options)
    racing = contenders(options, options.dtype)
    del racing[ORACLE]

    def call_of(generate: Generate) -> timing.Call:
        def call(number: int) -> Iterator[None]:
            generate(tokens, settings.first)
            yield
            generate(tokens, settings.first + settings.tokens)
            yield

        return call

    calls = {name: call_of(generate) for name, generate in racing.items()}
    raced = timing.race(calls, options, (FIRST, TOKEN), warmup=1, patience=1)
    for each in raced["ms"].values():
        pairs = zip(each[FIRST], each[TOKEN], strict=True)
        each[TOKEN] = [(whole - first) / settings.tokens for first, whole in pairs]
    return raced


def table(results: Results) -> str:
    """A row for each contender at each batch."""
    header = ["contender", "batch", f"{FIRST} ms", f"{TOKEN} ms"]
    return text_table(header, [
        [name, str(sample["batch"]), *(took(sample, name, phase).ranging("{:.4g}") for phase in (FIRST, TOKEN))]
        for sample in timed(results, kind="time")
        for name in sample["ms"]
    ])  # fmt: skip


def draw(results: Results, path: Path) -> None:
    """A panel for each batch, with a bar for each contender."""
    panels = []
    for sample in timed(results, kind="time"):
        rows = {name: {"": took(sample, name, TOKEN).median} for name in sample["ms"]}
        panels.append(plots.bars(f"batch {sample['batch']}", rows, across="ms a token", backends=True))
    plots.draw(path, f"A generated token on {results['device']}", panels, columns=2)


def aims(results: Results) -> list[Aim]:
    """At least as fast a token as the faster of transformers' caches, with sdpa."""
    found = []
    for sample in timed(results, kind="time"):
        if OURS in sample["ms"] and (peer := fastest(sample, PEERS, TOKEN)):
            ours, what = took(sample, OURS, TOKEN), f"a token of {sample['batch']} sequences"
            met, level = held(over := ours / peer[1])
            text = f"{shown(over, 1)} the time of {peer[0]}"
            found.append(Aim(what, text, "1.00x", met, level=level))
    return found
