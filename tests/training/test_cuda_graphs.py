"""Which runs use CUDA graphs. test_gpu.py tests that runs repeat with and without."""

import pytest
import torch

from training.config import ConfigError
from training.cuda_graphs import resolve_graphs
from training.distributed import World
from training.parallel.config import ParallelConfig, Recompute, Shard

GPU, CPU = torch.device("cuda"), torch.device("cpu")
REPLICATED = ParallelConfig()


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
