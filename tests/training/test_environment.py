"""What a run records about the machine it ran on."""

import torch
import triton

import training.environment
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


def test_the_recorded_driver_is_the_kernel_modules_without_asking_nvidia_smi(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    monkeypatch.setattr(training.environment, "DRIVER", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment(torch.device("cuda"))["driver"] is None
    for module in (
        "x86_64 Kernel Module  580.159.04  Tue Oct 7",
        "Open Kernel Module for x86_64  575.57  Release Build",
    ):
        (tmp_path / "version").write_text(
            f"NVRM version: NVIDIA UNIX {module}\nGCC version:  gcc version 13.3.0\n"
        )
        assert environment(torch.device("cuda"))["driver"] == module.split("  ")[1]
