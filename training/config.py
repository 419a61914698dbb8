"""The typed configuration of a run: every key, its type, default, meaning and check.

YAML under configs/ holds values and recipes; these dataclasses hold the types and the explanations. Nothing here
imports torch, so `python train.py --help` answers at once; omegaconf is imported where YAML is read or written, so
that the rest of this package can be used where it is not installed.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from model.config import GPTConfig

from .optimizer import OptimizerConfig
from .parallel.config import ParallelConfig
from .schedule import ScheduleConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig


class ConfigError(ValueError):
    """A user asked for something impossible; the message is one line with the remedy."""


def is_users_mistake(error: ValueError) -> bool:
    """Whether one of our packages raised this, so that the user can fix it; any other ValueError is a bug."""
    return type(error).__module__.split(".")[0] in {"training", "data", "kernels", "reproduce"}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End a command with one line for a user's mistake; a bug keeps its traceback."""
    try:
        yield
    except ValueError as error:
        if not is_users_mistake(error):
            raise
        sys.exit(f"error: {error}")
    except (ImportError, OSError) as error:
        if not (line := cannot_load(error)):
            raise
        sys.exit(f"error: {line}")


def cannot_load(error: Exception) -> str:
    """The message for an import error of a torch whose libraries do not fit together; "" for any other error."""
    # The loader's errors name a library, then say why; errors about files have an errno.
    if getattr(error, "errno", None) is not None or not re.search(r"\.so[.\d]*(:|\s|$)", str(error)):
        return ""
    number = version("torch").partition("+")[0]
    fix = f"pip install --force-reinstall torch=={number}, and no other CUDA in LD_LIBRARY_PATH"
    return f"a library of torch's cannot be loaded: {error} ({fix})"


class Precision(Enum):
    auto = "auto"  # bf16 on a GPU that has it, fp32 elsewhere
    fp32 = "fp32"
    bf16 = "bf16"  # autocast; weights and optimizer state stay fp32
    fp16 = "fp16"  # autocast with a gradient scaler


class WandbMode(Enum):
    auto = "auto"  # what WANDB_MODE says; else online when an API key is configured, else offline, never a prompt
    online = "online"  # to the server; if it does not answer, the run does not begin
    offline = "offline"  # into the run directory, for `wandb sync` or `wandb leet`


class Layers(Enum):
    auto = "auto"  # fused on a GPU, torch elsewhere
    torch = "torch"  # PyTorch's own
    fused = "fused"  # our kernels; they need a GPU


class Positions(Enum):
    interpolate = "interpolate"  # stretched: every new row lies between two old ones
    repeat = "repeat"  # the old rows over and over
    random = "random"  # new rows behind the old ones, drawn as those once were


@dataclass
class ModelConfig(GPTConfig):
    """GPT-2's shape, and what computes its layers other than attention."""

    # Token ids the model reads and predicts. null: the tokenizer's; any other value is refused.
    vocab_size: int | None = None
    # The head and its loss. Fused: kernels.layers.linear_cross_entropy, which never holds the full logits.
    loss: Layers = Layers.auto
    # The blocks' other layers. Fused (kernels.layers): one kernel for a bias and its GELU, one for a bias, dropout,
    # residual addition and the LayerNorm that follows; the dropout mask is not stored. The token embedding is fused
    # too, with a gradient that is bit for bit repeatable, also under torch.compile. auto: with rmsnorm or another mlp
    # torch.
    block: Layers = Layers.auto

    def __post_init__(self) -> None:
        given = self.vocab_size
        if given is None:
            self.vocab_size = GPTConfig.vocab_size  # until the tokenizer is known
        try:
            super().__post_init__()
        except ValueError as error:
            # From the package `model`, which does not know what its settings are called here.
            raise ConfigError(re.sub(r"(\w+)=", r"model.\1=", str(error))) from None
        self.vocab_size = given


DRIFTS_FROM = 4096  # the context, in tokens, from which attention.precise_delta is on in bf16


@dataclass
class AttentionConfig:
    """Which attention backend the model is given, and how it works."""

    # A name in `kernels.ATTENTION`, or auto: flash on a GPU (above head_dim 128 where it beats sdpa), else sdpa.
    name: str = "auto"
    # For flash, which of its kernels may run: triton (portable), hopper (sm_90), or auto, the fastest that apply.
    tier: str = "auto"
    # For flash: keep the rounding error of the output, so that bf16 training does not drift (arXiv 2510.04212).
    # null: in bf16 from context 4096 on, where a run without it diverged.
    precise_delta: bool | None = None


