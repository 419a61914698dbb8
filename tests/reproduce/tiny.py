"""Experiments in their tiny form, on a GPU where there is one."""

import json
from pathlib import Path

import torch

from reproduce.__main__ import main
from reproduce.results import slug
from training.environment import device_name

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FOLDER = slug(device_name(torch.device(DEVICE)))


def run(directory: Path, name: str, *arguments: str) -> int:
    return main([name, "--tiny", "--device", DEVICE, "--results", str(directory), *arguments])


def document(directory: Path, name: str) -> dict:
    return json.loads((directory / FOLDER / f"{name}.json").read_text())
