"""Text from a model: encode, generate, decode."""

from __future__ import annotations

import tiktoken
import torch

from model.generate import generate
from model.gpt import GPT


def sample_text(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    prompt: str,
    tokens: int,
    generator: torch.Generator,
    temperature: float = 0.8,
    top_k: int | None = 50,
) -> str:
    """`prompt` and up to `tokens` tokens more. An empty prompt is an end-of-text token: a document begins."""
    end = tokenizer.eot_token
    ids = tokenizer.encode_ordinary(prompt) or [end]
    device = next(model.parameters()).device
    out = generate(
        model,
        torch.tensor([ids], device=device),
        tokens,
        temperature=temperature,
        top_k=top_k,
        generator=generator,
        end_token=end,
    )
    return tokenizer.decode([token for token in out[0].tolist() if token != end])
