"""What a run records about the machine it ran on."""

import torch
import triton

from training.environment import environment


def test_the_recorded_triton_version_is_that_of_the_imported_module(monkeypatch) -> None:
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    assert environment(torch.device("cpu"))["triton"] == "9.9.9"


def test_a_fact_that_cannot_be_found_out_is_recorded_as_none(monkeypatch) -> None:
    """As where another cuDNN than torch's is loaded, or there is no driver to ask: a record never ends a run."""

    def mismatched() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", mismatched)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: mismatched())
    recorded = environment(torch.device("cuda"))
    assert recorded["cudnn"] is recorded["device_name"] is None
    assert recorded["torch"] == torch.__version__


def test_the_recorded_nccl_is_the_loaded_one_not_what_an_image_says(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_VERSION", "2.28.3-1")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    assert environment(torch.device("cuda"))["nccl"] == "2.29.7"
