"""A batch of unequal prompts is continued as each of them alone. About 5 s."""

from functools import partial

import pytest
import torch

from kernels.flash.decode import decode_attention
from kernels.naive import naive_attention
from model.config import GPTConfig
from model.decode import attend_masked, generate_batch
from model.generate import generate, stream
from model.gpt import GPT
from model.modern import build_gpt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def model() -> GPT:
    config = GPTConfig(
        vocab_size=50, seq_len=16, n_layer=2, n_head=2, n_embd=32, scale_attn_by_inverse_layer_idx=True
    )
    model = GPT(config, naive_attention)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0)  # untrained logits are nearly flat: spread them, so that a wrong one shows
    return model.to(DEVICE)


def prompts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(50, (length,), generator=generator).to(DEVICE) for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("attend", [attend_masked, partial(decode_attention, parts=2)], ids=["torch", "ours"])
def test_each_row_is_what_it_is_alone_past_the_window_too(model, attend):
    """Lengths that fill the window at different steps, and a prompt that is longer than it."""
    rows = prompts(3, 1, 16, 9, 20)
    got = generate_batch(model, rows, 30, temperature=0.0, attend=attend)
    for row, text in zip(rows, got, strict=True):
        assert torch.equal(text, generate(model, row[None], 30, temperature=0.0)[0])
    assert len(torch.cat(got).unique()) > 10


def test_rows_end_at_their_end_token_and_the_others_go_on(model):
    rows = prompts(3, 5, 1)
    whole = generate_batch(model, rows, 10, temperature=0.0)
    end = int(whole[0][5])
    got = generate_batch(model, rows, 10, temperature=0.0, end_token=end)
    for row, text, mine in zip(rows, whole, got, strict=True):
        drawn = text[len(row) :].tolist()
        kept = drawn.index(end) + 1 if end in drawn else 10
        assert torch.equal(mine, text[: len(row) + kept])
    assert len(got[0]) < 13


def test_sampling_obeys_its_generator_and_never_draws_what_it_must_not(model):
    options = {"temperature": 1.5, "top_k": 20, "never": torch.arange(0, 50, 2, device=DEVICE)}
    first, again, other = (
        generate_batch(model, prompts(3, 7), 12, generator=torch.Generator().manual_seed(seed), **options)
        for seed in (1, 1, 2)
    )
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    assert all((text[-12:] % 2).all() for text in first)


def test_a_stream_hands_out_what_generate_returns_as_it_is_drawn(model):
    (row,) = prompts(4)
    wanted = generate(model, row[None], 6, temperature=0.0)[0, 4:]
    drawn = stream(model, row[None], 6, temperature=0.0)
    assert next(drawn).item() == wanted[0]
    assert not model.training
    assert [token.item() for token in drawn] == wanted[1:].tolist()


def test_prompts_of_one_length_may_be_rows_of_a_tensor(model):
    rows = torch.stack(prompts(4, 4))
    assert torch.equal(
        torch.stack(generate_batch(model, rows, 3, temperature=0.0)),
        generate(model, rows, 3, temperature=0.0),
    )


def test_bad_prompts_are_refused(model):
    for bad in ([], [torch.zeros(1, 3, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]):
        with pytest.raises(ValueError, match="prompts must be 1-d tensors of at least one token"):
            generate_batch(model, bad, 1)
    with pytest.raises(ValueError, match="temperature=-1"):
        generate_batch(model, prompts(1), 1, temperature=-1.0)
    modern = build_gpt(GPTConfig(vocab_size=50, n_layer=1, n_head=2, n_embd=32, rope=True), naive_attention)
    with pytest.raises(ValueError, match="with rope, generate one sequence at a time"):
        generate_batch(modern, prompts(1), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("attend", [attend_masked, decode_attention], ids=["torch", "ours"])
def test_a_cuda_graph_of_a_step_gives_the_same_text(model, attend):
    rows = prompts(3, 1, 16, 9, 20)
    wanted = generate_batch(model, rows, 30, temperature=0.0, attend=attend)
    got = generate_batch(model, rows, 30, temperature=0.0, attend=attend, cuda_graph=True)
    assert all(map(torch.equal, got, wanted))
