"""Load a run from its directory, to resume it or to sample from its model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tiktoken
import torch

from data.manifest import Manifest
from data.tokenizer import load_tokenizer, tokenizer_hash
from kernels import resolve_attention
from model.config import GPTConfig
from model.gpt import GPT

from . import checkpoint
from .config import Config, ConfigError, flatten, load_config, to_yaml
from .distributed import resolve_device

if TYPE_CHECKING:
    from .trainer import Trainer

# Prefixes of settings whose change is not reported on resume: they change no weight, or identity() refuses them.
_NOT_REPORTED = (
    *("data.", "logger.", "trainer.resume", "trainer.sample_", "trainer.keep_"),
    *("trainer.log_every", "trainer.eval_every", "trainer.save_every", "trainer.profile_step"),
)


# trainer.resume=auto: the run in the run directory, if there is one.
AUTO = "auto"
# What was resolved, and the setting that decides it: with `auto` or null it may have changed although that has not.
_RESOLVED = {
    "attention": "attention.name",
    "attention_tier": "attention.tier",
    "loss": "model.loss",
    "block": "model.block",
    "dtype": "trainer.precision",
    "compiled": "trainer.compile",
    "world_size": "",
}


class Resumed(NamedTuple):
    """Where a run resumes; a new one has nothing to resume from."""

    step: int
    seconds: float  # how long it had run by then
    changed: dict[str, list]  # settings that differ from the checkpoint's: [was, is]
    history: dict[str, dict[str, list]]  # what each resume changed, by its step; in facts.json
    warm_up: str | None = None  # what to say if the schedule warms up once more


FROM_THE_START = Resumed(0, 0.0, {}, {})


def resume_path(config: Config, run_dir: Path) -> str | None:
    """What to resume from: trainer.resume, and for auto the run directory once it has a checkpoint."""
    if config.trainer.resume != AUTO:
        return config.trainer.resume
    return str(run_dir) if checkpoint.saved(run_dir) else None


def finished(config: Config, run_dir: Path) -> dict[str, Any] | None:
    """The summary of the run that trainer.resume=auto finds at its end: nothing is left to do."""
    if config.trainer.resume != AUTO:
        return None
    summary = _record(run_dir / "summary.json")
    return summary if summary.get("steps") == config.trainer.steps else None


def resume(run: Trainer, path: str) -> Resumed:
    """Load a checkpoint into model, optimizer and scaler; the config takes over its trainer.init_from."""
    found = checkpoint.find(path)
    state = checkpoint.load_training(found, run.world.device)
    run_dir = found.parent.parent
    was, now = flatten(state["identity"]), flatten(identity(run))
    if was["corpus"] == run.corpus.directory.name:  # as checkpoints had it before they had the tokens' hash
        was["corpus"] = now["corpus"]
    if differing := [name for name in now if was.get(name) != now[name]]:
        theirs, ours = (", ".join(f"{name}={each.get(name)}" for name in differing) for each in (was, now))
        raise ConfigError(
            f"trainer.resume={path} was trained with {theirs}, but this run has {ours}; the command it was "
            f"trained with is in {run_dir / 'environment.json'}."
        )
    if state["step"] > run.config.trainer.steps:
        raise ConfigError(
            f"trainer.resume={path} is at step {state['step']}, beyond trainer.steps={run.config.trainer.steps}; "
            f"to evaluate it, use trainer.init_from={path} trainer.steps=0."
        )
    run.model.load_state_dict(checkpoint.load_weights(found, run.world.device))
    settings = [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
    run.optimizer.load_state_dict(state["optimizer"])
    for group, setting in zip(run.optimizer.param_groups, settings, strict=True):
        group.update(setting)  # learning rates and decays stay this run's; the moments are the checkpoint's
    if state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    trainer = dataclasses.replace(run.config.trainer, init_from=state["init_from"])
    run.config = dataclasses.replace(run.config, trainer=trainer)
    facts = _record(run_dir / "facts.json")
    before = _settings(run_dir / "config.yaml")
    changed = _changed(before, run.config)
    changed |= {k: v for k, v in _changed_facts(facts, run).items() if _RESOLVED[k] not in changed}
    history = _history(facts.get("resumed", {}), state["step"], changed)
    return Resumed(
        state["step"], state["seconds"], changed, history, _warm_up(before, run.config, state["step"])
    )


def identity(run: Trainer) -> dict[str, Any]:
    """What must not differ on resume, so that the run continues with the batches it would have seen."""
    config = run.config
    return {
        "model": {f.name: getattr(config.model, f.name) for f in dataclasses.fields(GPTConfig)},
        "corpus": _tokens_hash(run.corpus.manifest),
        "seed": config.seed,
        "data.block_len": config.data.block_len,
        "trainer.batch_tokens": config.trainer.batch_tokens,
        "optimizer.decay_embeddings": config.optimizer.decay_embeddings,
    }


def _tokens_hash(manifest: Manifest) -> str:
    """One corpus is another's equal if its tokens are, wherever its text lies by now."""
    shards = [(shard["split"], shard["tokens"], shard["sha256"]) for shard in manifest.shards]
    return "sha256:" + hashlib.sha256(json.dumps(shards).encode()).hexdigest()[:16]


