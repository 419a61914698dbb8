"""What attention changes in a model, without the noise of training: losses and gradients of fixed weights.

The layers are torch's and nothing is compiled, so that between two backends only attention differs.
"""

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from data.loader import IGNORED, Batches, Corpus, EvaluationBatches
from kernels import ATTENTION, AttentionError, bind, get_attention, history, resolve_attention
from model.config import GPTConfig
from model.gpt import GPT
from training import checkpoint
from training.config import Config
from training.corpus import prepare_corpus
from training.load_run import read_run
from training.seeds import stream_seed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compare_backends(
    device: torch.device, config: Config, run: Path | None, output: Path, tokens: int, batch: int
) -> None:
    """Write to `output` every backend's validation loss and gradient errors, as JSON.

    Args:
        config: the run's; its model, corpus and seeds.
        run: whose best checkpoint is taken, or its newest if it keeps none; None: before the first step.
        tokens: of the validation split, from its start.
        batch: sequences of the first training batch that gradients are taken of.

    Losses are compared with naive's in float32; gradients with naive's in float64, by |g - g64| / |g64| for each
    parameter.
    """
    corpus = prepare_corpus(config.data, quiet=True)
    shape = _shape(corpus, config)
    if run is None:
        seed = config.seed if config.init_seed is None else config.init_seed
        generator = torch.Generator().manual_seed(stream_seed(seed, "init"))
        state = GPT(shape, get_attention("naive"), generator=generator).state_dict()
    else:
        best = checkpoint.best(run)
        state = checkpoint.load_weights(best[0] if best else checkpoint.find(run), "cpu")
    exact = _gradients(
        _model(shape, get_attention("naive"), state, device, torch.float64), corpus, config, batch, None
    )
    rows: list[dict[str, Any]] = []
    for name, attention, dtype in _attentions(shape, device):
        row = {"backend": name, "dtype": str(dtype).removeprefix("torch.")}
        try:
            model = _model(shape, attention, state, device, torch.float32)
            nats, counts = _by_position(model, corpus, shape.seq_len, dtype, tokens)
            row["loss"] = (nats.sum() / counts.sum()).item()
            gradients = _gradients(model, corpus, config, batch, dtype)
            errors = {key: gradients[key] - exact[key] for key in exact}
            row["gradient_errors"] = {key: float(errors[key].norm() / exact[key].norm()) for key in exact}
        except (AttentionError, RuntimeError) as error:
            is_refusal = isinstance(error, AttentionError | torch.OutOfMemoryError)
            if not is_refusal and "No available kernel" not in str(error):  # how torch's SDPA refuses
                raise
            row["refused"] = str(error).splitlines()[0]
        rows.append(row)
        model = None
        gc.collect()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"rows": rows, "tokens": tokens, "gradient_tokens": batch * shape.seq_len}))


def _shape(corpus: Corpus, config: Config) -> GPTConfig:
    """The run's model without dropout."""
    return replace(config.model, vocab_size=corpus.n_vocab, dropout=0.0)


def _attentions(shape: GPTConfig, device: torch.device) -> Iterator[tuple[str, Any, torch.dtype]]:
    """(name, function, dtype) of every backend but the historical ones, and of flash's variants."""
    names = sorted(set(ATTENTION) - set(history.NAMES), key=lambda name: (name != "naive", name))
    for name in names:
        for dtype in DTYPES if device.type == "cuda" else DTYPES[:1]:
            request = {"device": device, "dtype": dtype, "head_dim": shape.head_dim}
            try:
                _, attention = resolve_attention(name, **request)
            except AttentionError:
                continue
            yield name, attention, dtype
            if name == "flash" and device.type == "cuda" and dtype is not torch.float32:
                yield "flash, portable", resolve_attention(name, **request, tier="triton")[1], dtype
                yield "flash, precise_delta", bind(attention, precise_delta=True), dtype


def _model(
    shape: GPTConfig, attention: Any, state: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> GPT:
    with torch.device("meta"):
        model = GPT(shape, attention)
    model.load_state_dict(
        {key: value.to(device, dtype, copy=True) for key, value in state.items()}, assign=True
    )
    return model


def _autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype, enabled=dtype not in (None, torch.float32))


def _nll(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """NLL of every token in nats, (batch, length), 0 where there is no target; float64 if the model is."""
    logits = model.logits(model.hidden(inputs))
    logits = logits if logits.dtype is torch.float64 else logits.float()
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return nll.view_as(targets)


@torch.no_grad()
def _by_position(
    model: GPT, corpus: Corpus, context: int, dtype: torch.dtype, tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """(nats, targets) summed by position in windows of `context`, each float64 (context,), on the CPU.

    tokens: of the validation split, from its start; None: all.
    """
    device = next(model.parameters()).device
    batches = EvaluationBatches(corpus.val, context, max(1, min(16384, tokens or 16384) // context))
    count = len(batches)
    if tokens:
        count = min(count, -(-tokens // (batches.sequences_per_batch * context)))
    nats = torch.zeros(context, dtype=torch.float64, device=device)
    counts = torch.zeros_like(nats)
    model.eval()
    for n in range(count):
        inputs, targets = (torch.from_numpy(each).to(device) for each in batches.batch(n))
        with _autocast(device, dtype):
            nats += _nll(model, inputs, targets).double().sum(0)
        counts += (targets != IGNORED).sum(0)
    model.train()
    return nats.cpu(), counts.cpu()


def _gradients(
    model: GPT, corpus: Corpus, config: Config, batch: int, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The gradient of every parameter on the first sequences of the run's first batch, in float64 on the CPU.

    In float16 the loss is scaled by 2^16, as GradScaler begins.
    """
    sequences = config.trainer.batch_tokens // config.model.seq_len
    batches = Batches(corpus.train, config.model.seq_len, sequences, stream_seed(config.seed, "data"))
    device = next(model.parameters()).device
    inputs, targets = (torch.from_numpy(each[:batch].copy()).to(device) for each in batches.batch(0))
    scale = 2.0**16 if dtype is torch.float16 else 1.0
    with _autocast(device, dtype):
        loss = _nll(model, inputs, targets).mean()
    (loss * scale).backward()
    found = {name: parameter.grad.double().cpu() / scale for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def by_context(device: torch.device, run: Path, contexts: tuple[int, ...]) -> dict[str, Any]:
    """Evaluate a run's last checkpoint with windows of every context up to its own, and by token position.

    Returns:
        "cut": [[context, loss], ...] in nats: the same weights with less to look back at.
        "positions": [[first, last, loss], ...]: with the run's own context, by where in its window a token is.
    """
    found = checkpoint.find(run)
    config, _ = read_run(found)
    corpus = prepare_corpus(config.data, quiet=True)
    trained = config.model.seq_len
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    _, attention = resolve_attention("auto", device=device, dtype=dtype, head_dim=config.model.head_dim)
    state = checkpoint.load_weights(found, device)
    shape = _shape(corpus, config)
    model = _model(shape, attention, state, device, torch.float32)
    cut = []
    for context in contexts:
        if context <= trained:
            nats, counts = _by_position(model, corpus, context, dtype)
            cut.append([context, (nats.sum() / counts.sum()).item()])
    nats, counts = _by_position(model, corpus, trained, dtype)
    edges = [0, *(2**n for n in range(4, trained.bit_length()) if 2**n < trained), trained]
    positions = [
        [first, last, (nats[first:last].sum() / counts[first:last].sum()).item()]
        for first, last in pairwise(edges)
    ]
    return {"cut": cut, "positions": positions}
