"""The contenders of the training experiment: our model with each attention, and other implementations of GPT-2.

All take the same training step: autocast, gradients accumulated over equal micro-batches and clipped at 1.0, torch's
fused AdamW, and a gradient scaler for float16. They differ only in the model and its loss.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import ATTENTION, get_attention, history, resolve_attention
from model.config import GPTConfig
from model.gpt import GPT, AttentionFn
from training.config import Layers
from training.cuda_graphs import add_gradients, compiled_to_graphs, recorded, with_sums
from training.layers import make_gpt
from training.optimizer import OptimizerConfig, build_optimizer, update
from training.precision import cast_together, compiled

from . import nanogpt
from .standard import CUT, cut_causal, score_bias, standard_attention
from .standard import NAME as STANDARD

HF_EAGER, HF_SDPA, FUSED = "hf_eager", "hf_sdpa", "+fused"
# Hugging Face's, its vocabulary rounded up to a multiple of 64: 50,304 rows for GPT-2's 50,257
PADDED = "+padded"
NANOGPT, NANOGPT_BIASES = "nanogpt", "nanogpt_biases"
# (tokens, targets, dropout seed) -> mean NLL
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
# Those that take their causal mask as a bias, which is made once.
BIASED = {STANDARD: standard_attention, CUT: cut_causal}
Compile = Callable[[nn.Module], Callable[..., Any]]


def backends() -> list[str]:
    """Standard attention in both forms, and every registered one but the historical and the kernels that sdpa chooses
    from; naive, sdpa and flash first."""
    first = [name for name in ("naive", "sdpa", "flash") if name in ATTENTION]
    others = sorted(set(ATTENTION) - {*first, *history.NAMES})
    return [*first, *BIASED, *(name for name in others if not name.startswith("sdpa_"))]


class Contender:
    """A model with its optimizer and data, ready to take steps on random tokens.

    Args:
        name: "standard", "standard+cut" or a backend in `kernels.ATTENTION` (plus "+fused": our kernels for the other
            layers and the loss as well), hf_eager or hf_sdpa (transformers' GPT2LMHeadModel; plus "+padded"), nanogpt
            (without biases, as its train.py builds it) or nanogpt_biases (with biases, as in GPT-2 and our model).
        config: shape, context and dropout.
        micro_batch, accumulation: sequences per forward, and forwards per step.
        compiler: torch.compile's backend for the whole model; None: eager.
        graphs: replay the model as CUDA graphs, as train.py does; for torch's inductor and eager, on a GPU only.
        pool: of CUDA graphs, shared by eager contenders that take turns.
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
        pool: Any = None,
        nanogpt_path: str = "",
    ) -> None:
        self.name, self.device, self.dtype, self.vocab_size = name, device, dtype, config.vocab_size
        self.accumulation, self.graphs = accumulation, graphs
        self._record = graphs and compiler is None
        ours = not name.startswith((NANOGPT, HF_EAGER, HF_SDPA))
        self._together = graphs or (ours and compiler is None)  # as `training.building` has it
        self._pool = pool
        self.model, self._loss = self._build(config, _compiler(dtype, compiler, graphs), nanogpt_path)
        self.model.train()
        self.optimizer = build_optimizer(self.model, OptimizerConfig())
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        generator = torch.Generator().manual_seed(0)
        shape = (2, accumulation, micro_batch, config.seq_len)
        self.tokens, self.targets = torch.randint(config.vocab_size, shape, generator=generator).to(device)

    def _build(self, config: GPTConfig, compile_model: Compile, nanogpt_path: str) -> tuple[nn.Module, Loss]:
        name, device, dtype = self.name, self.device, self.dtype
        if name in (NANOGPT, NANOGPT_BIASES):
            theirs = nanogpt.build(nanogpt_path, config, biases=name == NANOGPT_BIASES).to(device)
            forward = compile_model(theirs)
            return theirs, lambda tokens, targets, seed: forward(tokens, targets)[1]
        if name.startswith((HF_EAGER, HF_SDPA)):
            return _huggingface(name, config, device, compile_model)
        backend = name.removesuffix(FUSED)
        if backend in BIASED:
            attention = _with_bias(backend, config, device, dtype)
        else:
            request = {"dropout_p": config.dropout} if config.dropout else {}
            request |= {"device": device, "dtype": dtype, "head_dim": config.head_dim}
            _, attention = resolve_attention(backend, **request)
        ours = initial_model(config, attention, device, Layers.torch if backend == name else Layers.fused)
        forward = compile_model(ours)
        return ours, lambda tokens, targets, seed: forward(tokens, targets, dropout_seed=seed)

    def step(self, number: int) -> Iterator[None]:
        """One optimizer step; yields after every forward, every backward, and after the optimizer."""
        for micro, (tokens, targets) in enumerate(zip(self.tokens, self.targets, strict=True)):
            if self.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            # torch.full fills on the device; torch.tensor would copy from the host and wait for queued work.
            seed = torch.full((), number * self.accumulation + micro, device=self.device)
            if self._record:
                self._loss, self._record = self._recorded(tokens, targets, seed), False
            with self._autocast():
                loss = self._loss(tokens, targets, seed)
            yield
            loss = self.scaler.scale(loss / self.accumulation)
            if self._together:
                add_gradients(loss, self.model, self.graphs)
            else:
                loss.backward()
            yield
        update(self.model, self.optimizer, self.scaler, keep_gradients=self.graphs)
        yield

    def _recorded(self, *like: Tensor) -> Loss:
        """The loss, replayed from now on. Recorded by the first step, whose peak memory counts."""
        loss = self._loss

        def under_autocast(*tensors: Tensor) -> Tensor:
            with self._autocast():
                return loss(*tensors)

        return recorded(self.model, under_autocast, [each.clone() for each in like], self._pool)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """float32 (B, T, vocab_size) for tokens (B, T), uncompiled and without dropout. Not for nanoGPT."""
        self.model.eval()
        with self._autocast():
            out = self.model(tokens)
        self.model.train()
        return getattr(out, "logits", out)[..., : self.vocab_size].float()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)


def _with_bias(name: str, config: GPTConfig, device: torch.device, dtype: torch.dtype) -> AttentionFn:
    """One of `BIASED` as our model takes it."""
    function = BIASED[name]
    like = torch.empty(1, 1, config.seq_len, 1, dtype=dtype, device=device)
    bias = score_bias(like, causal=True, kv_lengths=None)

    def attention(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, **options: object) -> Tensor:
        return function(q.to(dtype), k.to(dtype), v.to(dtype), bias, dropout_p)

    return attention


def _compiler(dtype: torch.dtype, compiler: str | None, graphs: bool) -> Compile:
    if compiler is None:
        return lambda model: (with_sums if graphs else cast_together)(model, dtype)
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

    implementation, _, padded = name.removeprefix("hf_").partition("+")
    theirs = to_huggingface(initial_model(config, get_attention("naive"), device))
    if padded:
        theirs.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)
    theirs.set_attn_implementation(implementation)
    theirs.config.use_cache = False
    theirs = theirs.to(device)
    forward = compile_model(theirs)

    def loss(tokens: Tensor, targets: Tensor, seed: Tensor) -> Tensor:
        logits = forward(input_ids=tokens).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return theirs, loss
