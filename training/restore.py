"""A trained model back from its run directory."""

from __future__ import annotations

from pathlib import Path

import tiktoken
import torch

from data.tokenizer import load_tokenizer
from kernels import resolve_attention
from model.gpt import GPT

from . import checkpoint
from .config import ConfigError, load_config
from .distributed import resolve_device


def load_run(
    path: Path, device_name: str = "auto", attention_name: str = "auto"
) -> tuple[GPT, tiktoken.Encoding]:
    """The model of a run directory or checkpoint, in eval mode and float32, and its tokenizer."""
    found = checkpoint.find(path)
    config_file = found.parent.parent / "config.yaml"
    if not config_file.is_file():
        raise ConfigError(
            f"{config_file} is missing; a checkpoint needs the run directory it was written in."
        )
    config = load_config(config_file)
    device = resolve_device(device_name, "--device ")
    _, attention = resolve_attention(
        attention_name, device=device, dtype=torch.float32, head_dim=config.model.head_dim
    )
    with torch.device("meta"):
        model = GPT(config.model, attention)
    model.load_state_dict(checkpoint.load_weights(found, device), assign=True)
    return model.eval(), load_tokenizer(config.data.tokenizer)
