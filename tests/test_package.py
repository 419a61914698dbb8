"""What pip installs."""

import tomllib
from pathlib import Path

import model

ROOT = Path(__file__).parents[1]
LEAVES = ("model", "kernels", "data")


def test_the_wheel_has_every_package_of_the_leaves():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [path.parent for leaf in LEAVES for path in (ROOT / leaf).rglob("__init__.py")]
    names = {".".join(("tilegpt", *folder.relative_to(ROOT).parts)) for folder in folders}
    assert set(setuptools["packages"]) == names
    assert setuptools["package-dir"] == {f"tilegpt.{leaf}": leaf for leaf in LEAVES}


def test_names_that_are_loaded_late_are_listed():
    assert set(model.__all__) <= set(dir(model))
