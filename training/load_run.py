"""Loads the model and the tokenizer of a run directory, to sample from or to export."""

from __future__ import annotations

import json
from pathlib import Path

import tiktoken
import torch

from data.tokenizer import load_tokenizer, tokenizer_hash
from kernels import resolve_attention
from model.gpt import GPT
from model.modern import build_gpt

from . import checkpoint
from .config import Config, ConfigError, load_config
from .distributed import resolve_device


def read_run(found: Path) -> tuple[Config, str]:
    """The config of the run that a checkpoint belongs to, and the hash of its tokenizer."""
    files = [found.parent.parent / name for name in ("config.yaml", "tokenizer.json")]
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"{file} is missing; a checkpoint can be read only in the run directory it was saved in."
            )
    config = load_config(files[0])
    try:
        return config, json.loads(files[1].read_text())["sha256"]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{files[1]} cannot be read: {error}") from None


def load_run(
    path: Path, device_name: str = "auto", attention_name: str = "auto", tokenizer_name: str | None = None
) -> tuple[GPT, tiktoken.Encoding]:
    """The model of a run directory or checkpoint, in eval mode and float32, and its tokenizer.

    tokenizer_name: what data.tokenizer has to be now, if the run's rank file has moved.
    """
    found = checkpoint.find(path)
    config, sha256 = read_run(found)
    tokenizer_name = tokenizer_name or config.data.tokenizer
    tokenizer = load_tokenizer(tokenizer_name)
    if tokenizer_hash(tokenizer) != sha256:
        raise ConfigError(
            f"{path} was trained with a tokenizer other than the present {tokenizer_name}: restore the original, "
            "or say where it is with --tokenizer PATH."
        )
    device = resolve_device(device_name, "--device ")
    _, attention = resolve_attention(
        attention_name,
        device=device,
        dtype=torch.float32,
        head_dim=config.model.head_dim,
        **config.model.attention_features,
    )
    with torch.device("meta"):
        model = build_gpt(config.model, attention)
    model.load_state_dict(checkpoint.load_weights(found, device), assign=True)
    return model.eval(), tokenizer
