"""Sampling from a GPT, one token at a time, with a key-value cache.

`generate` continues prompts of one length, `stream` yields their tokens as they are drawn;
`decode.generate_batch` takes prompts of unequal lengths.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .cache import KVCache
from .gpt import GPT


def generate(
    model: GPT,
    tokens: Tensor,
    n: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    end_token: int | None = None,
    never: Tensor | None = None,
) -> Tensor:
    """Continue tokens (int64, (B, T), T >= 1) by up to n more; returns (B, T + up to n), prompt included.

    temperature: divides the logits; 0 takes the most likely token. top_k: sample among that many (None: all).
    generator: the only source of randomness; probabilities are moved to its device to draw. None: one seeded with 0.
    end_token: a sequence that has drawn it is padded with it, and generation stops when all have.
    never: ids that are not drawn, int64 (any number,), such as those that a tokenizer leaves unused.

    The model sees at most seq_len tokens. Of a longer prompt it reads the last seq_len; when the window is
    full, its older half is dropped and the rest read again, since learned positions cannot slide.
    With config.document_end a token sees only its own document, as in training; sequences then come one at a time,
    since their documents end at different tokens.
    """
    drawn = stream(
        model,
        tokens,
        n,
        temperature=temperature,
        top_k=top_k,
        generator=generator,
        end_token=end_token,
        never=never,
    )
    return torch.cat([tokens, *(token[:, None] for token in drawn)], dim=1)


def stream(
    model: GPT,
    tokens: Tensor,
    n: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    end_token: int | None = None,
    never: Tensor | None = None,
) -> Iterator[Tensor]:
    """The tokens that `generate` adds, int64 (B,) at a time, as soon as they are drawn.

    Until it is used up or closed, the model stays in evaluation mode.
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be (batch, length), got shape {tuple(tokens.shape)}")
    if tokens.size(1) < 1:
        raise ValueError("the prompt is empty: give at least one token, <|endoftext|> to start from nothing")
    if model.config.document_end is not None and tokens.size(0) > 1:
        raise ValueError(f"{tokens.size(0)} sequences: with document_end, generate one at a time")
    check_sampling(n, temperature, top_k)
    return _stream(model, tokens, n, temperature, top_k, generator, end_token, never)


def check_sampling(n: int, temperature: float, top_k: int | None) -> None:
    """Raise ValueError for values with which nothing can be drawn."""
    if n < 0:
        raise ValueError(f"n={n}: it must be 0 or more tokens")
    if not temperature >= 0.0:  # NaN is neither
        raise ValueError(f"temperature={temperature}: it must be 0 (most likely token) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: it must be at least 1, or None for all tokens")


@torch.no_grad()
def _stream(model, tokens, n, temperature, top_k, generator, end_token, never) -> Iterator[Tensor]:
    generator = generator or torch.Generator().manual_seed(0)
    was_training = model.training
    model.eval()
    seq_len = model.config.seq_len
    batch, prompt_len = tokens.shape
    recent = tokens[:, -seq_len:]  # all that the model can see
    unread = recent  # what the cache does not have yet
    ended = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    cache = KVCache(min(seq_len, prompt_len + n))
    try:
        for _ in range(n):
            if cache.length + unread.size(1) > seq_len:
                unread, cache.length, cache.first = recent[:, -max(1, seq_len // 2) :], 0, 0
            hidden = _read(model, unread, cache)
            token = draw(model.logits(hidden[:, -1]), temperature, top_k, generator, never)  # (B,)
            if end_token is not None:
                token = token.masked_fill(ended, end_token)
                ended |= token == end_token
            unread = token[:, None]
            recent = torch.cat([recent, unread], dim=1)[:, -seq_len:]
            yield token
            if end_token is not None and ended.all():
                return
    finally:
        model.train(was_training)


def _read(model: GPT, tokens: Tensor, cache: KVCache) -> Tensor:
    """Add tokens to the cache; returns the hidden states of those in the last document."""
    if model.config.document_end is None:
        return model.hidden(tokens, cache=cache)
    ends = (tokens[0] == model.config.document_end).nonzero().flatten() + 1
    for document in tokens.tensor_split(ends.cpu(), dim=1):
        if document.size(1):
            hidden = model.hidden(document, cache=cache)
            if document[0, -1] == model.config.document_end:
                cache.first = cache.length
    return hidden


def draw(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator, never: Tensor | None
) -> Tensor:
    """logits (B, vocab_size) -> token ids (B,)."""
    if never is not None:
        logits = logits.index_fill(-1, never, float("-inf"))
    if temperature < 1e-6:  # nothing but the most likely would be drawn, and the division may overflow
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = torch.softmax(logits, dim=-1).to(generator.device)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1).to(logits.device)
