"""Which runs use CUDA graphs. test_gpu.py tests that they compute the same with and without."""

import pytest
import torch

from training.config import ConfigError
from training.cuda_graphs import resolve_graphs
from training.distributed import World

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_cuda_graphs_default_to_on_only_for_compiled_runs_on_one_gpu():
    assert resolve_graphs(None, True, World(GPU))
    assert not resolve_graphs(None, False, World(GPU))
    assert not resolve_graphs(None, True, World(CPU))
    assert not resolve_graphs(None, True, World(GPU, size=2))
    assert not resolve_graphs(False, True, World(GPU))


@pytest.mark.parametrize(
    ("is_compiled", "ranks", "needed"),
    [
        (True, World(CPU), "a CUDA device, not cpu"),
        (False, World(GPU), "trainer.compile=true"),
        (True, World(GPU, size=2), "one GPU, not 2 ranks"),
    ],
)
def test_requesting_unusable_cuda_graphs_is_refused_with_what_they_need(is_compiled, ranks, needed):
    with pytest.raises(ConfigError, match=f"cuda_graphs=true needs {needed}"):
        resolve_graphs(True, is_compiled, ranks)
