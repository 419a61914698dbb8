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
        never=unused_ids(tokenizer).to(device),
    )
    return tokenizer.decode([token for token in out[0].tolist() if token != end])


def unused_ids(tokenizer: tiktoken.Encoding) -> torch.Tensor:
    """The ids below n_vocab without a token, such as 16 of cl100k_base's: a model knows them, and may draw them."""
    used = {*tokenizer._mergeable_ranks.values(), *tokenizer._special_tokens.values()}
    return torch.tensor([n for n in range(tokenizer.n_vocab) if n not in used], dtype=torch.int64)
