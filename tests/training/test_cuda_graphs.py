"""Which runs use CUDA graphs. test_gpu.py tests that they compute the same with and without."""

import pytest
import torch

from training.config import ConfigError
from training.cuda_graphs import resolve_graphs
from training.distributed import World
from training.parallel.config import ParallelConfig, Recompute, Shard

GPU, CPU = torch.device("cuda"), torch.device("cpu")
REPLICATED = ParallelConfig()


def test_cuda_graphs_default_to_on_only_for_compiled_runs_on_one_gpu():
    assert resolve_graphs(None, True, World(GPU), REPLICATED)
    assert not resolve_graphs(None, False, World(GPU), REPLICATED)
    assert not resolve_graphs(None, True, World(CPU), REPLICATED)
    assert not resolve_graphs(None, True, World(GPU, size=2), REPLICATED)
    assert not resolve_graphs(False, True, World(GPU), REPLICATED)
    assert resolve_graphs(True, True, World(GPU, size=2), REPLICATED)


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
