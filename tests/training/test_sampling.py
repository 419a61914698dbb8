"""Text from a model, whatever ids it would like to draw."""

import tiktoken
import torch

from data.tokenizer import END_OF_TEXT, load_tokenizer
from model.config import GPTConfig
from model.generate import generate
from model.gpt import GPT
from training.sampling import sample_text, sample_texts, stream_text


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


def model_of_bytes(tokenizer: tiktoken.Encoding) -> GPT:
    """Whose text is of all bytes."""
    config = GPTConfig(vocab_size=tokenizer.n_vocab, seq_len=16, n_layer=1, n_head=2, n_embd=32)
    return GPT(config, lambda q, k, v, **_: v[:, :, -q.size(2) :])


def test_a_stream_is_the_text_in_pieces_of_whole_characters():
    tokenizer = load_tokenizer("bytes")
    model, prompt = model_of_bytes(tokenizer), "naïve 東"
    pieces, text = (
        read(model, tokenizer, prompt, 200, torch.Generator().manual_seed(0), top_k=None)
        for read in (lambda *args, **options: list(stream_text(*args, **options)), sample_text)
    )
    assert pieces[0] == prompt
    assert len(pieces) > 100
    assert "".join(pieces) == text
    # As all bytes decoded at once, although most characters came in several pieces.
    assert text == tokenizer.decode(tokenizer.encode_ordinary(prompt) + drawn_after(model, tokenizer, prompt))


def drawn_after(model: GPT, tokenizer: tiktoken.Encoding, prompt: str) -> list[int]:
    ids = torch.tensor([tokenizer.encode_ordinary(prompt)])
    end = tokenizer.eot_token
    tokens = generate(
        model, ids, 200, temperature=0.8, generator=torch.Generator().manual_seed(0), end_token=end
    )
    return [token for token in tokens[0, ids.size(1) :].tolist() if token != end]


def test_several_prompts_are_each_what_they_are_alone():
    tokenizer = load_tokenizer("bytes")
    model, prompts = model_of_bytes(tokenizer), ["a", "", "a longer one"]
    texts = sample_texts(model, tokenizer, prompts, 30, torch.Generator(), temperature=0)
    assert texts == [
        sample_text(model, tokenizer, prompt, 30, torch.Generator(), temperature=0) for prompt in prompts
    ]