def _record(file: Path) -> dict[str, Any]:
    """A JSON file of a run directory, {} if it is missing or a power cut emptied it."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}


def _settings(config_file: Path) -> dict[str, Any]:
    """The settings of a run so far, by dotted name; {} of a checkpoint alone, or if they cannot be read."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        # Not as a Config: the code that wrote it may have had other settings.
        return flatten(OmegaConf.to_container(OmegaConf.load(config_file)))
    except (OSError, YAMLError, OmegaConfBaseException, AttributeError):
        return {}


def _changed(was: dict[str, Any], config: Config) -> dict[str, list]:
    """{"trainer.steps": [20000, 40]}: where `config` is not what the run was trained with so far."""
    from omegaconf import OmegaConf

    now = flatten(OmegaConf.to_container(OmegaConf.create(to_yaml(config))))
    return {
        name: [was[name], now[name]]
        for name in now
        if name in was and was[name] != now[name] and not name.startswith(_NOT_REPORTED)
    }


def _changed_facts(was: dict[str, Any], run: Trainer) -> dict[str, list]:
    """{"world_size": [1, 2]}: what was resolved to something else although its setting may be the same."""
    now = run.facts()
    return {name: [was[name], now[name]] for name in _RESOLVED if name in was and was[name] != now[name]}


def _warm_up(was: dict[str, Any], config: Config, step: int) -> str | None:
    """What to say where this run's schedule would warm up at `step`, though the run so far had done so."""
    if not {"schedule.warmup_fraction", "trainer.steps"} <= was.keys():
        return None
    steps = config.trainer.steps
    ended = round(was["schedule.warmup_fraction"] * was["trainer.steps"])
    ends = round(config.schedule.warmup_fraction * steps)
    if not ended <= step < ends:
        return None
    return (
        f"once more until step {ends:,}, a fraction of all {steps:,}; the run so far ended its own at step "
        f"{ended:,}: keep that with schedule.warmup_fraction={ended / steps:.6g}"
    )


def _history(known: dict[str, dict], step: int, changed: dict[str, list]) -> dict[str, dict[str, list]]:
    """What each resume changed, by its step, this one included. known: the same of the resumes before.

    What an earlier resume changed after `step` counts as changed at `step`, where this run branches off.
    """
    history: dict[str, dict[str, list]] = {}
    for began, changes in [*known.items(), (step, changed)]:
        here = history.setdefault(str(min(int(began), step)), {})
        for name, (was, now) in changes.items():
            here[name] = [here[name][0] if name in here else was, now]
    return {at: {k: v for k, v in each.items() if v[0] != v[1]} for at, each in history.items()}


def read_run(found: Path) -> tuple[Config, str]:
    """The config of the run that a checkpoint is of, and the hash of its tokenizer."""
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
    path: Path,
    device_name: str = "auto",
    attention_name: str = "auto",
    tokenizer_name: str | None = None,
) -> tuple[GPT, tiktoken.Encoding]:
    """The model of a run directory or checkpoint, in eval mode and float32, and its tokenizer.

    tokenizer_name: what data.tokenizer would be by now, if the run's rank file has moved.
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
        attention_name, device=device, dtype=torch.float32, head_dim=config.model.head_dim
    )
    with torch.device("meta"):
        model = GPT(config.model, attention)
    model.load_state_dict(checkpoint.load_weights(found, device), assign=True)
    return model.eval(), tokenizer
