"""One training run: `train` is the entry point, `Trainer` builds what the plan says and runs the loop over steps."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from data.loader import Batches, EvaluationBatches, prefetch
from kernels.ring.api import passes_within

from . import checkpoint, hellaswag
from .building import build
from .config import Config, ConfigError
from .console import Progress, printable
from .cuda_graphs import add_gradients
from .distributed import World, world
from .evaluation import Evaluation, beginning, evaluate
from .failures import diverged, fault, out_of_memory
from .interrupt import Interrupt, StopRequested
from .metrics import Throughput, memory, performance, reset_peak_memory, slowest_rank
from .optimizer import update
from .parallel.config import Shard
from .parallel.context import part_of
from .parallel.shard import begin_micro_step, update_shards
from .parallel.watch import Watch, is_of_a_collective
from .plan import resolve
from .precision import forget_compiled
from .profiling import profiled
from .resume import finished
from .run_directory import Recorder, claimed, stopped
from .saver import Saver
from .schedule import learning_rate
from .seeds import stream_seed

# A rank that computes longer than this multiple of the median rank's time is reported as slow, once.
FALLS_BEHIND = 1.5
Batch = TypeVar("Batch")


def train(config: Config, run_dir: str | Path) -> dict[str, Any]:
    """Train as `config` says, leave a complete run in `run_dir`, and return what its summary.json holds.

    All ranks call it. An error that a user can fix is a ConfigError, DataError or AttentionError, of one line.
    """
    with world(config.trainer.device) as ranks:
        begun = False
        try:
            run_dir = Path(ranks.share(str(run_dir)))
            with claimed(config, run_dir, ranks):
                if summary := ranks.share(finished(config, run_dir)):
                    if ranks.is_main:
                        print(f"{run_dir} holds the finished run: nothing to do", flush=True)
                    return summary
                trainer = Trainer(config, run_dir, ranks)
                begun = True
                summary = trainer.run()
        except RuntimeError as error:
            # In Trainer.run the watch reports which rank has ended; before that, only that rank's own error does.
            if not begun and is_of_a_collective(error):
                why = "another rank has ended before the first step: its own line says why."
                raise ConfigError(why) from error
            # torch has no exception type for a CPU that is out of memory.
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise ConfigError(out_of_memory(config, ranks)) from error
        # DistributedDataParallel is part of a reference cycle. If it lives until the interpreter exits, gloo may
        # abort a finished rank with "terminate called without an active exception": 8 of 44 launches of torch alone
        # did, 0 of 40 when it was collected.
        gc.collect()
        return summary


class Trainer:
    """The objects of a run (batches, model, optimizer, saver, ...), built from its Plan, and the loop over steps."""

    def __init__(self, config: Config, run_dir: Path, ranks: World) -> None:
        # What an earlier run of a sweep compiled holds memory, and counts towards torch.compile's recompile limit.
        forget_compiled()
        reset_peak_memory(ranks.device)
        self.plan, initial = resolve(config, run_dir, ranks)
        self.config, self.run_dir, self.world = self.plan.config, run_dir, ranks
        config, corpus, computation = self.plan.config, self.plan.corpus, self.plan.computation
        seq_len, data_seed = config.model.seq_len, stream_seed(config.seed, "data")
        sequences = config.trainer.batch_tokens // seq_len
        self.batches = Batches(corpus.train, seq_len, sequences, data_seed, config.data.block_len)
        tokenizer = corpus.tokenizer(config.data.tokenizer)
        sequences = computation.micro_batch * self.plan.layout.data_size
        self.validation = EvaluationBatches(corpus.val, seq_len, sequences)
        self.beginning = None  # the part of the split that all evaluations but the last read; None: all of it
        if config.trainer.eval_tokens:
            part = beginning(corpus.val, config.trainer.eval_tokens, tokenizer)
            self.beginning = EvaluationBatches(part, seq_len, sequences)
        self.questions = hellaswag.load(config, tokenizer, ranks) if config.trainer.hellaswag else []

        self.throughput = Throughput(ranks)
        built = build(self.plan, initial, self.throughput.begins)
        self.model, self.optimizer, self.scaler = built.model, built.optimizer, built.scaler
        self.train_model, self.local_model = built.train_model, built.local_model
        self.eval_model, self.together = built.eval_model, built.together
        self.sharded = config.parallel.shard is not Shard.none
        self.saver = Saver(self.plan, built)
        self.watch = Watch(ranks, config.parallel.timeout, self._rescue)
        self.slow: set[int] = set()  # ranks already reported as slow

    # ---- the run ---------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the last step, and return the summary. After a signal to stop it saves and raises SystemExit."""
        self.recorder = Recorder(self.plan)
        self.interrupt = Interrupt(self.world)  # the ranks meet here: by now each has its watch
        self.done = self.plan.start.step
        summary: dict[str, Any] = {}
        try:
            # An event recorded while a CUDA graph is captured has no time to read, and a replay records no other.
            attends = nullcontext if self.plan.computation.graphs else self.throughput.attends
            with self.interrupt.listening(), self.watch.watching(), passes_within(attends):
                self.recorder.begin()
                steps = self.config.trainer.steps
                self.progress = Progress(self.plan.start.step, steps, shown=self.world.is_main)
                # After StopRequested `summary` is still empty, which tells the code below that the run was stopped.
                with closing(self.progress), suppress(StopRequested):
                    summary = self._summary(self._train())
                self.saver.finish()
            if summary:
                self.recorder.close(self.model, summary, self.throughput.windows)
            elif self.world.is_main:
                print(stopped(self.plan, self.done, self.throughput.windows), flush=True)
        except BaseException as error:
            summary = {}  # tells the loggers that the run failed
            if isinstance(error, Exception):  # not an interrupt or an exit
                self.recorder.alert(str(error) if isinstance(error, ConfigError) else repr(error))
            raise
        finally:
            # Last, since wandb may take long to close when it is online: the run's own files are complete by now.
            self.recorder.finish(summary)
        if not summary:
            # Wait for rank 0: if a rank exited before rank 0 has saved, torchrun would end rank 0 as well.
            self.world.share(None)
            raise SystemExit(128 + self.interrupt.signal)
        return summary

    def _train(self) -> Evaluation:
        """Run the steps that are left, and return the last evaluation. Raises StopRequested after it has saved."""
        config = self.config.trainer
        # A checkpoint is saved before its step is evaluated, so a resumed run may still have to evaluate it.
        if config.evaluates_at(self.done):
            evaluation = self._evaluation(self.done)
            self.progress.go_on()
        with closing(self.load(self.batches, self.done, config.steps)) as batches:
            for done, (inputs, targets) in enumerate(self.throughput.waiting(batches), self.done + 1):
                with self._profiled(done):
                    loss, grad_norms = self.train_step(done - 1, inputs, targets)
                    self.throughput.step()
                self.done = done
                self.watch.tick(f"at the end of step {done:,}")
                stopping = self.interrupt.requested() and done < config.steps
                # In a step that only trains, the host waits for the device nowhere else, but in Saver.keep_up.
                if config.logs_at(done) or stopping:
                    self._log(done, self._training_metrics(done, loss, grad_norms))
                self.progress.step()
                # Saved before the evaluation, so that a failure there loses no steps.
                if config.saves_at(done) or stopping:
                    self._check_update(done, inputs[:1], targets[:1])
                    self._save(done)
                if stopping:
                    raise StopRequested
                if config.evaluates_at(done):
                    evaluation = self._evaluation(done)
                if config.samples_at(done):
                    self._check_update(done, inputs[:1], targets[:1])
                    self._sample(done)
                self.progress.go_on()
        return evaluation

    @contextmanager
    def _profiled(self, done: int) -> Iterator[None]:
        """Profile step `done` if it is the one to profile, and leave it out of the measured speed."""
        if done != self.config.trainer.profile_step:
            yield
            return
        profile = profiled(done, self.run_dir, self.world.device, self.progress.say)
        with profile if self.world.is_main else nullcontext():
            yield
        self.throughput.resume()  # on every rank: the others have waited for this one

    def _log(self, done: int, metrics: dict[str, float]) -> None:
        self.recorder.log(done, metrics)
        self.progress.report(done, metrics["train/loss"], metrics.get("perf/tokens_per_second"))
        rank, ratio = metrics.get("perf/slowest_rank"), metrics.get("perf/slowest_rank_ratio", 1.0)
        if ratio > FALLS_BEHIND and rank not in self.slow:
            self.slow.add(rank)
            self.progress.say(
                f"rank {rank} computes {ratio:.1f} times as long as the median rank, at step {done}: all wait for it"
            )

    def _evaluation(self, done: int) -> Evaluation:
        """Evaluate after `done` steps, log it, and keep the checkpoint if it is the best."""
        config = self.config.trainer
        try:
            evaluation = self._evaluate(done)
            self.scores = self._scores(done)
        except StopRequested:
            if config.steps and not self.saver.has(done):
                self._save(done)
            raise
        self.recorder.log(done, evaluation.metrics() | self.scores)
        scores = "".join(f", {name.removeprefix('val/')} {score:.4f}" for name, score in self.scores.items())
        self.progress.say(f"step {done:,}: validation {evaluation}{scores}")
        if config.keep_best and done:
            if self.beginning and done == config.steps:  # the best is chosen by losses over the same tokens
                self._keep_if_best(done, self._evaluate_on(self.beginning, done))
            else:
                self._keep_if_best(done, evaluation)
        return evaluation

    def _scores(self, done: int) -> dict[str, float]:
        """Validation metrics besides the loss: HellaSwag's accuracy, with trainer.hellaswag."""
        if not self.questions:
            return {}
        batches = hellaswag.batches(self.questions, self.plan.computation.micro_batch, self.world)
        batches = self._until_stopped(batches, done)
        score = hellaswag.accuracy(self.model, batches, self.world, self.plan.autocast)
        self.throughput.resume()
        return {"val/hellaswag": score}

    def _sample(self, done: int) -> None:
        if self.world.is_main:
            text = printable(self.recorder.sample(done, self.model))
            self.model.train()
            self.progress.say(f"step {done:,}: sample\n{text}")
        self.throughput.resume()

    # ---- a step ----------------------------------------------------------------------------------

    def train_step(
        self, step: int, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Optimizer step `step`, from 0, on this rank's part of the batch as `load` yields it: int64, on the device.

        Returns this rank's mean loss and the gradient norm of each parameter, both still on the device.
        """
        computation = self.plan.computation
        rate = learning_rate(self.config.schedule, self.config.optimizer.lr, step, self.config.trainer.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        size = computation.micro_batch
        micro_batches = zip(inputs.split(size), targets.split(size), strict=True)
        total = torch.zeros((), device=self.world.device)
        for micro, (x, y) in enumerate(micro_batches):
            if computation.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            self.watch.tick(f"in the forward of step {step + 1:,}")
            model = self._micro_step(last=micro == computation.accumulation - 1)
            with self.plan.autocast():
                loss = model(x, y, dropout_seed=self._dropout_seed(step, micro))
            self.saver.keep_up()
            self.watch.tick(f"in the backward of step {step + 1:,}")
            share = self.scaler.scale(loss / computation.accumulation)
            if model is self.local_model and self.together:
                add_gradients(share, self.model, computation.graphs)
            else:
                share.backward()
            total += loss.detach() / computation.accumulation
        self.throughput.begins("optimizer")
        limit = self.config.trainer.grad_clip or math.inf
        if self.sharded:
            return total, update_shards(self.model, self.optimizer, limit)
        with self.saver.update():
            norms = update(self.model, self.optimizer, self.scaler, limit, keep_gradients=computation.graphs)
        return total, norms

    def _micro_step(self, last: bool) -> Callable[..., torch.Tensor]:
        """The callable for a micro-step. Only a step's last exchanges gradients; with shard=full, each."""
        if self.sharded:
            self.throughput.begins("exchange")  # until the first block begins
            begin_micro_step(self.model, self.config.parallel.shard, last)
        return self.train_model if last else self.local_model

    def load(self, batches: Batches | EvaluationBatches, start: int, stop: int) -> Iterator[tuple]:
        """Yield this rank's part of batches [start, stop), read ahead by a thread and copied without waiting.

        Pairs (inputs, targets). Where ranks share each sequence, each gets whole inputs and the targets of its part.
        """
        on_gpu = self.world.device.type == "cuda"
        layout, part = self.plan.layout, part_of(self.plan.layout)
        ranks = {"rank": layout.data_rank, "world_size": layout.data_size}
        with closing(prefetch(batches, start, stop, pin_memory=on_gpu, **ranks)) as loaded:
            for pair in loaded:
                inputs, targets = (tensor.to(self.world.device, non_blocking=True) for tensor in pair)
                yield inputs, part.of(targets, 1) if part else targets

    def _dropout_seed(self, step: int, micro: int) -> torch.Tensor | None:
        """The micro-step's dropout seed, also given to torch's generator; by step: a resumed run draws the same."""
        if not self.config.model.dropout:
            return None
        seed = stream_seed(self.config.seed, "dropout", step, micro, self.world.rank)
        torch.manual_seed(seed)
        # Filled on the device: torch.tensor would copy, and wait for all queued work.
        return torch.full((), seed, dtype=torch.int64, device=self.world.device)

    # ---- what it measures ------------------------------------------------------------------------

    def _training_metrics(self, done: int, loss: torch.Tensor, grad_norms: torch.Tensor) -> dict[str, float]:
        # All ranks have the same gradients and the same mean loss, so all give up or none does.
        mean = self.world.sum(loss.clone()).item() / self.world.size
        norm = grad_norms.norm().item()
        if why := fault(mean, norm, grad_norms, self.model, self.scaler):
            self._give_up(why, done, broken=done - 1)  # the loss is from before the update
        return {
            "train/loss": mean,
            "train/learning_rate": self.optimizer.param_groups[0]["lr"],
            "train/grad_norm": norm,
            **self._speed(self.throughput.mark()),
            **memory(self.world.device),
        }

    @torch.no_grad()
    def _check_update(self, done: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Give up if the last update broke the model, which its step's loss, from before the update, does not show.

        One sequence, through the uncompiled model: compiling an evaluation may take longer than a signal leaves.
        """
        self.model.eval()
        with self.plan.autocast():
            loss = self.world.sum(self.model(inputs, targets).float()).item()
        self.model.train()
        if not math.isfinite(loss):
            self._give_up(f"the update broke the model (its loss is {loss})", done, broken=done)

    def _give_up(self, why: str, done: int, broken: int) -> NoReturn:
        """Raise ConfigError: the run diverged by step `done`. broken: checkpoints from there on are not offered."""
        computation, config = self.plan.computation, self.config
        # A ring has no precise_delta.
        curable = computation.attention == "flash" and config.parallel.context == 1
        rounded = curable and not computation.precise_delta
        raise ConfigError(diverged(why, done, broken, self.run_dir, computation.dtype, rounded))

    def _speed(self, seconds: dict[str, float] | None) -> dict[str, float]:
        flops = self.model.flops_per_token(self.config.model.seq_len)
        speed = performance(seconds, self.config.trainer.batch_tokens, flops, self.world)
        return speed | slowest_rank(seconds, self.world)

    def _evaluate(self, done: int) -> Evaluation:
        """Evaluate the whole validation split, or before the last step as much as trainer.eval_tokens says."""
        whole = self.beginning is None or done == self.config.trainer.steps
        return self._evaluate_on(self.validation if whole else self.beginning, done)

    def _evaluate_on(self, validation: EvaluationBatches, done: int) -> Evaluation:
        text_bytes = validation.split.utf8_bytes
        with closing(self.load(validation, 0, len(validation))) as loaded:
            batches = self.progress.evaluating(loaded, len(validation))
            batches = self._until_stopped(batches, done)
            evaluation = evaluate(self.eval_model, batches, text_bytes, self.world, self.plan.autocast)
        if not math.isfinite(evaluation.loss):
            self._give_up(f"the validation loss is {evaluation.loss}", done, broken=done)
        self.throughput.resume()
        return evaluation

    def _until_stopped(self, batches: Iterable[Batch], done: int) -> Iterator[Batch]:
        """Pass on the batches of an evaluation, which can take minutes. Raises StopRequested between two."""
        for batch in batches:
            self.watch.tick(f"in the evaluation of step {done:,}")
            if self.interrupt.requested():
                raise StopRequested
            yield batch

    def _summary(self, evaluation: Evaluation) -> dict[str, Any]:
        config = self.config.trainer
        return {
            **self.plan.facts(),
            "steps": config.steps,
            "tokens": config.steps * config.batch_tokens,
            "seconds": self.recorder.seconds(),
            **evaluation.metrics(),
            **self.scores,
            "val/tokens": evaluation.tokens,
            "val/text_bytes": evaluation.text_bytes,
            **self._speed(self.throughput.mean),
            **memory(self.world.device),
        }

    def _save(self, done: int) -> None:
        with self.watch.busy(f"saving step {done:,}"):
            self.saver.save(done, self.recorder.seconds())
        self.throughput.resume()

    def _keep_if_best(self, done: int, evaluation: Evaluation) -> None:
        if self.saver.is_best(evaluation.loss):
            if not self.saver.has(done):
                self._save(done)
            self.saver.keep_best(done, evaluation.loss, evaluation.tokens)
        self.throughput.resume()

    def _rescue(self, why: str) -> str:
        """Called in the watch's thread when another rank is lost: save the model if this rank has all of it."""
        saved = checkpoint.saved(self.run_dir)
        said = f"the newest checkpoint is {saved[-1]}" if saved else "no checkpoint was saved before"
        try:
            if done := self.saver.rescue(self.recorder.seconds()):
                said = stopped(self.plan, done)
        finally:
            self.recorder.alert(why)
            self.recorder.finish({})
        return said
