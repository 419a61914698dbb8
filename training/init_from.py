"""`trainer.init_from`: start a run with the weights of another, or with a GPT-2 in Hugging Face's format."""

from __future__ import annotations

import json
import math
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from data.tokenizer import load_tokenizer, tokenizer_hash
from kernels import get_attention
from model.config import SWITCHES, GPTConfig
from model.huggingface import from_huggingface

from . import checkpoint
from .config import Config, ConfigError, ModelConfig, Positions
from .console import for_shell
from .gguf_file import merges_of
from .load_run import read_run
from .resume import AUTO
from .seeds import stream_seed

_SIZES = ("n_layer", "n_head", "n_embd")
# The settings that weights depend on. Each run has its own dropout and document mask and, for a longer context, its
# own window and rope_theta; for seq_len see with_positions.
_SHAPE = (*_SIZES, "scale_attn_by_inverse_layer_idx", *sorted({*SWITCHES} - {"window"}))
_GPT2_VOCABULARY = 50257
_PRESETS = Path(__file__).parents[1] / "configs" / "model"


class InitialWeights(NamedTuple):
    source: str  # the folder they were read from
    state: dict[str, torch.Tensor]
    model: GPTConfig
    tokenizer: str  # theirs, as the setting to type: data.tokenizer=...
    same_tokenizer: bool  # whether it is this run's
    positions: str = ""  # what became of the position embeddings, if seq_len is another


def initial_weights(config: Config) -> InitialWeights:
    """The weights that `config.trainer.init_from` names, on the CPU. Raises ConfigError if they are not for this run.

    Needs no corpus: a mismatch is refused before hours of tokenising.
    """
    path = config.trainer.init_from
    if config.trainer.resume not in (None, AUTO):
        raise ConfigError(
            f"trainer.resume={config.trainer.resume} already loads the weights: leave out trainer.init_from={path}."
        )
    hugging_face = (Path(path) / "config.json").is_file()
    found = (_from_hugging_face if hugging_face else _from_run)(Path(path), config.data.tokenizer)
    has, needs = _differing(found.model, config.model)
    if not found.same_tokenizer:
        has.append(f"data.tokenizer={config.data.tokenizer}")
        needs.append(found.tokenizer)
    if needs:
        raise ConfigError(f"trainer.init_from={path} needs {' '.join(needs)}; this run has {' '.join(has)}.")
    if config.model.rope:  # no table
        return found
    seed = stream_seed(config.seed if config.init_seed is None else config.init_seed, "init_positions")
    ours, how = config.model.seq_len, config.trainer.init_positions
    table = with_positions(found.state["wpe.weight"], ours, how, torch.Generator().manual_seed(seed))
    return found._replace(state=found.state | {"wpe.weight": table}, positions=_told(found.model, ours, how))


def with_positions(
    table: torch.Tensor, seq_len: int, how: Positions, generator: torch.Generator
) -> torch.Tensor:
    """The position embeddings (T, C) for another length, (seq_len, C): cut, or extended.

    interpolate, the default, stretches the table, as for images (arXiv 2010.11929): every row is between two that
    the model knows, but near positions are nearer than it has seen them. repeat is Longformer's (arXiv 2004.05150,
    section 5), and random draws new rows; with either the first T positions keep their loss, and the later ones have
    to be learned. Measured on bytes of Python with 2 layers, 64 wide, from 64 to 128 positions: the loss was 1.60
    before, 1.83, 2.62 and 2.65 (in this order) right after, and 1.62, 2.10 and 2.10 after 100 steps.
    """
    old = table.size(0)
    if seq_len <= old:
        return table[:seq_len]
    if how is Positions.interpolate:
        rows = functional.interpolate(table.T[None].float(), size=seq_len, mode="linear", align_corners=True)
        return rows[0].T.to(table.dtype).contiguous()
    if how is Positions.repeat:
        return table.repeat(math.ceil(seq_len / old), 1)[:seq_len]
    return torch.cat([table, 0.02 * torch.randn(seq_len - old, table.size(1), generator=generator)])


