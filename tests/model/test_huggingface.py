"""Parity with transformers' GPT-2, both ways, on a small random model. About 5 s."""

import sys

import pytest
import torch
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import _transformers_imports, from_huggingface, to_huggingface

pytest.importorskip("transformers")


def plain_attention(q, k, v, *, causal, scale):
    future = torch.ones(q.size(2), k.size(2), dtype=torch.bool).triu(1 + k.size(2) - q.size(2))
    return (q @ k.transpose(-2, -1) * scale).masked_fill(future, float("-inf")).softmax(-1) @ v


def their_model(**changes):
    with _transformers_imports():
        from transformers import GPT2Config, GPT2LMHeadModel

        shape = {"vocab_size": 101, "n_positions": 24, "n_layer": 3, "n_head": 4, "n_embd": 32}
        torch.manual_seed(0)
        theirs = GPT2LMHeadModel(GPT2Config(**shape | changes)).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            # biases and gains too: at 0 and 1 a mix-up would not show
            weight.add_(0.1 * torch.randn_like(weight))
    return theirs


def assert_same_function(ours, theirs):
    """Logits, loss and every gradient."""
    tokens = torch.randint(101, (2, 24), generator=torch.Generator().manual_seed(0))
    with _transformers_imports():
        logits = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), logits, rtol=1e-4, atol=2e-5)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    targets = F.pad(tokens[:, 1:], (0, 1), value=-1)
    our_loss = ours(tokens, targets)
    torch.testing.assert_close(our_loss, loss, rtol=1e-5, atol=0)
    for model in (ours, theirs):
        model.zero_grad()
    our_loss.backward()
    loss.backward()
    for name, weight in ours.named_parameters():
        grad = theirs.get_parameter(f"transformer.{name}").grad
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            grad = grad.t()
        torch.testing.assert_close(
            weight.grad[: len(grad)], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("inverse", [False, True])
def test_from_huggingface_computes_the_same(inverse):
    theirs = their_model(scale_attn_by_inverse_layer_idx=inverse)
    ours = from_huggingface(theirs, plain_attention)
    assert ours.config.scale_attn_by_inverse_layer_idx is inverse
    assert_same_function(ours, theirs)


@pytest.mark.parametrize("inverse", [False, True])
def test_to_huggingface_computes_the_same(inverse):
    config = GPTConfig(
        vocab_size=101, seq_len=24, n_layer=3, n_head=4, n_embd=32, scale_attn_by_inverse_layer_idx=inverse
    )
    ours = GPT(config, plain_attention)
    theirs = to_huggingface(ours).eval()
    assert theirs.lm_head.weight is theirs.transformer.wte.weight
    assert_same_function(ours, theirs)
    with torch.no_grad():
        theirs.transformer.wte.weight.zero_()
    assert ours.wte.weight.any()  # a copy, not a view


def test_a_saved_directory_comes_back_bit_for_bit(tmp_path):
    ours = GPT(GPTConfig(vocab_size=101, seq_len=24, n_layer=2, n_head=2, n_embd=32), plain_attention)
    to_huggingface(ours).save_pretrained(tmp_path)
    again = from_huggingface(tmp_path, plain_attention, dropout=0.1)
    assert again.config.dropout == 0.1
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, again.get_parameter(name)), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function='relu'"),
        ({"n_inner": 64}, "n_inner=64"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False"),
    ],
)
def test_another_architecture_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(their_model(**changes), plain_attention)


def test_a_model_without_a_tied_language_model_head_is_refused():
    with pytest.raises(ValueError, match="source must be a directory or a GPT2LMHeadModel, got a GPT2Model"):
        from_huggingface(their_model().transformer, plain_attention)
    theirs = their_model()
    theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight + 1)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        from_huggingface(theirs, plain_attention)


def test_to_huggingface_accepts_compiled_and_distributed_models():
    ours = GPT(GPTConfig(101, 24, n_layer=1, n_head=2, n_embd=32), plain_attention)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        by_ranks = DistributedDataParallel(ours)
        both = DistributedDataParallel(torch.compile(ours)), torch.compile(by_ranks)
        for wrapped in (torch.compile(ours), by_ranks, *both):
            there = to_huggingface(wrapped).state_dict()
            assert torch.equal(there["transformer.wpe.weight"], ours.wpe.weight)
    finally:
        distributed.destroy_process_group()


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a directory with a config\.json \(`hf download` gets one\)"):
        from_huggingface(tmp_path, plain_attention)


def test_missing_or_misshapen_weights_are_refused_by_name(tmp_path):
    """transformers would fill them with random numbers."""
    to_huggingface(GPT(GPTConfig(101, 24, n_layer=1, n_head=2, n_embd=32), plain_attention)).save_pretrained(
        tmp_path
    )
    config = tmp_path / "config.json"
    whole = config.read_text()
    config.write_text(whole.replace('"n_positions": 24', '"n_positions": 48'))
    with pytest.raises(ValueError, match=r"transformer\.wpe\.weight is \(24, 32\), not \(48, 32\)"):
        from_huggingface(tmp_path, plain_attention)
    config.write_text(whole.replace('"n_layer": 1', '"n_layer": 2'))
    with pytest.raises(
        ValueError, match=r"lacks 12 of the model's weights: transformer\.h\.1\.attn\..*, \.\.\.$"
    ):
        from_huggingface(tmp_path, plain_attention)


@pytest.mark.parametrize("training", [True, False])
def test_to_huggingface_keeps_the_training_mode(training):
    ours = GPT(GPTConfig(101, 24, n_layer=1, n_head=2, n_embd=32, dropout=0.5), plain_attention)
    assert to_huggingface(ours.train(training)).training is training


def test_our_kernels_package_is_hidden_only_while_importing_transformers():
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "kernels"}
    with _transformers_imports():
        assert sys.modules["kernels"] is None
    after = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "kernels"}
    assert after == before
