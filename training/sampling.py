"""Text from a model: encode, generate, decode."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

import tiktoken
import torch

from model.decode import alone, generate_batch
from model.generate import stream
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
    return "".join(stream_text(model, tokenizer, prompt, tokens, generator, temperature, top_k))


def stream_text(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    prompt: str,
    tokens: int,
    generator: torch.Generator,
    temperature: float = 0.8,
    top_k: int | None = 50,
) -> Iterator[str]:
    """`sample_text` in pieces: the prompt, then what each token adds, a character once all of its bytes are there."""
    end, device = tokenizer.eot_token, next(model.parameters()).device
    ids = _encode(tokenizer, prompt)
    drawn = stream(
        model,
        torch.tensor([ids], device=device),
        tokens,
        temperature=temperature,
        top_k=top_k,
        generator=generator,
        end_token=end,
        never=unused_ids(tokenizer).to(device),
    )
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield decoder.decode(tokenizer.decode_bytes([each for each in ids if each != end]))
    for token in drawn:
        if token.item() != end:
            yield decoder.decode(tokenizer.decode_single_token_bytes(token.item()))
    yield decoder.decode(b"", final=True)


def sample_texts(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    prompts: Sequence[str],
    tokens: int,
    generator: torch.Generator,
    temperature: float = 0.8,
    top_k: int | None = 50,
) -> list[str]:
    """As `sample_text`, for several prompts, in one batch if the model can."""
    if alone(model):
        options = (tokens, generator, temperature, top_k)
        return [sample_text(model, tokenizer, prompt, *options) for prompt in prompts]
    end, device = tokenizer.eot_token, next(model.parameters()).device
    rows = generate_batch(
        model,
        [torch.tensor(_encode(tokenizer, prompt), device=device) for prompt in prompts],
        tokens,
        temperature=temperature,
        top_k=top_k,
        generator=generator,
        end_token=end,
        never=unused_ids(tokenizer).to(device),
    )
    return [tokenizer.decode([token for token in row.tolist() if token != end]) for row in rows]


def _encode(tokenizer: tiktoken.Encoding, prompt: str) -> list[int]:
    return tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]


def unused_ids(tokenizer: tiktoken.Encoding) -> torch.Tensor:
    """The ids below n_vocab without a token, such as 16 of cl100k_base's: a model knows them, and may draw them."""
    used = {*tokenizer._mergeable_ranks.values(), *tokenizer._special_tokens.values()}
    return torch.tensor([n for n in range(tokenizer.n_vocab) if n not in used], dtype=torch.int64)
