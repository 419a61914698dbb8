"""Packed documents: where they begin, and that no token sees another document."""

import pytest
import torch

from kernels import get_attention
from model.config import GPTConfig
from model.generate import generate
from model.gpt import GPT, document_offsets

END = 9


def test_document_offsets_begin_at_each_row_and_after_each_end_token():
    tokens = torch.tensor([[1, 2, END, 3, 4], [END, 5, END, END, 6]])
    offsets = document_offsets(tokens, END)
    assert offsets.dtype == torch.int32
    # Row 0: [1 2 9] [3 4]. Row 1: [9] [5 9] [9] [6]. Then empty documents, so that there are as many as tokens.
    assert offsets.tolist() == [0, 3, 5, 6, 8, 9, 10, 10, 10, 10, 10]


def test_logits_of_a_packed_document_are_those_of_the_document_alone():
    config = GPTConfig(vocab_size=10, seq_len=8, n_layer=2, n_head=2, n_embd=16, document_end=END)
    model = GPT(config, get_attention("naive")).eval()
    packed = torch.tensor([[1, 2, END, 3, 4, 5]])
    other = torch.tensor([[6, 7, END, 3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(model(packed)[0, 3:], model(other)[0, 3:])
        torch.testing.assert_close(model(packed)[0, :3], model(packed[:, :3])[0])
        assert not torch.equal(model(packed)[0, :2], model(other)[0, :2])


def test_generated_tokens_attend_only_to_their_own_document():
    """As in training: tokens before an end token, given or sampled, are masked, also when the window slides."""
    config = GPTConfig(vocab_size=10, seq_len=24, n_layer=2, n_head=2, n_embd=16, document_end=END)
    model = GPT(config, get_attention("naive")).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0)  # untrained logits are nearly flat: spread them, so that a wrong one shows
    seen, logits = [], model.logits
    model.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1]
    prompt = torch.tensor([[6, 7, END, 3, 4, 5]])
    for given in (prompt, prompt[:, 2:3]):
        seen.clear()
        out = generate(model, given, 60, temperature=50.0, generator=torch.Generator().manual_seed(3))
        start = 0
        for end in range(given.size(1), out.size(1)):
            start = start if end - start <= 24 else end - 12
            as_trained = logits(model.hidden(out[:, start:end]))[:, -1]
            torch.testing.assert_close(seen[end - given.size(1)], as_trained, rtol=1e-4, atol=1e-4)
        assert END in out[0, given.size(1) : 20]
        assert END in out[0, -12:]
    with pytest.raises(ValueError, match="one at a time"):
        generate(model, prompt.expand(2, -1), 1, generator=torch.Generator())
