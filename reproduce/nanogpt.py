"""nanoGPT's model as a contender, from the user's checkout: `python -m reproduce training nanogpt=PATH/model.py`."""

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

from torch import nn

from model.config import GPTConfig

from .common import ReproduceError

# As in its train.py: GPT-2's 50257 rounded up for speed; its softmax includes the padding.
VOCABULARY = 50304


def load(path: str) -> ModuleType:
    """The module at `path`. Raises ReproduceError if it is not nanoGPT's model.py."""
    if not Path(path).is_file():
        raise ReproduceError(f"nanogpt={path} is not a file; name model.py of a nanoGPT checkout")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise ReproduceError(f"nanogpt={path} has no GPT and GPTConfig; name model.py of a nanoGPT checkout")
    return module


def build(path: str, config: GPTConfig, *, biases: bool, vocab_size: int | None = None) -> nn.Module:
    """nanoGPT's GPT in the shape of `config`, with its own initial weights.

    nanoGPT's train.py omits GPT-2's biases; with biases the model has the same parameters as ours. vocab_size: its
    rows of vocabulary, by default as its train.py has them.

    `model(tokens, targets)` returns (logits, loss). Its attention is torch's SDPA, which uses flash kernels on a GPU.
    """
    module, gpt2s = load(path), config.vocab_size == GPTConfig.vocab_size
    shape = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "dropout")}
    shape |= {"block_size": config.seq_len, "bias": biases}
    shape["vocab_size"] = vocab_size or (VOCABULARY if gpt2s else config.vocab_size)
    with contextlib.redirect_stdout(io.StringIO()):  # its constructor prints
        return module.GPT(module.GPTConfig(**shape))
