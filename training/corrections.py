"""Error messages for mistakes on the command line: with the nearest name, or with our name for nanoGPT's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path

from hydra.errors import MissingConfigException, OverrideParseException

from . import jobs
from .config import Config
from .console import quoted_for_shell

_ALL = "`python train.py --cfg job` prints all settings"
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def options_of(group: str) -> list[str]:
    """The options of a group of configs/."""
    folder = CONFIGS / group
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))


def correction(wrong: str) -> str:
    """What to type instead of `trainer.steps 5`, `--steps 5` or `--steps=5`."""
    key, value = re.match(r"-*([^ =]*)[ =]?([^ ]*)", wrong).groups()
    if meaning := _meaning(key):
        return f"{wrong}: use {meaning}"
    near = _nearest(key)
    hint = f"did you mean {near}={value or 'VALUE'}?" if near else f"settings are written key=value; {_ALL}"
    return f"{wrong}: {hint}"


def explained(error: Exception) -> str:
    """One line for a composition error, with the nearest name where a name is wrong."""
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        if extra := jobs.extra_with(error.missing_cfg_file):
            return f"{error.missing_cfg_file} is not installed: pip install '.[{extra}]' in the checkout"
        group, _, option = error.missing_cfg_file.partition("/")
        if group != "hydra" and (options := options_of(group)):
            near = [each for each in options if option in each] or get_close_matches(option, options, n=1)
            hint = f"did you mean {' or '.join(near)}? " if 0 < len(near) < len(options) else ""
            return f"{group}={option} is not an option; {hint}{group} has: {', '.join(options)}"
    if isinstance(error, OverrideParseException):
        quoted = quoted_for_shell(error.override)
        return f"{error.override}: Hydra cannot parse this; quote it for Hydra and for the shell: {quoted}"
    text = str(error)
    if match := re.match(r"Ambiguous value for argument '(?P<override>.*)'", text):
        key, _, value = match["override"].partition("=")
        several = f"{match['override']}: several values need -m, which starts one run for each"
        if (CONFIGS / key).is_dir():
            return several
        quoted = quoted_for_shell(match["override"])
        return f"{several}; for a list type {key}=[{value}], for a text with commas {quoted}"
    if match := re.match(r"Could not override '(?P<key>[^']+)'", text):
        return f"{match['key']} is not a setting; {_hint(match['key'])}"
    first = text.splitlines()[0].removeprefix("Error merging override ").strip()
    if error.__cause__ and (reason := str(error.__cause__).splitlines()):
        key, _, value = first.partition("=")
        if "is not a ListConfig" in reason[0]:
            return f"{first}: the value must be a list: {key}=[{value}]"
        if whole := re.match(
            r"Value '(-?\d+)\.0' of type 'float' could not be converted to Integer", reason[0]
        ):
            return f"{first}: the value must be a whole number: {key}={whole[1]}"
        if key == "logger.mode":  # wandb has `disabled`
            return f"{first}: {reason[0]}; logger=none turns wandb off"
        return f"{first}: {reason[0]}"
    return first


def _hint(key: str) -> str:
    """What to type instead of a name that does not exist."""
    if meaning := _meaning(key):
        return f"use {meaning}"
    if near := _nearest(key):
        return f"did you mean {near}?"
    group = key.split(".")[0]
    inside = [
        each.removeprefix(f"{group}.") for each in _setting_names(Config) if each.startswith(f"{group}.")
    ]
    return f"{group} has: {', '.join(inside)}" if inside else _ALL


# nanoGPT's name -> ours, of settings that take the same values.
_NANOGPT_NAMES = {
    "learning_rate": "optimizer.lr",
    "max_iters": "trainer.steps",
    "batch_size": "trainer.micro_batch",
    "eval_interval": "trainer.eval_every",
    "log_interval": "trainer.log_every",
    "dtype": "trainer.precision",
    "block_size": "model.seq_len",
    "dataset": "data",
    "out_dir": "hydra.run.dir",
    "wandb_project": "logger.project",
}
# nanoGPT's name -> what to type, of settings that take other values.
_NANOGPT_MEANINGS = {
    "warmup_iters": "schedule.warmup_fraction, which is warmup_iters / max_iters",
    "min_lr": "schedule.final_fraction, which is min_lr / learning_rate",
    "lr_decay_iters": "trainer.steps: the decay ends with the run",
    "decay_lr": "schedule=constant for a rate that does not decay",
    "gradient_accumulation_steps": "trainer.batch_tokens: the tokens of all micro-batches and ranks together",
    "beta1": "optimizer.betas=[beta1,beta2]",
    "beta2": "optimizer.betas=[beta1,beta2]",
    "eval_iters": "trainer.eval_tokens, in tokens, or leave it out for the whole split",
    "eval_only": "trainer.steps=0",
    "always_save_checkpoint": "trainer.save_every",
    "wandb_log": "logger=wandb or logger=none",
    "wandb_run_name": "hydra.run.dir, whose last part names the run",
    "bias": "GPT-2's biases, of linear layers and norms: they are always there",
    "backend": "trainer.device: NCCL connects GPUs, gloo CPUs",
}


def _meaning(key: str) -> str | None:
    return _NANOGPT_MEANINGS.get(key.split(".")[-1].lstrip("-"))


def _nearest(key: str) -> str | None:
    """The setting or group meant by `key`: one with its last word, as people forget groups, else the most alike."""
    settings = list(_setting_names(Config))
    word = key.split(".")[-1]
    if word in _NANOGPT_NAMES:
        return _NANOGPT_NAMES[word]
    if same := [each for each in settings if each.split(".")[-1] == word]:
        return get_close_matches(key, same, n=1, cutoff=0)[0]
    groups = [] if "." in key else [path.name for path in CONFIGS.iterdir() if path.is_dir()]
    if near := get_close_matches(key, settings + groups, n=1, cutoff=0.8):
        return near[0]
    by_last_word = {each.split(".")[-1]: each for each in settings}
    near = get_close_matches(word, by_last_word, n=1, cutoff=0.75)
    return by_last_word[near[0]] if near else None


def _setting_names(schema: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a dataclass tree, except the groups themselves."""
    for f in fields(schema):
        if is_dataclass(f.default_factory):
            yield from _setting_names(f.default_factory, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name
