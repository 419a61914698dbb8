"""Which runs use CUDA graphs, and the sums of their gradients. test_gpu.py tests that runs repeat."""

import pytest
import torch

from kernels import get_attention
from model.config import GPTConfig
from training.config import ConfigError, Layers
from training.cuda_graphs import add_gradients, compiled_to_graphs, resolve_graphs
from training.distributed import World
from training.layers import make_gpt
from training.parallel.config import ParallelConfig, Recompute, Shard

GPU, CPU = torch.device("cuda"), torch.device("cpu")
REPLICATED = ParallelConfig()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("gpus", [1, 2])
def test_cuda_graphs_default_to_on_for_compiled_runs_of_a_whole_model(gpus):
    ranks = World(GPU, size=gpus)
    assert resolve_graphs(None, True, ranks, REPLICATED)
    assert resolve_graphs(True, True, ranks, REPLICATED)
    assert not resolve_graphs(False, True, ranks, REPLICATED)
    assert not resolve_graphs(None, False, ranks, REPLICATED)
    assert not resolve_graphs(None, True, World(CPU, size=gpus), REPLICATED)
    assert not resolve_graphs(None, True, ranks, ParallelConfig(shard=Shard.full))


@pytest.mark.parametrize(
    ("is_compiled", "ranks", "parallel", "needed"),
    [
        (True, World(CPU), REPLICATED, "a CUDA device, not cpu"),
        (False, World(GPU), REPLICATED, "trainer.compile=true"),
        (True, World(GPU, size=2), ParallelConfig(shard=Shard.full), "parallel.shard=none, not full"),
        (True, World(GPU, size=2), ParallelConfig(context=2), "parallel.context=1, not 2"),
        (True, World(GPU), ParallelConfig(recompute=Recompute.block), "parallel.recompute=none, not block"),
    ],
)
def test_requesting_unusable_cuda_graphs_is_refused_with_what_they_need(is_compiled, ranks, parallel, needed):
    with pytest.raises(ConfigError, match=f"cuda_graphs=true needs {needed}"):
        resolve_graphs(True, is_compiled, ranks, parallel)


@pytest.mark.parametrize("later", [{}, {"rmsnorm": True, "qk_norm": True}], ids=["gpt2", "modern"])
@pytest.mark.parametrize("block", [Layers.torch, Layers.fused])
def test_what_adds_to_gradients_itself_adds_what_autograd_would(block, later):
    gradients = []
    for alone in (False, True):
        config = GPTConfig(50, 16, n_layer=2, n_head=2, n_embd=16, **later)
        generator = torch.Generator().manual_seed(0)
        attention = get_attention("naive")
        model = make_gpt(config, attention, loss=Layers.fused, block=block, generator=generator).to(DEVICE)
        compiled_to_graphs(
            model, torch.float32, alone=alone
        )  # what it returns would be compiled for a minute
        for micro in range(2):
            tokens = torch.arange(16, device=DEVICE)[None] % (7 - micro)
            add_gradients(model(tokens, tokens), model)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    cast = {name for name, parameter in model.named_parameters() if hasattr(parameter, "low")}
    blocks = {name for name in gradients[0] if name.startswith("h.") and gradients[0][name].dim() == 2}
    assert cast == (blocks if block is Layers.fused else set())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