def _told(theirs: GPTConfig, seq_len: int, how: Positions) -> str:
    """How the table of positions was cut or extended, in words for the banner; empty if it was not."""
    if theirs.seq_len == seq_len:
        return ""
    return f"positions {theirs.seq_len:,} -> {seq_len:,}: {'cut' if seq_len < theirs.seq_len else how.value}"


def _from_run(path: Path, tokenizer: str) -> InitialWeights:
    try:
        found = checkpoint.find(path)
    except ConfigError as error:
        raise ConfigError(
            f"trainer.init_from: {error} A GPT-2 folder from Hugging Face's save_pretrained works too; "
            "the released one: `hf download openai-community/gpt2 config.json model.safetensors --local-dir gpt2`."
        ) from None
    config, sha256 = read_run(found)
    theirs = f"data.tokenizer={config.data.tokenizer}"
    if theirs.endswith(".tiktoken"):
        theirs = f"{for_shell(theirs)} as the file was then"  # the file may have changed, not its name
    same = tokenizer_hash(load_tokenizer(tokenizer)) == sha256
    return InitialWeights(str(found), checkpoint.load_weights(found, "cpu"), config.model, theirs, same)


def _from_hugging_face(path: Path, tokenizer: str) -> InitialWeights:
    try:
        kind = json.loads((path / "config.json").read_text()).get("model_type")
        if kind != "gpt2":
            raise ValueError(f"its config.json says model_type={kind}, not gpt2")
        model = from_huggingface(path, get_attention("naive"))  # any: attention has no weights
    except ImportError:
        raise ConfigError(f"trainer.init_from={path} needs transformers: pip install transformers.") from None
    except Exception as error:  # safetensors, for one, raises a class of its own
        reason = (str(error) or type(error).__name__).splitlines()[0].removesuffix(".")
        raise ConfigError(f"trainer.init_from={path} cannot be read as a GPT-2: {reason}.") from error
    ours, size = load_tokenizer(tokenizer), model.config.vocab_size
    same = ours.n_vocab == size
    if size != _GPT2_VOCABULARY and not (same and _tokens_in(path) == merges_of(ours)[0]):
        raise ConfigError(
            f"trainer.init_from={path} has a vocabulary of {size}, and no tokenizer.json that says it is that of "
            f"data.tokenizer={tokenizer}; GPT-2's is {_GPT2_VOCABULARY}."
        )
    return InitialWeights(str(path), model.state_dict(), model.config, "data.tokenizer=gpt2", same)


def _tokens_in(folder: Path) -> dict[str, int] | None:
    """The vocabulary in the tokenizer's file next to the weights, as our own exports have one."""
    try:
        file = json.loads((folder / "tokenizer.json").read_text())
        return file["model"]["vocab"] | {each["content"]: each["id"] for each in file["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _differing(theirs: GPTConfig, ours: ModelConfig) -> tuple[list[str], list[str]]:
    """Settings in which the shape of `ours` differs, and what to type for `theirs`; a preset of configs/ by name."""
    has = [f"model.{name}={value}" for name, value in _shape(ours).items() if value != _shape(theirs)[name]]
    base: GPTConfig = ours
    needs = []
    if theirs.n_embd != ours.n_embd:  # another model: its name brings the batch and the rate that suit it
        for name, preset in _presets().items():
            if all(getattr(preset, size) == getattr(theirs, size) for size in _SIZES):
                base, needs = preset, [f"model={name}"]
                if preset.seq_len != theirs.seq_len:
                    needs.append(f"model.seq_len={theirs.seq_len}")
    needs += [
        f"model.{name}={value}" for name, value in _shape(theirs).items() if value != _shape(base)[name]
    ]
    return has, needs


def _shape(config: GPTConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in _SHAPE}
    values["n_kv_head"] = config.switches.get("n_kv_head", "null")  # not where it is n_head
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}


def _presets() -> dict[str, GPTConfig]:
    from omegaconf import OmegaConf

    return {file.stem: GPTConfig(**OmegaConf.load(file).model) for file in sorted(_PRESETS.glob("*.yaml"))}
