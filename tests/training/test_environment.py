"""What a run records about the machine it ran on."""

import torch
import triton

from training.environment import environment


def test_the_recorded_triton_version_is_that_of_the_imported_module(monkeypatch) -> None:
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    assert environment(torch.device("cpu"))["triton"] == "9.9.9"
