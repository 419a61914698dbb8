"""GPT-2 on PyTorch. Its attention function is an argument, so it runs with any backend.

`import model` does not import torch: the names below that need it are loaded on first use. Generation is
`model.generate.generate`, not repeated here because the module has that name.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .config import GPTConfig

if TYPE_CHECKING:  # a checker reads neither __getattr__ nor a computed __all__
    from .fused import FusedGPT, FusedLayers
    from .gpt import GPT
    from .huggingface import from_huggingface, to_huggingface
    from .modern import build_gpt

_HOME = {
    "GPT": "gpt",
    "FusedGPT": "fused",
    "FusedLayers": "fused",
    "build_gpt": "modern",
    "from_huggingface": "huggingface",
    "to_huggingface": "huggingface",
}
__all__ = ["GPT", "FusedGPT", "FusedLayers", "GPTConfig", "build_gpt", "from_huggingface", "to_huggingface"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
