"""What a type checker sees of model, kernels and data through their py.typed. Never run: mypy reads it in .ci/run.

A call with a wrong type must be an error, which the unused `type: ignore` would otherwise be.
"""

from pathlib import Path
from typing import assert_type

import numpy as np
import torch
from torch import Tensor

from data.corpora import make_corpus
from data.loader import Batches, Corpus
from data.prepare import prepare
from kernels import AttentionFn, flash_attention, get_attention, packed_form, resolve_attention
from kernels.layers.dropout import dropout
from kernels.layers.embedding import embedding
from kernels.layers.linear_add_norm import dropout_add_norm, linear_add_norm
from kernels.layers.linear_cross_entropy import linear_cross_entropy
from kernels.layers.linear_gelu import linear_gelu
from kernels.naive import naive_attention
from model import GPT, FusedGPT, FusedLayers, GPTConfig, from_huggingface
from model.generate import generate


def attention(x: Tensor) -> None:
    resolved = resolve_attention("auto", device=x.device, dtype=x.dtype, head_dim=64)
    assert_type(resolved, tuple[str, AttentionFn])
    resolve_attention("auto", device=x.device, dtype="bf16", head_dim=64)  # type: ignore[arg-type]
    assert_type(packed_form(get_attention("flash")), AttentionFn | None)
    assert_type(naive_attention(x, x, x, window=(3, 0), softcap=None), Tensor)
    assert_type(flash_attention(x, x, x, causal=False, tier="triton"), Tensor)
    assert_type(flash_attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    naive_attention(x, x, x, window=3)  # type: ignore[call-overload]
    flash_attention(x, x, x, is_causal=True)  # type: ignore[call-overload]


def layers(x: Tensor) -> None:
    assert_type(linear_gelu(x, x, x), Tensor)
    assert_type(linear_add_norm(x, x, x, x, x, x), tuple[Tensor, Tensor])
    assert_type(dropout_add_norm(x, x, None, x, x), tuple[Tensor, Tensor])
    assert_type(linear_cross_entropy(x, x, x, 50257), Tensor)
    assert_type(embedding(x, x), Tensor)
    assert_type(dropout(x, 0.1, 1), Tensor)
    dropout(x, "0.1", 1)  # type: ignore[arg-type]


def gpt(tokens: Tensor) -> None:
    config = GPTConfig(n_layer=2)
    model = GPT(config, get_attention("sdpa"), packed=None, generator=torch.Generator())
    GPTConfig(n_layer="two")  # type: ignore[arg-type]
    assert_type(model.logits(model.hidden(tokens)), Tensor)
    assert_type(model.num_parameters(), int)
    assert_type(generate(model, tokens, 9, top_k=5), Tensor)
    assert_type(from_huggingface("folder", get_attention("sdpa")), GPT)
    fused = FusedLayers(linear_gelu, dropout_add_norm, embedding, dropout)
    FusedGPT(config, get_attention("flash"), fused)
    FusedLayers(linear_gelu, dropout_add_norm, embedding)  # type: ignore[call-arg]


def corpus() -> None:
    tokens = prepare(make_corpus("python_source"), "bytes", Path("cache"))
    assert_type(tokens, Corpus)
    assert_type(tokens.n_vocab, int)
    inputs, _ = Batches(tokens.train, seq_len=64, sequences_per_batch=8, seed=0).batch(0)
    assert_type(inputs, np.ndarray)
    make_corpus(3)  # type: ignore[arg-type]
