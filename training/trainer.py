"""One training run, top to bottom: build, loop, evaluate, save, report."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from data.loader import Batches, EvaluationBatches, prefetch
from data.tokenizer import findable, load_tokenizer
from kernels import attention_tier, bind, resolve_attention
from model.gpt import GPT

from . import checkpoint
from .config import Config, ConfigError, ModelConfig
from .console import Progress
from .corpus import prepare_corpus
from .cuda_graphs import compiled_to_graphs, resolve_graphs
from .distributed import World, world
from .evaluation import Evaluation, evaluate
from .init_from import initial_weights
from .interrupt import Interrupt, StopRequested
from .layers import BLOCKS, LOSSES, resolve_layers
from .metrics import Throughput, memory, performance, reset_peak_memory
from .optimizer import build_optimizer, update
from .precision import compiled, resolve_precision
from .profiling import profiled
from .report import dtype_name
from .restore import AUTO, FROM_THE_START, finished, identity, resume, resume_path
from .run_directory import begin_run, claimed, close_run, open_run, stopped
from .schedule import learning_rate
from .seeds import stream_seed


def train(config: Config, run_dir: str | Path) -> dict[str, Any]:
    """Train as `config` says, leave a complete run in `run_dir`, and return what its summary.json holds.

    Raises ConfigError, data.DataError or kernels.AttentionError, each one line, for errors that a user can fix.
    """
    with world(config.trainer.device) as ranks:
        try:
            run_dir = Path(ranks.share(str(run_dir)))
            with claimed(config, run_dir, ranks):
                if summary := ranks.share(finished(config, run_dir)):
                    if ranks.is_main:
                        print(f"{run_dir} holds the finished run: nothing to do", flush=True)
                    return summary
                summary = Trainer(config, run_dir, ranks).run()
        except RuntimeError as error:
            # torch has no exception type for a CPU that is out of memory.
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise ConfigError(_out_of_memory(config, ranks)) from error
        # DistributedDataParallel is part of a reference cycle. If it lives until the interpreter exits, gloo may
        # abort a finished rank with "terminate called without an active exception": 8 of 44 launches of torch alone
        # did, 0 of 40 when it was collected.
        gc.collect()
        return summary


class Trainer:
    def __init__(self, config: Config, run_dir: Path, ranks: World) -> None:
        self.run_dir, self.world = run_dir, ranks
        reset_peak_memory(ranks.device)
        self.accumulation, self.micro_batch = config.accumulation_steps(ranks.size)
        self.dtype = resolve_precision(config.trainer.precision, ranks.device)
        # First the checks that take no time, then what takes time.
        request = {
            "device": ranks.device,
            "dtype": self.dtype,
            "head_dim": config.model.head_dim,
            "tier": config.attention.tier,
            "dropout_p": config.model.dropout,
            "cu_seqlens": config.data.document_mask or None,
            "precise_delta": config.attention.precise_delta,
        }
        self.attention_name, attention = resolve_attention(config.attention.name, **request)
        self.attention_tier = attention_tier(self.attention_name, **request, length=config.model.seq_len)
        if config.attention.precise_delta:
            attention = bind(attention, precise_delta=True)
        self.loss = resolve_layers(config.model.loss, "model.loss", ranks.device)
        self.block = resolve_layers(config.model.block, "model.block", ranks.device)
        wanted = config.trainer.compile
        self.compiled = ranks.device.type == "cuda" if wanted is None else wanted
        self.graphs = resolve_graphs(config.trainer.cuda_graphs, self.compiled, ranks)
        self.resume_from = ranks.share(resume_path(config, run_dir))
        initial = None
        if self.resume_from and config.trainer.resume == AUTO:  # which began with init_from's weights
            config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, init_from=None))
        if config.trainer.init_from:
            initial = initial_weights(config)
        if self.resume_from:
            checkpoint.find(self.resume_from)
        model_config = _with_vocabulary(config)
        self.corpus = prepare_corpus(config.data, quiet=not ranks.is_main)
        self.config = config = dataclasses.replace(
            config,
            model=model_config,
            # An absolute path: sampling may run in another folder.
            data=dataclasses.replace(config.data, tokenizer=findable(config.data.tokenizer)),
            # The checkpoint itself: the newest of its run may change.
            trainer=dataclasses.replace(config.trainer, init_from=initial and initial.source),
        )
        sequences = config.trainer.batch_tokens // model_config.seq_len
        data_seed = stream_seed(config.seed, "data")
        self.batches = Batches(
            self.corpus.train, model_config.seq_len, sequences, data_seed, config.data.block_len
        )
        self.validation = EvaluationBatches(
            self.corpus.val, model_config.seq_len, self.micro_batch * ranks.size
        )

        # Drawn on the CPU from its own stream: the same weights on any device, with any attention.
        init_seed = config.seed if config.init_seed is None else config.init_seed
        generator = torch.Generator().manual_seed(stream_seed(init_seed, "init"))
        self.model = GPT(
            model_config, attention, loss=LOSSES[self.loss], fused=BLOCKS[self.block], generator=generator
        ).to(ranks.device)
        self.positions = initial.positions if initial else ""
        if initial:
            self.model.load_state_dict(initial.state)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=self.dtype is torch.float16)
        self.resumed = resume(self, self.resume_from) if self.resume_from else FROM_THE_START
        self.start = self.resumed.step

        # What trains and what evaluates: the same weights. DDP goes inside torch.compile, which then splits the graph
        # at DDP's buckets; around it, gradients would be exchanged only when the whole backward is done.
        self.train_model: torch.nn.Module = self.model
        self.eval_model: torch.nn.Module = self.model
        if ranks.size > 1:
            self.train_model = DistributedDataParallel(self.model)
        if self.compiled:
            torch.compiler.reset()  # what an earlier run of a sweep compiled would count against this one
            make = compiled_to_graphs if self.graphs else compiled
            self.eval_model = compiled(self.eval_model, self.dtype)
            self.train_model = make(self.train_model, self.dtype)
        self.throughput = Throughput(ranks)

    # ---- the run ---------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the last step, evaluate, report. A signal ends it sooner: saved, and with SystemExit."""
        config = self.config.trainer
        opened = open_run(self)
        loggers = [opened.wandb] if opened and opened.wandb else []
        if opened:
            self.resumed = self.resumed._replace(seconds=max(self.resumed.seconds, opened.kept.seconds))
        progress = Progress(self.start, config.steps, shown=self.world.is_main)
        self.interrupt = Interrupt(self.world)
        self.began = time.perf_counter() - self.resumed.seconds
        done, summary = self.start, {}

        def log(metrics: dict[str, float]) -> None:
            row = {"step": done, "tokens": done * config.batch_tokens, "seconds": self._seconds(), **metrics}
            for logger in loggers:
                logger.log(row)

        def evaluated() -> Evaluation:
            try:
                evaluation = self._evaluate(done)
            except StopRequested:
                if config.steps and not checkpoint.at(self.run_dir, done).exists():
                    self._save(done)
                raise
            log(evaluation.metrics())
            progress.say(f"step {done:,}: validation {evaluation}")
            if config.keep_best and done:
                self._keep_if_best(done, evaluation.loss)
            return evaluation

        try:
            with (
                suppress(StopRequested),  # the run then ends below, as a finished one does
                closing(progress),
                self.interrupt.listening(),
                closing(self._load(self.batches, self.start, config.steps)) as batches,
            ):
                if opened:
                    loggers.insert(0, begin_run(self, opened))  # first: a row is on disk before wandb gets it
                # A checkpoint is saved before its step is evaluated, so a resumed run may still have to evaluate it.
                if self.evaluates_at(done):
                    evaluation = evaluated()
                for done, (inputs, targets) in enumerate(self.throughput.waiting(batches), self.start + 1):
                    with self._profiled(done, progress):
                        loss, grad_norms = self.train_step(done - 1, inputs, targets)
                        self.throughput.step()
                    progress.step()
                    saving = _due(done, config.save_every) or done == config.steps
                    # The metrics of a step are checked before it is saved, so that no broken model is kept.
                    logging = saving or _due(done, config.log_every) or done == 1
                    stopping = self.interrupt.requested() and done < config.steps
                    # Only here does the host wait for the device.
                    if logging or stopping:
                        metrics = self._training_metrics(done, loss, grad_norms)
                        log(metrics)
                        progress.report(metrics["train/loss"], metrics.get("perf/tokens_per_second"))
                    # Saved before the evaluation, so that nothing an evaluation breaks is lost.
                    if saving or stopping:
                        self._check_update(done, inputs[:1], targets[:1])
                        self._save(done)
                    if stopping:
                        raise StopRequested
                    if self.evaluates_at(done):
                        evaluation = evaluated()
                summary = self._summary(evaluation)
            if self.world.is_main and summary:
                close_run(self, summary)
            elif self.world.is_main:
                print(stopped(self, done), flush=True)
        except BaseException:
            summary = {}  # tells the loggers that the run failed
            raise
        finally:
            # Last: online, wandb may take long to close, and the run's own files are whole by then.
            for logger in loggers:
                logger.finish(summary)
        if not summary:
            # If a rank exited before rank 0 has saved, torchrun would end rank 0 as well.
            self.world.share(None)
            raise SystemExit(128 + self.interrupt.signal)
        return summary

    @contextmanager
    def _profiled(self, done: int, progress: Progress) -> Iterator[None]:
        """Profile step `done` if it is the one to profile, and leave it out of the measured speed."""
        if done != self.config.trainer.profile_step:
            yield
            return
        path = self.run_dir / f"trace-step-{done:08}.json.gz"
        profile = profiled(f"step {done:,}", path, self.world.device, progress.say)
        with profile if self.world.is_main else nullcontext():
            yield
        self.throughput.resume()  # on every rank: the others have waited for this one

    def evaluates_at(self, done: int) -> bool:
        """Whether an evaluation is due after `done` steps; one always is after the last."""
        config = self.config.trainer
        return done == config.steps or (done > 0 and _due(done, config.eval_every))

    def _seconds(self) -> float:
        """How long the run has taken so far, with its time before it was resumed."""
        return time.perf_counter() - self.began

    def train_step(
        self, step: int, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step on this rank's part of the batch, int64 (sequences, seq_len) on the device.

        Returns this rank's mean loss and the gradient norm of each parameter, both still on the device.
        """
        rate = learning_rate(self.config.schedule, self.config.optimizer.lr, step, self.config.trainer.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        micro_batches = zip(inputs.split(self.micro_batch), targets.split(self.micro_batch), strict=True)
        total = torch.zeros((), device=self.world.device)
        for micro, (x, y) in enumerate(micro_batches):
            # Ranks exchange gradients once a step, with the last micro-batch.
            exchange = self.world.size == 1 or micro == self.accumulation - 1
            if self.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            with nullcontext() if exchange else self.train_model.no_sync():
                with self.autocast():
                    loss = self.train_model(x, y, dropout_seed=self._dropout_seed(step, micro))
                self.scaler.scale(loss / self.accumulation).backward()
            total += loss.detach() / self.accumulation
        self.throughput.optimizer_begins()
        limit = self.config.trainer.grad_clip or math.inf
        return total, update(self.model, self.optimizer, self.scaler, limit, keep_gradients=self.graphs)

    def _load(self, batches: Batches | EvaluationBatches, start: int, stop: int) -> Iterator[tuple]:
        """This rank's part of batches `start` to `stop`, read ahead by a thread and copied without waiting."""
        on_gpu = self.world.device.type == "cuda"
        ranks = {"rank": self.world.rank, "world_size": self.world.size}
        with closing(prefetch(batches, start, stop, pin_memory=on_gpu, **ranks)) as loaded:
            for pair in loaded:
                yield tuple(tensor.to(self.world.device, non_blocking=True) for tensor in pair)

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    def _dropout_seed(self, step: int, micro: int) -> torch.Tensor | None:
        """Seed dropout for this micro-step from its number, so that a resumed run draws the same masks."""
        if not self.config.model.dropout:
            return None
        seed = stream_seed(self.config.seed, "dropout", step, micro, self.world.rank)
        torch.manual_seed(seed)
        # Filled on the device: torch.tensor would copy, and wait for all queued work.
        return torch.full((), seed, dtype=torch.int64, device=self.world.device)

    # ---- what it measures ------------------------------------------------------------------------

    def _training_metrics(self, done: int, loss: torch.Tensor, grad_norms: torch.Tensor) -> dict[str, float]:
        mean = self.world.sum(loss.clone()).item() / self.world.size
        # All ranks have the same gradients and the same mean loss, so they all decide alike.
        norm = grad_norms.norm().item()
        if not math.isfinite(mean):
            self._give_up(f"the loss is {mean}", done)
        # The loss is from before the update. In fp16 an infinite gradient skips the step and halves the scale, which
        # is how the scale is found; a scale below 1 means that none will be found.
        if not (math.isfinite(norm) or self.scaler.is_enabled()):
            finite = grad_norms.isfinite().tolist()
            names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
            broken = [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
            # The backward begins at the end of the model, so the last of these is nearest to the cause.
            whose = (
                f" (not finite in {len(broken)} of {len(names)} parameters, the last of them {broken[-1]})"
                if broken
                else ""
            )
            self._give_up(f"the gradient norm is {norm}{whose}", done)
        if self.scaler.get_scale() < 1:
            self._give_up(
                "fp16 gradients overflow at every gradient scale down to 1, so step after step is skipped; gave up",
                done,
            )
        return {
            "train/loss": mean,
            "train/learning_rate": self.optimizer.param_groups[0]["lr"],
            "train/grad_norm": norm,
            **self._speed(self.throughput.mark()),
            **memory(self.world.device),
        }

    @torch.no_grad()
    def _check_update(self, done: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Give up if the update just made broke the model: its step's loss is from before it.

        By one sequence, not compiled: compiling what evaluates may take longer than a signal leaves.
        """
        self.model.eval()
        with self.autocast():
            loss = self.world.sum(self.model(inputs, targets).float()).item()
        self.model.train()
        if not math.isfinite(loss):
            self._give_up(f"the update broke the model (its loss is {loss})", done, broken=done)

    def _give_up(self, why: str, done: int, broken: int | None = None) -> NoReturn:
        """End the run at step `done`. broken: the step whose weights failed; None: the one before, as for a loss."""
        broken = done - 1 if broken is None else broken
        kept = [path for path in checkpoint.saved(self.run_dir) if path < checkpoint.at(self.run_dir, broken)]
        left = (
            f"the newest checkpoint from before is {kept[-1]}" if kept else "no checkpoint was saved before"
        )
        wider = "" if self.dtype is torch.float32 else ", or try trainer.precision=fp32"
        raise ConfigError(
            f"{why} at step {done}: lower optimizer.lr or raise schedule.warmup_fraction{wider}; {left}."
        )

    def _speed(self, seconds: dict[str, float] | None) -> dict[str, float]:
        flops = self.model.flops_per_token(self.config.model.seq_len)
        return performance(seconds, self.config.trainer.batch_tokens, flops, self.world)

    def _evaluate(self, done: int) -> Evaluation:
        """Evaluate the whole validation split. Raises StopRequested between batches: it can take minutes."""

        def until_stopped(batches: Iterator[tuple]) -> Iterator[tuple]:
            for batch in batches:
                if self.interrupt.requested():
                    raise StopRequested
                yield batch

        with closing(self._load(self.validation, 0, len(self.validation))) as batches:
            evaluation = evaluate(
                self.eval_model, until_stopped(batches), self.corpus.val.utf8_bytes, self.world, self.autocast
            )
        if not math.isfinite(evaluation.loss):
            self._give_up(f"the validation loss is {evaluation.loss}", done, broken=done)
        self.throughput.resume()
        return evaluation

    def facts(self) -> dict[str, Any]:
        """What was resolved from the config."""
        return {
            "attention": self.attention_name,
            "attention_tier": self.attention_tier,
            "loss": self.loss.value,
            "block": self.block.value,
            "dtype": dtype_name(self.dtype),
            "compiled": self.compiled,
            "cuda_graphs": self.graphs,
            "parameters": self.model.num_parameters(),
            "flops_per_token": self.model.flops_per_token(self.config.model.seq_len),
            "world_size": self.world.size,
            "corpus": self.corpus.directory.name,
        }

    def _summary(self, evaluation: Evaluation) -> dict[str, Any]:
        config = self.config.trainer
        return {
            **self.facts(),
            "resumed": self.resumed.history,
            "steps": config.steps,
            "tokens": config.steps * config.batch_tokens,
            "seconds": self._seconds(),
            **evaluation.metrics(),
            "val/tokens": evaluation.tokens,
            "val/text_bytes": evaluation.text_bytes,
            **self._speed(self.throughput.mean),
            **memory(self.world.device),
        }

    def _save(self, done: int) -> None:
        if self.world.is_main:
            state = {
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "seconds": self._seconds(),
                "identity": identity(self),
                "init_from": self.config.trainer.init_from,
            }
            checkpoint.save(
                self.run_dir, done, self.model.state_dict(), state, self.config.trainer.keep_checkpoints
            )
        self.throughput.resume()

    def _keep_if_best(self, done: int, loss: float) -> None:
        if self.world.is_main:
            best = checkpoint.best(self.run_dir)
            if best is None or loss < best[1]:
                if not checkpoint.at(self.run_dir, done).exists():
                    self._save(done)
                checkpoint.keep_best(self.run_dir, done, loss, self.config.trainer.keep_checkpoints)
        self.throughput.resume()


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _out_of_memory(config: Config, ranks: World) -> str:
    _, micro_batch = config.accumulation_steps(ranks.size)
    full = f"{ranks.device} is out of memory with trainer.micro_batch={micro_batch}"
    if micro_batch == 1:
        return f"{full}: one sequence at a time is too much; lower model.seq_len or choose a smaller model."
    half = max(n for n in range(1, micro_batch // 2 + 1) if micro_batch % n == 0)
    return (
        f"{full}: use trainer.micro_batch={half}; gradients accumulate, so the global batch stays "
        f"trainer.batch_tokens={config.trainer.batch_tokens}."
    )


def _with_vocabulary(config: Config) -> ModelConfig:
    """The model's config with what the tokenizer decides."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    if config.model.vocab_size not in (None, tokenizer.n_vocab):
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}, but the tokenizer {config.data.tokenizer} has "
            f"{tokenizer.n_vocab} tokens; leave model.vocab_size out."
        )
    if config.model.document_end is not None:
        raise ConfigError(
            "model.document_end is set from the tokenizer; to keep attention within documents, use "
            "data.document_mask=true."
        )
    document_end = tokenizer.eot_token if config.data.document_mask else None
    return dataclasses.replace(config.model, vocab_size=tokenizer.n_vocab, document_end=document_end)
