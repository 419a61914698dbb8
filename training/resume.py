"""Resuming: the Start of a run, at step 0 or at a checkpoint, and what has changed between the two runs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from data.loader import Corpus
from model.config import GPTConfig

from . import checkpoint
from .config import Config, ConfigError, flatten, to_yaml
from .optimizer import OptimizerConfig
from .parallel import parts

# trainer.resume=auto: the run in the run directory, if there is one.
AUTO = "auto"
# Prefixes of settings whose change is not reported on resume: they change no weight, or identity() refuses them.
_NOT_REPORTED = (
    *("data.", "logger.", "trainer.resume", "trainer.sample_", "trainer.keep_"),
    *("trainer.log_every", "trainer.save_every", "trainer.eval_", "trainer.hellaswag"),
    *("trainer.profile_step", "parallel.timeout", "parallel.blocks_at_once"),
    *("attention.precise_delta", "parallel.gather_keys"),  # what they were resolved to is
)
# Settings of data that the tokens do not depend on; identity() has the last one.
_SAME_CORPUS = ("data.cache_dir", "data.workers", "data.document_mask", "data.block_len")
# What was resolved -> the setting that decides it: with `auto` or null, the first may change without the second.
_RESOLVED = {
    "attention": "attention.name",
    "attention_tier": "attention.tier",
    "precise_delta": "",
    "loss": "model.loss",
    "block": "model.block",
    "dtype": "trainer.precision",
    "compiled": "trainer.compile",
    "gather_keys": "",
    "cuda_graphs": "trainer.cuda_graphs",
    "world_size": "",
}


@dataclass(frozen=True)
class Start:
    """Where a run begins: at a checkpoint that it resumes from, or at step 0."""

    checkpoint: Path | None = None
    path: str = ""  # as trainer.resume names it
    step: int = 0
    seconds: float = 0.0  # how long it had run by then
    init_from: str | None = None  # where its first weights came from
    identity: dict[str, Any] = field(default_factory=dict)  # `identity` of the checkpoint's run
    # Settings and facts that differ from the checkpoint's run: name -> [was, is].
    changed: dict[str, list] = field(default_factory=dict)
    history: dict[str, dict[str, list]] = field(default_factory=dict)  # what each resume changed, by its step
    warm_up: str | None = None  # what to say if the schedule warms up once more

    def checked(self, config: Config, corpus: Corpus, facts: dict[str, Any], into: Path) -> Start:
        """This, with `changed`, `history`, `warm_up`. Raises ConfigError if a run in `into` cannot go on from it."""
        run_dir = self.checkpoint.parent.parent
        # A checkpoint that is older than a setting was trained with its default.
        older = _tensors(GPTConfig(), OptimizerConfig())
        was, now = flatten(older) | flatten(self.identity), flatten(identity(config, corpus))
        before = _settings(run_dir / "config.yaml")
        if differing := [name for name in now if was.get(name) != now[name]]:
            if "corpus" in differing:  # a hash: name what changed it
                for name, pair in _changed(before, config, _SAME_CORPUS).items():
                    if name.startswith("data."):
                        was[name], now[name] = pair
                        differing.append(name)
            theirs, ours = (
                ", ".join(f"{name}={each.get(name)}" for name in differing) for each in (was, now)
            )
            raise ConfigError(
                f"trainer.resume={self.path} was trained with {theirs}, but this run has {ours}; the command it was "
                f"trained with is in {run_dir / 'environment.json'}."
            )
        # In its own directory its last evaluation may be missing; in another there would be a run without weights.
        elsewhere = run_dir.resolve() not in (into.resolve(), into.resolve() / "checkpoints")
        if self.step > (steps := config.trainer.steps) or (self.step == steps and elsewhere):
            where = "beyond" if self.step > steps else "where nothing is left to train with"
            raise ConfigError(
                f"trainer.resume={self.path} is at step {self.step}, {where} trainer.steps={steps}; to train it "
                f"further, set more steps; to evaluate it, use trainer.init_from={self.path} trainer.steps=0."
            )
        facts_before = _record(run_dir / "facts.json")
        if before and facts_before:  # a run older than these facts, and than null for these settings
            facts_before.setdefault("precise_delta", bool(before.get("attention.precise_delta")))
            facts_before.setdefault("gather_keys", bool(before.get("parallel.gather_keys")))
        changed = _changed(before, config, _NOT_REPORTED)
        for name, setting in _RESOLVED.items():
            if setting not in changed and name in facts_before and facts_before[name] != facts[name]:
                changed[name] = [facts_before[name], facts[name]]
        return dataclasses.replace(
            self,
            changed=changed,
            history=_history(facts_before.get("resumed", {}), self.step, changed),
            warm_up=_warm_up(before, config, self.step),
        )


FROM_THE_START = Start()


def resume_path(config: Config, run_dir: Path) -> str | None:
    """The path to resume from: trainer.resume; for auto the run directory, once it has a checkpoint; or None."""
    if config.trainer.resume != AUTO:
        return config.trainer.resume
    return str(run_dir) if checkpoint.saved(run_dir) else None


def finished(config: Config, run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run that is to resume in its own directory but has ended: nothing is left to do.

    Evaluated once more, it would lose the speed that is in its summary.
    """
    path = config.trainer.resume
    if path is None or (path != AUTO and Path(path).resolve() != run_dir.resolve()):
        return None
    summary = _record(run_dir / "summary.json")
    return summary if summary.get("steps") == config.trainer.steps else None


