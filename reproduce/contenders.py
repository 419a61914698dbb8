"""The contenders of the training experiment: our model with each attention, and other implementations of GPT-2.

All take the same training step: autocast, gradients accumulated over equal micro-batches and clipped at 1.0, torch's
fused AdamW, and a gradient scaler for float16. They differ only in the model and its loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import ATTENTION, get_attention, history, resolve_attention
from model.config import GPTConfig
from model.gpt import GPT, AttentionFn
from training.config import Layers
from training.cuda_graphs import compiled_to_graphs
from training.layers import make_gpt
from training.optimizer import OptimizerConfig, build_optimizer, update
from training.precision import compiled

from . import nanogpt

HF_EAGER, HF_SDPA, FUSED = "hf_eager", "hf_sdpa", "+fused"
NANOGPT, NANOGPT_BIASES = "nanogpt", "nanogpt_biases"
# (tokens, targets, dropout seed) -> mean NLL
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Compile = Callable[[nn.Module], Callable[..., Any]]


def backends() -> list[str]:
    """Every registered attention but the historical ones, with naive, sdpa and flash first."""
    first = [name for name in ("naive", "sdpa", "flash") if name in ATTENTION]
    return first + sorted(set(ATTENTION) - {*first, *history.NAMES})


class Contender:
    """A model with its optimizer and data, ready to take steps on random tokens.

    Args:
        name: a backend in `kernels.ATTENTION` (plus "+fused": our kernels for the other layers and the loss as
            well), hf_eager or hf_sdpa (transformers' GPT2LMHeadModel), nanogpt (without biases, as its train.py
            builds it) or nanogpt_biases (with biases, as in GPT-2 and our model).
        config: shape, context and dropout.
        micro_batch, accumulation: sequences per forward, and forwards per step.
        compiler: torch.compile's backend for the whole model; None: eager.
        graphs: replay the compiled model as CUDA graphs, as train.py does; for torch's inductor on a GPU only.
        nanogpt_path: model.py of a nanoGPT checkout.

    Raises AttentionError if the backend does not support what the step needs.
    """

    def __init__(
        self,
        name: str,
        config: GPTConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        micro_batch: int,
        accumulation: int,
        compiler: str | None,
        graphs: bool = False,
        nanogpt_path: str = "",
    ) -> None:
        self.name, self.device, self.dtype = name, device, dtype
        self.accumulation, self.graphs = accumulation, graphs
        compile_model = _compiler(dtype, compiler, graphs)
        self.model, self._loss = _make(name, config, device, dtype, compile_model, nanogpt_path)
        self.model.train()
        self.optimizer = build_optimizer(self.model, OptimizerConfig())
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        generator = torch.Generator().manual_seed(0)
        shape = (2, accumulation, micro_batch, config.seq_len)
        self.tokens, self.targets = torch.randint(config.vocab_size, shape, generator=generator).to(device)

    def step(self, number: int) -> Iterator[None]:
        """One optimizer step; yields after every forward, every backward, and after the optimizer."""
        for micro, (tokens, targets) in enumerate(zip(self.tokens, self.targets, strict=True)):
            if self.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with self._autocast():
                # torch.full fills on the device; torch.tensor would copy from the host and wait for queued work.
                seed = torch.full((), number * self.accumulation + micro, device=self.device)
                loss = self._loss(tokens, targets, seed)
            yield
            self.scaler.scale(loss / self.accumulation).backward()
            yield
        update(self.model, self.optimizer, self.scaler, keep_gradients=self.graphs)
        yield

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """float32 (B, T, vocab_size) for tokens (B, T), uncompiled and without dropout. Not for nanoGPT."""
        self.model.eval()
        with self._autocast():
            out = self.model(tokens)
        self.model.train()
        return getattr(out, "logits", out).float()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)


def split_phases(phases: list[list[float]]) -> dict[str, list[float]]:
    """Milliseconds of each step's forward, backward and optimizer, summed over the phases of `Contender.step`."""
    *micro, optimizer = phases
    return {
        "forward": [math.fsum(each) for each in zip(*micro[0::2], strict=True)],
        "backward": [math.fsum(each) for each in zip(*micro[1::2], strict=True)],
        "optimizer": optimizer,
    }


def _make(
    name: str,
    config: GPTConfig,
    device: torch.device,
    dtype: torch.dtype,
    compile_model: Compile,
    nanogpt_path: str,
) -> tuple[nn.Module, Loss]:
    if name in (NANOGPT, NANOGPT_BIASES):
        theirs = nanogpt.build(nanogpt_path, config, biases=name == NANOGPT_BIASES).to(device)
        forward = compile_model(theirs)
        return theirs, lambda tokens, targets, seed: forward(tokens, targets)[1]
    if name in (HF_EAGER, HF_SDPA):
        return _huggingface(name, config, device, compile_model)
    backend, _, fused = name.partition("+")
    features = {"dropout_p": config.dropout} if config.dropout else {}
    _, attention = resolve_attention(
        backend, device=device, dtype=dtype, head_dim=config.head_dim, **features
    )
    ours = initial_model(config, attention, device, Layers.fused if fused else Layers.torch)
    forward = compile_model(ours)
    return ours, lambda tokens, targets, seed: forward(tokens, targets, dropout_seed=seed)


def _compiler(dtype: torch.dtype, compiler: str | None, graphs: bool) -> Compile:
    if compiler is None:
        return lambda model: model
    if graphs:
        return lambda model: compiled_to_graphs(model, dtype)
    return lambda model: compiled(model, dtype, compiler)


def initial_model(
    config: GPTConfig, attention: AttentionFn, device: torch.device, layers: Layers = Layers.torch
) -> GPT:
    """Our model, on the device, with the initial weights that every contender but nanoGPT starts from."""
    with device:
        generator = torch.Generator(device).manual_seed(0)
        return make_gpt(config, attention, loss=layers, block=layers, generator=generator)


def _huggingface(
    name: str, config: GPTConfig, device: torch.device, compile_model: Compile
) -> tuple[nn.Module, Loss]:
    """transformers' GPT-2 with our initial weights, and its loss, on the same targets as ours."""
    from model.huggingface import to_huggingface

    theirs = to_huggingface(initial_model(config, get_attention("naive"), device))
    theirs.set_attn_implementation(name.removeprefix("hf_"))
    theirs.config.use_cache = False
    theirs = theirs.to(device)
    forward = compile_model(theirs)

    def loss(tokens: Tensor, targets: Tensor, seed: Tensor) -> Tensor:
        logits = forward(input_ids=tokens).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return theirs, loss
