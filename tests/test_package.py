"""What pip installs, and what the README says can be done with it. About 10 s."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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


def test_the_readmes_examples_run_as_printed(command_line, tiny, tmp_path, user_environment):
    """One after the other, as the installed package: a folder `tilegpt` without __init__.py, as the wheel makes."""
    pytest.importorskip("transformers")
    (tmp_path / "site" / "tilegpt").mkdir(parents=True)
    for leaf in LEAVES:
        (tmp_path / "site" / "tilegpt" / leaf).symlink_to(ROOT / leaf)
    alone, weights, fused = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (path,) = re.findall(r'"(runs/NAME/checkpoints/\S+)/weights.pt"', weights)
    ran = command_line("train.py", *tiny, "trainer.steps=1", "hydra.run.dir=runs/NAME")
    assert ran.returncode == 0, ran.stderr
    (tmp_path / path).with_name("step-00000001").rename(tmp_path / path)
    done = subprocess.run(
        [sys.executable, "-c", alone + weights + fused],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=user_environment | {"PYTHONPATH": str(tmp_path / "site")},
    )
    assert done.returncode == 0, done.stderr
    assert "def " in done.stdout
    assert (tmp_path / "huggingface" / "model.safetensors").is_file()
