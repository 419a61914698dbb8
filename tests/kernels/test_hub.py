"""The package as a kernel of the Hub, loaded from a folder by the Hub's library `kernels`. About 2 s."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kernels import hub
from tests.conftest import ROOT

LOAD = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel, get_loaded_kernels

first, second = (get_local_kernel(Path(folder), backend="cpu") for folder in sys.argv[1:])
assert first is not second and len({each.metadata.id for each in get_loaded_kernels()}) == 2
q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
for kernel in (first, second):
    out = kernel.flash_attention(q, k, v)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), (q, k, v), retain_graph=True) for x in (out, want)))
print("same")
"""


def write(folder: Path, *backends: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "kernels.hub",
        str(folder),
        "--repo",
        "me/tilegpt",
        "--backends",
        *backends,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_repository_has_the_layout_of_the_hubs_library(tmp_path: Path) -> None:
    done = write(tmp_path / "to", "cuda")
    assert done.returncode == 0, done.stderr
    variant = tmp_path / "to" / "build" / "torch-cuda"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["id"].startswith("_tilegpt_cuda_")
    assert (variant / "flash" / "portable" / "measured" / "sm_90.json").is_file()
    source = tmp_path / "to" / "torch-ext" / "tilegpt"
    assert {path.relative_to(source) for path in source.rglob("*.*")} == {
        path.relative_to(variant) for path in variant.rglob("*.*") if path.name != "metadata.json"
    }
    built = tomllib.loads((tmp_path / "to" / "build.toml").read_text())
    assert (built["general"]["name"], built["general"]["hub"]["repo-id"]) == ("tilegpt", "me/tilegpt")


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    reasons = {
        tmp_path: "is not an empty folder: name a new one",
        tmp_path / "file" / "to": "cannot be written (Not a directory)",
    }
    for folder, reason in reasons.items():
        monkeypatch.setattr(sys, "argv", ["hub", str(folder)])
        with pytest.raises(SystemExit, match=re.escape(f"error: {folder} {reason}")):
            hub.main()


@pytest.mark.slow
def test_the_hubs_library_loads_two_versions_into_a_process(tmp_path: Path) -> None:
    """Where it is installed; a checkout's `kernels` would hide it, so from elsewhere."""
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the Hub's library: pip install kernels")
    for name in ("one", "two"):
        assert write(tmp_path / name, "cpu").returncode == 0
    changed = tmp_path / "two" / "build" / "torch-cpu" / "metadata.json"
    changed.write_text(changed.read_text().replace("_tilegpt_cpu_", "_tilegpt_cpu_0"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "one", tmp_path / "two"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "same\n", done.stderr
