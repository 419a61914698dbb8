"""What the commands that train or load a run import: without it they end with one line. Imported before any of it."""

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
