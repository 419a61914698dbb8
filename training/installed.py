"""Ends a command that trains or loads a run with one line if a package it needs is missing; to be imported first."""

import sys
from importlib.util import find_spec

NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "hydra": "hydra-core",
    "tiktoken": "tiktoken",
    "safetensors": "safetensors",
    "tqdm": "tqdm",
    "filelock": "filelock",
}

if missing := [package for module, package in NEEDED.items() if find_spec(module) is None]:
    sys.exit(f"error: not installed: {', '.join(missing)} (pip install -r requirements.txt)")
