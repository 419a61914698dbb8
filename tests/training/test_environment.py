"""What a run says of the machine it ran on."""

import torch
import triton

from training.environment import environment


def test_triton_is_the_one_that_runs_and_not_the_one_that_is_installed(monkeypatch) -> None:
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    assert environment(torch.device("cpu"))["triton"] == "9.9.9"