@dataclass
class DataConfig:
    """Which text, which tokens, and where they are kept."""

    # Where text comes from: python_source, text_files, openwebtext, hub or mix.
    source: str = "python_source"
    # bytes, any tiktoken encoding by name (gpt2), or the path of a .tiktoken rank file.
    tokenizer: str = "bytes"
    # Prepared tokens go into a folder below this one, named after source, tokenizer and settings.
    cache_dir: str = "data/cache"
    # Fraction of the documents held out for validation; at least one document is.
    val_fraction: float = 0.01
    # Take only this many documents, from the start; files without any are not downloaded (hub: only with streaming).
    limit_documents: int | None = None
    # Attention stays within a document: no token sees the documents packed before its own. This changes perplexity,
    # so compare only runs with the same value.
    document_mask: bool = False
    # Draw windows of this many tokens and cut each into sequences of model.seq_len, so that runs of different lengths
    # see the same tokens at every step. null: model.seq_len.
    block_len: int | None = None
    # Tokenising processes; null: one per CPU core.
    workers: int | None = None
    # python_source: folders searched for .py files; empty: the standard library of this Python. A string or a list is
    # accepted, and turned into a list of strings; omegaconf has no type for that.
    roots: Any = field(default_factory=list)
    # text_files: globs or folders of .txt, .jsonl(.gz, .zst) and .parquet. openwebtext, hub: globs; only those of the
    # repository's files are downloaded and read. A string or a list, as `roots`.
    files: Any = field(default_factory=list)
    # The field of .jsonl, .parquet and Hub rows that holds the text.
    column: str = "text"
    # text_files: the string between the documents of a .txt file; empty: each file is one document.
    separator: str = ""
    # hub: a repository, as in datasets.load_dataset(repo, config, split=split), or a folder that it can load.
    repo: str = ""
    # hub: the repository's configuration; null: its only one.
    config: str | None = None
    # hub: the repository's split.
    split: str = "train"
    # hub: commit, branch or tag; null: main. openwebtext: a commit; null: the pinned one.
    revision: str | None = None
    # hub: read over the network without a local copy.
    streaming: bool = False
    # mix: prepared corpora, {FOLDER: weight, ...}: folders that prepare.py printed, or runs. The weights apply
    # to training and to validation. (Hydra could add no folder to a dict[str, float].)
    corpora: Any = None

    def __post_init__(self) -> None:
        self.roots, self.files = _strings(self.roots), _strings(self.files)
        try:
            if self.corpora is not None:
                self.corpora = {str(folder): float(weight) for folder, weight in self.corpora.items()}
        except (AttributeError, ValueError, TypeError):
            raise ConfigError(
                "data.corpora must be folders with weights: '{FOLDER: 0.7, OTHER: 0.3}'."
            ) from None
        if not self.cache_dir:  # it would be the current directory
            raise ConfigError("data.cache_dir is empty: name a folder, or leave it out.")


