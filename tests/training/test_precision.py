"""torch.compile's cache on disk is kept apart by precision, as PyTorch does only from 2.13 on; what it fuses."""

import os

import pytest
import torch

from tests.conftest import ROOT
from training import precision


@pytest.mark.parametrize("version", ["2.12.1", "2.13.0", "2.15.0"])
def test_an_older_torchs_compile_cache_tag_is_the_users_tag_followed_by_the_dtype(version, monkeypatch):
    """Of 2.13 and later it is the user's: with another, the tiles that were timed before would not be found."""
    tags = []

    def backend(graph, inputs):
        tags.append(torch.compiler.config.cache_key_tag)
        return graph.forward

    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(precision, "_USERS_TAG", "mine ")
    with torch.compiler.config.patch(cache_key_tag="mine "):
        for dtype in (torch.bfloat16, torch.float16):
            torch.compiler.reset()
            precision.compiled(torch.nn.Linear(1, 1), dtype, backend)(torch.ones(1))
    assert tags == (["mine torch.bfloat16", "mine torch.float16"] if version < "2.13" else ["mine ", "mine "])


def test_triton_fuses_what_torch_generates_as_our_kernels_unless_the_user_says_otherwise(monkeypatch):
    name = "TRITON_DEFAULT_FP_FUSION"
    monkeypatch.setenv(name, "0")
    precision.compiled(torch.nn.Linear(1, 1), torch.bfloat16)
    assert os.environ[name] == "0"
    monkeypatch.delenv(name)
    precision.compiled(torch.nn.Linear(1, 1), torch.bfloat16)
    assert os.environ[name] == "1"


def test_whoever_compiles_asks_for_that_fusion():
    packages = "kernels", "model", "training", "data", "reproduce", "benchmarks"
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    calls = [str(file.relative_to(ROOT)) for file in files if "torch.compile(" in file.read_text()]
    assert calls == ["kernels/fusion.py"]
