"""nanoGPT's model as a contender, from the user's checkout: `python -m reproduce training nanogpt=PATH/model.py`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

from torch import nn

from model.config import GPTConfig

from .experiment import ReproduceError

# As in its train.py: GPT-2's 50257 rounded up for speed; its softmax includes the padding.
VOCABULARY = 50304


def load(path: str) -> ModuleType:
    """The module at `path`. Raises ReproduceError if it is not nanoGPT's model.py."""
    if not Path(path).is_file():
        raise ReproduceError(f"nanogpt={path} is not a file; name model.py of a nanoGPT checkout")
    module = load_nanogpt(Path(path))
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise ReproduceError(f"nanogpt={path} has no GPT and GPTConfig; name model.py of a nanoGPT checkout")
    return module


def load_nanogpt(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def build(path: str, config: GPTConfig, *, biases: bool) -> nn.Module:
    """nanoGPT's GPT in the shape of `config`, with its own initial weights.

    nanoGPT's train.py omits GPT-2's biases; with biases the model has the same parameters as ours.

    `model(tokens, targets)` returns (logits, loss). Its attention is torch's SDPA, which uses flash kernels on a GPU.
    """
    module = load(path)
    with contextlib.redirect_stdout(io.StringIO()):  # its constructor prints
        return module.GPT(
            module.GPTConfig(
                block_size=config.seq_len,
                vocab_size=VOCABULARY if config.vocab_size == GPTConfig.vocab_size else config.vocab_size,
                n_layer=config.n_layer,
                n_head=config.n_head,
                n_embd=config.n_embd,
                dropout=config.dropout,
                bias=biases,
            )
        )