@dataclass
class TrainerConfig:
    """The loop: how long, in which batches, on what, and what is logged, evaluated and saved."""

    # Optimizer steps in all; 0: evaluate only, and save no checkpoint.
    steps: int = 1000
    # Global batch in tokens: sequences * model.seq_len, over all ranks and accumulation steps together.
    batch_tokens: int = 4096
    # Sequences one device takes at once; gradients accumulate until the global batch is reached. null: all at once.
    micro_batch: int | None = None
    # What activations and matrix products are computed in.
    precision: Precision = Precision.auto
    # auto (CUDA, else CPU), cpu, cuda, or cuda:1.
    device: str = "auto"
    # torch.compile the model. null: on CUDA only (on a CPU it costs more than a short run gains).
    compile: bool | None = None
    # Record the launches of a micro-step and replay them, so that a slow host does not keep the GPU waiting. null: on
    # CUDA, for a compiled model, unless it is sharded, blocks are recomputed, or ranks share sequences in a ring.
    # true also replays a ring, if no documents are packed, and on one GPU a model that is not compiled.
    cuda_graphs: bool | None = None
    # Largest global gradient norm; 0 switches clipping off.
    grad_clip: float = 1.0
    # Steps between rows of metrics. Each row waits for the device, which costs a large model nothing at 10.
    log_every: int = 10
    # Steps between evaluations; 0: at the end only.
    eval_every: int = 250
    # Tokens that an evaluation predicts, from the start of the validation split, the same each time. null: all of it.
    # The last evaluation is always of the whole split.
    eval_tokens: int | None = None
    # At each evaluation also the accuracy on HellaSwag, val/hellaswag: lm-evaluation-harness's acc_norm, zero-shot.
    hellaswag: bool = False
    # Its hellaswag_val.jsonl. null: downloaded once into data.cache_dir.
    hellaswag_file: str | None = None
    # Steps between checkpoints; 0: at the end only.
    save_every: int = 0
    # Checkpoints to keep, newest first.
    keep_checkpoints: int = 2
    # Keep, besides those, the one with the lowest validation loss of all evaluations: RUN/checkpoints/best.
    keep_best: bool = False
    # A run directory, or one of its checkpoints, to resume from. auto: the run in hydra.run.dir if there is one, so
    # that one command starts a job and, when it is requeued, resumes it. A finished run is left as it is.
    resume: str | None = None
    # Where initial weights come from: a run directory, one of its checkpoints, or a folder where Hugging Face's
    # save_pretrained left a GPT-2. null: random weights. Step (0), data, optimizer and schedule are this run's own.
    # model.seq_len may differ from theirs: of a longer table of position embeddings the first rows are taken.
    init_from: str | None = None
    # How a shorter table of position embeddings is extended to model.seq_len.
    init_positions: Positions = Positions.interpolate
    # A step to profile: its trace goes into the run directory, and its costliest operations are printed. Avoid the
    # first steps, which compile. null: none.
    profile_step: int | None = None
    # Tokens of each generated text; 0: none is generated.
    sample_tokens: int = 200
    # Steps between texts during the run; 0: at its end only.
    sample_every: int = 0
    # What they start from; empty: a new document.
    sample_prompt: str = ""

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "log_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("steps", "grad_clip", "eval_every", "save_every", "sample_tokens", "sample_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"trainer.{name} is {getattr(self, name)}; it must be finite, and 0 or more."
                )
        if str(self.resume).lower() in ("true", "false"):
            raise ConfigError(
                f"trainer.resume={str(self.resume).lower()}: it must be a run directory, or auto, which resumes the "
                "run in hydra.run.dir if there is one; leave it out for a new run."
            )
        for name in ("resume", "init_from"):
            if getattr(self, name) == "":  # from an unset shell variable
                raise ConfigError(f"trainer.{name} is empty: name a run directory, or leave it out.")
            if getattr(self, name):  # the ~ of a recipe, which no shell has expanded
                setattr(self, name, os.path.expanduser(getattr(self, name)))
        for name in ("micro_batch", "eval_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name} is {getattr(self, name)}; it must be at least 1, or null.")
        if self.hellaswag_file and not self.hellaswag:
            raise ConfigError("trainer.hellaswag_file is read with trainer.hellaswag=true only: add that.")
        if self.profile_step is not None and not 1 <= self.profile_step <= self.steps:
            steps = (
                f"it must be from 1 to trainer.steps={self.steps}, or null"
                if self.steps
                else "with trainer.steps=0 there is no step to profile"
            )
            raise ConfigError(f"trainer.profile_step is {self.profile_step}; {steps}.")

    def saves_at(self, done: int) -> bool:
        """Whether a checkpoint is saved after `done` steps; one always is after the last."""
        return done == self.steps or _due(done, self.save_every)

    def logs_at(self, done: int) -> bool:
        """Whether a row of metrics is due, as it also is with a checkpoint, so that no broken model is saved."""
        return self.saves_at(done) or _due(done, self.log_every) or done == 1

    def samples_at(self, done: int) -> bool:
        """Whether a text is due during the run; the one at its end follows the results."""
        return bool(self.sample_tokens) and done < self.steps and _due(done, self.sample_every)

    def evaluates_at(self, done: int) -> bool:
        """Whether an evaluation is due after `done` steps; one always is after the last."""
        return done == self.steps or (done > 0 and _due(done, self.eval_every))


