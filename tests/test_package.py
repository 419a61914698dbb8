"""What pip installs, and examples/ that use it. About 15 s."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import model

ROOT = Path(__file__).parents[1]
LEAVES = ("model", "kernels", "data")


def test_the_wheel_contains_every_package_of_model_kernels_and_data():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [path.parent for leaf in LEAVES for path in (ROOT / leaf).rglob("__init__.py")]
    names = {".".join(("tilegpt", *folder.relative_to(ROOT).parts)) for folder in folders}
    assert set(setuptools["packages"]) == names
    assert setuptools["package-dir"] == {f"tilegpt.{leaf}": leaf for leaf in LEAVES}
    # Without py.typed a type checker treats all they define as Any. setuptools adds the markers to a wheel by itself.
    assert all((ROOT / leaf / "py.typed").is_file() for leaf in LEAVES)


def test_lazily_imported_names_of_model_are_in_all_and_dir():
    assert set(model.__all__) == {"GPTConfig", *model._HOME} <= set(dir(model))


@pytest.fixture
def example(tmp_path, user_environment):
    """Run a file of examples/ in an empty directory, beside the installed package: a folder `tilegpt` without
    __init__.py, as the wheel makes."""
    (tmp_path / "site" / "tilegpt").mkdir(parents=True)
    for leaf in LEAVES:
        (tmp_path / "site" / "tilegpt" / leaf).symlink_to(ROOT / leaf)

    def run(name: str, *arguments: str, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / name), *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path,
            env=user_environment | {"PYTHONPATH": str(tmp_path / "site")} | variables,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_training_example_learns_and_writes(example):
    printed = example("train.py")
    assert "def " in printed
    assert float(re.search(r"loss (\S+)", printed)[1]) < 4.0  # 5.5 for guessing among 256 bytes


@pytest.mark.slow
def test_the_hugging_face_example_converts_the_model_of_a_run(example, command_line, tiny, tmp_path):
    pytest.importorskip("transformers")
    ran = command_line("train.py", *tiny, "trainer.steps=1", "hydra.run.dir=runs/NAME")
    assert ran.returncode == 0, ran.stderr
    assert "parameters in folder" in example(
        "huggingface.py", "runs/NAME/checkpoints/step-00000001", "folder"
    )
    assert (tmp_path / "folder" / "model.safetensors").is_file()


def test_the_fused_layers_example_trains(example):
    variables = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    printed = example("fused_layers.py", **variables)
    assert 6.5 < float(re.search(r"loss ([\d.]+)", printed)[1]) < 7.5  # ln 1000 = 6.9


@pytest.mark.gpu
def test_the_example_under_sdpa_runs_our_kernels(example):
    assert float(re.search(r"difference (\S+)", example("under_sdpa.py"))[1]) < 0.05
