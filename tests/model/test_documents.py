"""Packed documents: where they begin, and that no token sees another document."""

import torch

from kernels import get_attention
from model.config import GPTConfig
from model.gpt import GPT, document_offsets

END = 9


def test_offsets_of_documents_and_rows():
    tokens = torch.tensor([[1, 2, END, 3, 4], [END, 5, END, END, 6]])
    offsets = document_offsets(tokens, END)
    assert offsets.dtype == torch.int32
    # Row 0: [1 2 9] [3 4]. Row 1: [9] [5 9] [9] [6]. Then empty documents up to one a token.
    assert offsets.tolist() == [0, 3, 5, 6, 8, 9, 10, 10, 10, 10, 10]


def test_a_document_reads_as_it_would_alone():
    config = GPTConfig(vocab_size=10, seq_len=8, n_layer=2, n_head=2, n_embd=16, document_end=END)
    model = GPT(config, get_attention("naive")).eval()
    packed = torch.tensor([[1, 2, END, 3, 4, 5]])
    other = torch.tensor([[6, 7, END, 3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(model(packed)[0, 3:], model(other)[0, 3:])
        torch.testing.assert_close(model(packed)[0, :3], model(packed[:, :3])[0])
        assert not torch.equal(model(packed)[0, :2], model(other)[0, :2])
