"""FusedGPT with functions of torch in our kernels' place: it computes what GPT does, block by block."""

import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from model.config import GPTConfig
from model.fused import FusedGPT, FusedLayers
from model.gpt import GPT
from tests.model.test_gpt import TINY, plain_attention, some_tokens


def linear_gelu(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def dropout_add_norm(x, update, bias, gain, shift, dropout_p, dropout_seed, eps, rms):
    assert dropout_p == 0.0
    x = x + (update + bias)
    if rms:
        return x, F.rms_norm(x, gain.shape, gain, eps)
    return x, F.layer_norm(x, gain.shape, gain, shift, eps)


def dropout(x, dropout_p, dropout_seed):
    return x


def mlp(x, weight, bias, projection):
    return F.linear(linear_gelu(x, weight, bias), projection)


LAYERS = FusedLayers(linear_gelu, dropout_add_norm, F.embedding, dropout)


@pytest.mark.parametrize("layers", [LAYERS, LAYERS._replace(linear_gelu=None, mlp=mlp)], ids=["", "mlp"])
def test_it_computes_what_gpt_does_from_the_same_parameters(layers):
    tokens = some_tokens(2, 16)
    losses = []
    for model in (
        FusedGPT(GPTConfig(**TINY), plain_attention, layers),
        GPT(GPTConfig(**TINY), plain_attention),
    ):
        loss = model(tokens, tokens)
        loss.backward()
        losses.append((loss, {name: weight.grad for name, weight in model.named_parameters()}))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)


def test_dropout_reaches_the_functions_in_training_only_each_call_with_a_seed_of_its_own():
    rates, seeds, looked_up = [], [], []

    def note(dropout_p, dropout_seed):
        rates.append(dropout_p)
        seeds.append(dropout_seed)

    def noted_add_norm(x, update, bias, gain, shift, dropout_p, dropout_seed, eps, rms):
        note(dropout_p, dropout_seed)
        return dropout_add_norm(x, update, bias, gain, shift, 0.0, None, eps, rms)

    def noted_dropout(x, dropout_p, dropout_seed):
        note(dropout_p, dropout_seed)
        return x

    def embedding(tokens, weight):
        looked_up.append(tokens)
        return F.embedding(tokens, weight)

    def attention(*qkv, dropout_p=0.0, dropout_seed=None, **options):
        note(dropout_p, dropout_seed)
        return plain_attention(*qkv, **options)

    tokens = some_tokens(2, 16)
    layers = FusedLayers(linear_gelu, noted_add_norm, embedding, noted_dropout)
    model = FusedGPT(GPTConfig(**TINY | {"dropout": 0.1}), attention, layers)
    model.eval()(tokens)
    assert (set(rates), set(seeds)) == ({0.0}, {None})
    assert looked_up == [tokens]
    rates.clear(), seeds.clear()
    state = torch.get_rng_state()
    for step in range(3):
        model.train()(tokens, dropout_seed=torch.tensor(step))
    assert rates == [0.1] * 3 * (1 + 3 * TINY["n_layer"])
    assert len(set(map(int, seeds))) == len(seeds)
    assert torch.equal(torch.get_rng_state(), state)


def sharded_losses(rank: int, rendezvous: str, results) -> None:
    """Train on two ranks, every block sharded by itself; rank 0 puts the losses into `results`."""
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = FusedGPT(GPTConfig(**TINY), plain_attention, LAYERS)
    for block in model.h:
        fully_shard(block)
    fully_shard(model)
    losses = steps(model)
    if rank == 0:
        results.put(losses)
    distributed.destroy_process_group()


def steps(model) -> list[float]:
    optimizer, tokens, losses = torch.optim.SGD(model.parameters(), lr=0.1), some_tokens(2, 16), []
    for _ in range(3):
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_its_blocks_can_be_sharded_one_by_one(tmp_path):
    """FSDP frees a block's parameters when the block returns, so no other block may read them."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (str(tmp_path / "rendezvous"), results)
    multiprocessing.spawn(sharded_losses, arguments, nprocs=2)
    expected = steps(FusedGPT(GPTConfig(**TINY), plain_attention, LAYERS))
    torch.testing.assert_close(results.get(), expected, rtol=1e-5, atol=0)
