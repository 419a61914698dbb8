"""Text from a model, whatever ids it would like to draw."""

import tiktoken
import torch

from data.tokenizer import END_OF_TEXT
from model.config import GPTConfig
from model.gpt import GPT
from training.sampling import sample_text


def test_ids_that_a_tokenizer_leaves_unused_are_never_drawn():
    """cl100k_base has 16 of them between its last token and its special ones; so has this one, of bytes."""
    tokenizer = tiktoken.Encoding(
        "gaps",
        pat_str=r"[\s\S]",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={END_OF_TEXT: 400},
    )
    config = GPTConfig(vocab_size=401, seq_len=16, n_layer=1, n_head=2, n_embd=32)
    model = GPT(config, lambda q, k, v, **_: v[:, :, -q.size(2) :])
    text = sample_text(model, tokenizer, "a", 100, torch.Generator().manual_seed(0), top_k=None)
    assert text.startswith("a")
    assert len(text) > 1
