"""generate: the cache changes nothing, the window slides, sampling obeys its generator. About 2 s."""

import pytest
import torch

from model.cache import KVCache
from model.config import GPTConfig
from model.generate import generate, stream
from model.gpt import GPT


def plain_attention(q, k, v, *, causal, scale):
    future = torch.ones(q.size(2), k.size(2), dtype=torch.bool).triu(1 + k.size(2) - q.size(2))
    return (q @ k.transpose(-2, -1) * scale).masked_fill(future, float("-inf")).softmax(-1) @ v


@pytest.fixture(scope="module")
def model() -> GPT:
    model = GPT(GPTConfig(vocab_size=50, seq_len=16, n_layer=2, n_head=2, n_embd=32), plain_attention)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0)  # untrained logits are nearly flat: spread them, so that a wrong one shows
    return model


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def prompt(batch, length):
    return torch.randint(50, (batch, length), generator=seeded())


def uncached(model, tokens, n, temperature, top_k, generator):
    """The same text from full forward passes over the window that generate documents."""
    start = max(0, tokens.size(1) - 16)
    for _ in range(n):
        if tokens.size(1) - start > 16:
            start = tokens.size(1) - 8
        logits = model(tokens[:, start:])[:, -1]
        if temperature == 0.0:
            token = logits.argmax(-1, keepdim=True)
        else:
            logits = logits / temperature
            if top_k is not None:
                logits[logits < logits.topk(top_k).values[:, -1:]] = float("-inf")
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, token], dim=1)
    return tokens


def test_logits_are_the_same_with_and_without_the_kv_cache(model):
    tokens = prompt(3, 16)
    cache = KVCache(max_len=16)
    pieces = [model.hidden(piece, cache=cache) for piece in tokens.split([5, 1, 1, 6, 3], dim=1)]
    torch.testing.assert_close(model.logits(torch.cat(pieces, dim=1)), model(tokens), rtol=1e-4, atol=1e-4)
    assert cache.length == 16


def test_an_attention_with_a_packed_form_generates_the_same_text(model):
    def attention(q, k, v, **options):
        return plain_attention(q, k, v, **options)

    def packed(qkv, **options):
        return plain_attention(*qkv.permute(2, 0, 3, 1, 4), **options)

    other = GPT(model.config, attention, packed=packed)
    other.load_state_dict(model.state_dict())
    texts = (generate(each, prompt(2, 5), 8, temperature=0.0, generator=seeded()) for each in (other, model))
    assert torch.equal(*texts)


@pytest.mark.parametrize("length", [1, 7, 16, 40])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, None), (1.0, None), (0.7, 5), (1.0, 99)])
def test_text_beyond_the_window_is_the_same_with_and_without_the_cache(model, length, temperature, top_k):
    tokens = prompt(2, length)
    text = generate(model, tokens, 30, temperature=temperature, top_k=top_k, generator=seeded())
    expected = uncached(model, tokens, 30, temperature, min(top_k, 50) if top_k else None, seeded())
    assert text.shape == (2, length + 30)
    assert torch.equal(text, expected)


def test_a_stream_of_any_length_takes_no_memory_for_what_is_not_drawn(model):
    (first,) = generate(model, prompt(1, 5), 1, temperature=0.0)[:, 5:]
    assert torch.equal(next(stream(model, prompt(1, 5), 10**14, temperature=0.0)), first)


def test_same_generator_same_text(model):
    tokens = prompt(2, 4)
    torch.manual_seed(0)
    first = generate(model, tokens, 20, generator=seeded(1))
    torch.manual_seed(9)
    assert torch.equal(generate(model, tokens, 20, generator=seeded(1)), first)
    assert not torch.equal(generate(model, tokens, 20, generator=seeded(2)), first)
    assert torch.equal(generate(model, tokens, 20), generate(model, tokens, 20, generator=seeded(0)))


def test_top_1_is_the_most_likely_token(model):
    tokens = prompt(2, 4)
    greedy = generate(model, tokens, 10, temperature=0.0, generator=seeded())
    assert torch.equal(generate(model, tokens, 10, temperature=1.0, top_k=1, generator=seeded(3)), greedy)
    assert torch.equal(generate(model, tokens, 10, temperature=1e-40, generator=seeded(3)), greedy)


def test_padding_is_never_sampled(model):
    text = generate(model, prompt(64, 1), 40, temperature=100.0, generator=seeded())
    assert text.max() == 49


def test_stops_at_the_end_token(model):
    tokens = prompt(2, 4)
    free = generate(model, tokens, 30, generator=seeded())[:, 4:]
    end = free[0, 3].item()
    text = generate(model, tokens, 30, generator=seeded(), end_token=end)[:, 4:]
    for row, free_row in zip(text, free, strict=True):
        stop = (free_row == end).nonzero()
        at = stop[0, 0].item() if len(stop) else 30
        assert torch.equal(row[: at + 1], free_row[: at + 1][: row.numel()])
        assert (row[at:] == end).all()
    alone = generate(model, tokens[:1], 30, temperature=0.0, generator=seeded())
    first = alone[0, 4].item()
    assert generate(model, tokens[:1], 30, temperature=0.0, generator=seeded(), end_token=first).shape == (
        1,
        5,
    )


def test_generate_applies_no_dropout_and_keeps_the_training_mode():
    model = GPT(
        GPTConfig(vocab_size=50, seq_len=16, n_layer=1, n_head=2, n_embd=32, dropout=0.5), plain_attention
    )
    for training in (True, False):
        model.train(training)
        generate(model, prompt(1, 4), 4, generator=seeded())  # plain_attention takes no dropout_p
        assert model.training is training


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (prompt(1, 0), {}, "the prompt is empty"),
        (prompt(1, 3)[0], {}, r"\(batch, length\), got shape \(3,\)"),
        (prompt(1, 1), {"temperature": -1.0}, "temperature=-1.0"),
        (prompt(1, 1), {"temperature": float("nan")}, "temperature=nan"),
        (prompt(1, 1), {"n": -1}, "n=-1"),
        (prompt(1, 1), {"top_k": 0}, "top_k=0"),
    ],
)
def test_invalid_arguments_are_refused(model, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, tokens, **{"n": 1, "generator": seeded(), **options})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_named_as_never_are_not_drawn(model, temperature):
    """As a tokenizer's unused ones: they take part in the softmax of no step."""
    free = generate(model, prompt(2, 3), 30, temperature=temperature, generator=seeded())
    never = free[:, 3:].unique()[::2]
    drawn = generate(model, prompt(2, 3), 30, temperature=temperature, generator=seeded(), never=never)[:, 3:]
    assert not torch.isin(drawn, never).any()