def start_at(path: str) -> Start:
    """The checkpoint that `path` names. Its tensors are not read yet."""
    found = checkpoint.find(path)
    state = checkpoint.load_training(found)
    return Start(found, path, state["step"], state["seconds"], state["init_from"], state["identity"])


def load_state(
    start: Start, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Load the checkpoint's weights, moments and gradient scale in place; learning rates, decays stay this run's."""
    state = checkpoint.load_training(start.checkpoint)
    into = parts.tensors(model, optimizer)
    if "optimizer" not in state:  # a sharded checkpoint, even where its parts are lost
        checkpoint.load_parts(start.checkpoint, into)
    else:
        named = enumerate(parts.optimized(model, optimizer))
        moments = {name: state["optimizer"]["state"][number] for number, (name, _) in named}
        parts.fill(into, checkpoint.load_weights(start.checkpoint, "cpu"), moments)
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])


def identity(config: Config, corpus: Corpus) -> dict[str, Any]:
    """The settings that must be the same on resume, so that the run goes on with the batches it would have seen."""
    return {
        **_tensors(config.model, config.optimizer),
        "corpus": corpus.fingerprint,
        "seed": config.seed,
        "data.block_len": config.data.block_len,
        "trainer.batch_tokens": config.trainer.batch_tokens,
    }


def _tensors(model: GPTConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """The part of `identity` that decides which tensors a checkpoint has, and their groups, as plain values."""
    values = {f.name: getattr(model, f.name) for f in dataclasses.fields(GPTConfig)}
    return {
        "model": {name: value.value if isinstance(value, Enum) else value for name, value in values.items()},
        "optimizer.name": optimizer.name.value,
        "optimizer.decay_embeddings": optimizer.decay_embeddings,
    }


def _record(file: Path) -> dict[str, Any]:
    """A JSON file of a run directory, {} if it is missing or a power cut emptied it."""
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _settings(config_file: Path) -> dict[str, Any]:
    """The settings of a run so far, by dotted name; {} for a lone checkpoint, or if they cannot be read."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        # Not as a Config: the code that wrote it may have had other settings.
        return flatten(OmegaConf.to_container(OmegaConf.load(config_file)))
    except (OSError, YAMLError, OmegaConfBaseException, AttributeError):
        return {}


def _changed(was: dict[str, Any], config: Config, ignoring: tuple[str, ...]) -> dict[str, list]:
    """{"trainer.steps": [20000, 40]}: where `config` is not what the run was trained with so far.

    ignoring: prefixes of names.
    """
    from omegaconf import OmegaConf

    now = flatten(OmegaConf.to_container(OmegaConf.create(to_yaml(config))))
    return {
        name: [was[name], now[name]]
        for name in now
        if name in was and was[name] != now[name] and not name.startswith(ignoring)
    }


def _warm_up(was: dict[str, Any], config: Config, step: int) -> str | None:
    """The remark that this run's schedule warms up at `step`, if the run so far has already done so; or None."""
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
    """Step of each resume -> the settings that it changed, with this resume. known: the same without it.

    What an earlier resume changed after `step` counts as changed at `step`, where this run branches off.
    """
    history: dict[str, dict[str, list]] = {}
    for began, changes in [*known.items(), (step, changed)]:
        here = history.setdefault(str(min(int(began), step)), {})
        for name, (was, now) in changes.items():
            here[name] = [here[name][0] if name in here else was, now]
    return {at: {k: v for k, v in each.items() if v[0] != v[1]} for at, each in history.items()}