@dataclass
class LoggerConfig:
    """metrics.csv is always written; wandb and TensorBoard are options."""

    # Send the metrics to wandb as well.
    wandb: bool = True
    # Where wandb's metrics go.
    mode: WandbMode = WandbMode.auto
    # wandb's project. null: WANDB_PROJECT, or else tilegpt.
    project: str | None = None
    # Runs to be compared share a group; a sweep (-m) sets it to the sweep's name.
    group: str | None = None
    # wandb's tags, besides the name of the attention, which is always one.
    tags: list[str] = field(default_factory=list)
    # Write the metrics for TensorBoard as well, into the run directory.
    tensorboard: bool = False


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    # Every random stream (initial weights, data order, dropout, sampling) is derived from it by name.
    seed: int = 1337
    # The seed of the initial weights alone: other weights, the same batches. null: seed.
    init_seed: int | None = None

    def __post_init__(self) -> None:
        # Not in ScheduleConfig: Hydra takes the defaults from an instance, which does not have the user's decay yet.
        self.schedule.final_fraction = self.schedule.resolved_final_fraction
        self.schedule.decay_fraction = self.schedule.resolved_decay_fraction
        if self.trainer.batch_tokens % self.model.seq_len:
            raise ConfigError(
                f"trainer.batch_tokens={self.trainer.batch_tokens} is not a multiple of "
                f"model.seq_len={self.model.seq_len}; nearest: "
                f"{nearest_multiples(self.trainer.batch_tokens, self.model.seq_len)}."
            )

    def accumulation_steps(self, world_size: int) -> tuple[int, int]:
        """(micro-steps per optimizer step, sequences per micro-step and rank) that make up the global batch."""
        from .console import plural

        seq_len = self.model.seq_len
        sequences = self.trainer.batch_tokens // seq_len
        if sequences % world_size:
            share, least = self.parallel.context, self.trainer.micro_batch or 1
            ranks = "ranks" if share == 1 else f"groups of {share} ranks"
            able = _divisors(sequences // least if sequences % least == 0 else sequences)
            near = [n * share for n in _either_side(world_size, able)]
            raise ConfigError(
                f"trainer.batch_tokens={self.trainer.batch_tokens} is {plural(sequences, 'sequence')}, which "
                f"{world_size} {ranks} cannot share equally; nearest: "
                f"{nearest_multiples(self.trainer.batch_tokens, seq_len * world_size * least)}; a resumed run keeps "
                f"its batch, and goes on with {' or '.join(map(str, near))} rank{'s' * (near != [1])}."
            )
        per_rank = sequences // world_size
        micro_batch = self.trainer.micro_batch or per_rank
        if per_rank % micro_batch:
            near = _either_side(micro_batch, _divisors(per_rank))
            raise ConfigError(
                f"trainer.micro_batch={micro_batch} does not divide the {plural(per_rank, 'sequence')} that each "
                f"rank gets of a batch of {self.trainer.batch_tokens} tokens; nearest: {' or '.join(map(str, near))}."
            )
        return per_rank // micro_batch, micro_batch


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _either_side(value: int, able: list[int]) -> list[int]:
    """The nearest of the ascending numbers `able` below `value` and above it, if there are any."""
    return [*[n for n in able if n < value][-1:], *[n for n in able if n > value][:1]]


def _strings(given: Any) -> list[str]:
    """A string or a list, as a list of strings."""
    if isinstance(given, list | tuple):
        return [str(each) for each in given]
    return [str(given)] if given else []


def nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def from_hydra(cfg: DictConfig) -> Config:
    """The typed config of a composed Hydra config; refuses keys that no dataclass has (Hydra lets `+key=1` in)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError

    _refuse_unknown_keys(cfg, Config, "")
    try:
        return OmegaConf.to_object(cfg)
    except ConfigError:
        raise
    except InterpolationResolutionError as error:  # ${...} with an unknown setting or environment variable
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    except ValueError as error:  # from the dataclasses of other packages
        raise ConfigError(str(error)) from None


def _refuse_unknown_keys(cfg: DictConfig, schema: type, prefix: str) -> None:
    known = {f.name: f for f in fields(schema)}
    for key in cfg:
        if key not in known:
            raise ConfigError(
                f"{prefix}{key} is not a setting; {prefix.rstrip('.') or 'the config'} has: {', '.join(known)}."
            )
        if is_dataclass(known[key].default_factory):
            _refuse_unknown_keys(cfg[key], known[key].default_factory, f"{prefix}{key}.")


def to_yaml(config: Config) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def load_config(path: str | os.PathLike) -> Config:
    """The config a run wrote to its config.yaml."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        written = OmegaConf.load(path)
        if not written:  # a power cut emptied it: the run need not have used the defaults
            raise ConfigError(f"{path} is empty.")
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), written))
    except ConfigError:
        raise
    except (YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
