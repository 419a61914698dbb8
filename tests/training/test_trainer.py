"""What a run does when something goes wrong, and that it resumes as if nothing had. About 15 s."""

import base64
import gzip
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data import DataError
from data.tokenizer import load_tokenizer
from kernels import AttentionError
from reproduce.comparison import compare
from tests.conftest import measured, rows, text_data
from training import checkpoint, evaluation
from training.config import (
    AttentionConfig,
    Config,
    ConfigError,
    LoggerConfig,
    ModelConfig,
    OptimizerConfig,
    Precision,
    TrainerConfig,
)
from training.distributed import World
from training.loggers import CsvLogger
from training.restore import load_run
from training.trainer import Trainer, train

CPU = World(torch.device("cpu"))


@pytest.fixture
def config(text_file) -> Config:
    return Config(
        model=ModelConfig(seq_len=32, n_layer=1, n_head=2, n_embd=32),
        data=text_data(text_file),
        trainer=TrainerConfig(
            steps=8, batch_tokens=64, log_every=1, eval_every=2, device="cpu", sample_tokens=5
        ),
        logger=LoggerConfig(wandb=False),
    )


def having(config: Config, **settings) -> Config:
    return replace(config, trainer=replace(config.trainer, **settings))


def steps_saved(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint.saved(run)]


class Killed(BaseException):
    """Stands for a SIGKILL: the run does nothing after it."""


def killed(*_args, **_options):
    raise Killed


# ---- divergence ----------------------------------------------------------------------------------


def poisoned(config: Config, folder: Path, value: float, at: int) -> Trainer:
    """A trainer whose gradients are `value` from step `at` on."""
    run = Trainer(config, folder, CPU)
    whole_step, done = run.train_step, 0

    def train_step(step, inputs, targets):
        nonlocal done
        done = step + 1
        return whole_step(step, inputs, targets)

    run.train_step = train_step
    run.model.wte.weight.register_hook(lambda gradient: gradient * value if done >= at else gradient)
    return run


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_gradient_ends_the_run_and_no_bad_weights_are_saved(config, tmp_path, precision, value):
    sparse = having(config, precision=precision, log_every=100, save_every=2, keep_checkpoints=1)
    with pytest.raises(
        ConfigError, match=r"norm is (nan|inf) \(.*1 of 16.* wte.weight\) at step 4: .*step-00000002"
    ):
        poisoned(sparse, tmp_path, value, at=4).run()
    assert steps_saved(tmp_path) == [2]
    assert all(w.isfinite().all() for w in checkpoint.load_weights(checkpoint.find(tmp_path), "cpu").values())


def test_a_step_skipped_for_fp16_overflow_does_not_end_the_run(config, tmp_path):
    run = poisoned(having(config, precision=Precision.fp16), tmp_path, math.inf, at=6)
    assert math.isfinite(run.run()["val/loss"])
    assert not math.isfinite(float(measured(tmp_path, "train/grad_norm")[6]))


def test_fp16_overflow_at_every_gradient_scale_ends_the_run(config, tmp_path):
    run = poisoned(having(config, precision=Precision.fp16, steps=40), tmp_path, math.inf, at=1)
    with pytest.raises(ConfigError, match=r"at every gradient scale.*at step 17.*no checkpoint was saved"):
        run.run()


def test_an_attention_tier_without_a_usable_backend_is_refused(config, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    wanted = replace(config, attention=AttentionConfig(tier="hopper"))
    with pytest.raises(
        AttentionError,
        match=r"tier=\w+ applies to flash only.* needs a CUDA device, .*; leave attention\.tier out",
    ):
        Trainer(wanted, tmp_path, CPU)


def test_a_nan_validation_loss_ends_the_run(config, tmp_path):
    assert math.isnan(evaluation.Evaluation(math.nan, 1, 1).perplexity)
    run = Trainer(config, tmp_path, CPU)
    run.model.register_forward_hook(lambda model, _, loss: loss if model.training else loss * math.nan)
    with pytest.raises(ConfigError, match="validation loss is nan at step 2"):
        run.run()
    assert not (tmp_path / "summary.json").exists()


# ---- resuming ------------------------------------------------------------------------------------


def test_resuming_from_an_older_checkpoint_drops_everything_after_it(config, tmp_path):
    """The summary is dropped as well: it belongs to the abandoned branch."""
    train(having(config, save_every=2, keep_checkpoints=9), tmp_path)
    start = tmp_path / "checkpoints" / "step-00000004"
    saved = checkpoint.load_training(start, "cpu")["seconds"]
    run = Trainer(having(config, save_every=2, resume=str(start)), tmp_path, CPU)
    run.train_step = killed
    with pytest.raises(Killed):
        run.run()
    assert steps_saved(tmp_path) == [2, 4]
    assert not (tmp_path / "summary.json").exists()
    assert sorted(measured(tmp_path, "train/loss")) == [1, 2, 3, 4]  # kept, though the run has logged nothing
    assert checkpoint.find(tmp_path) == start
    # The time continues from the checkpoint's as well.
    summary = train(having(config, save_every=2, resume=str(tmp_path)), tmp_path)
    assert steps_saved(tmp_path) == [6, 8]
    column = [float(row["seconds"]) for row in rows(tmp_path)]
    assert column == sorted(column)
    assert summary["seconds"] >= column[-1] * 0.999 > saved > column[0]


@pytest.mark.parametrize("at", [4, 8])
def test_resuming_a_run_killed_in_an_evaluation_gives_the_same_results(config, tmp_path, monkeypatch, at):
    config = having(config, save_every=4)
    whole = train(config, tmp_path / "whole")
    evaluate = Trainer._evaluate
    monkeypatch.setattr(
        Trainer, "_evaluate", lambda run, done: killed() if done == at else evaluate(run, done)
    )
    with pytest.raises(Killed):
        train(config, tmp_path / "cut")
    monkeypatch.undo()
    resumed = train(having(config, resume=str(tmp_path / "cut")), tmp_path / "cut")
    for column in ("train/loss", "val/loss"):
        assert measured(tmp_path / "cut", column) == measured(tmp_path / "whole", column)
    assert resumed["val/loss"] == whole["val/loss"]
    sample = (tmp_path / "whole" / "sample.txt").read_text()
    assert (tmp_path / "cut" / "sample.txt").read_text() == sample
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["steps"] == 8


def test_extending_a_finished_run_keeps_its_final_evaluation(config, tmp_path):
    """With eval_every=5 none is due at step 8, so the resumed run does not repeat it."""
    config = having(config, eval_every=5)
    train(config, tmp_path)
    before = measured(tmp_path, "val/loss")
    train(having(config, steps=12, resume=str(tmp_path)), tmp_path)
    after = measured(tmp_path, "val/loss")
    assert (sorted(before), sorted(after)) == ([5, 8], [5, 8, 10, 12])
    assert after.items() >= before.items()


def test_resuming_drops_a_truncated_last_row_of_the_metrics(config, tmp_path):
    train(config, tmp_path)
    before = rows(tmp_path)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("1")  # the beginning of step 10's row
    train(having(config, steps=9, resume=str(tmp_path)), tmp_path)
    assert rows(tmp_path)[: len(before) - 1] == before[:-1]
    assert [int(row["step"]) for row in rows(tmp_path)] == sorted(int(row["step"]) for row in rows(tmp_path))


def test_resuming_reports_changed_settings_and_refuses_conflicting_ones(config, tmp_path, capsys):
    train(config, tmp_path / "a")
    goes_on = having(config, steps=9, save_every=3, resume=str(tmp_path / "a"))
    train(replace(goes_on, optimizer=OptimizerConfig(lr=1e-4)), tmp_path / "b")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  changed "))
    assert line.split("  ")[-1].strip() == "optimizer.lr 0.0006 -> 0.0001, trainer.steps 8 -> 9"
    wider = replace(goes_on, seed=1, model=replace(config.model, n_embd=64))
    said = r"with model.n_embd=32, seed=1337, but this run has model.n_embd=64, seed=1; .*a/environment.json"
    with pytest.raises(ConfigError, match=said):
        train(wider, tmp_path / "c")
    with pytest.raises(
        ConfigError, match=r"at step 8, beyond trainer.steps=7; to evaluate it, use trainer.init_from="
    ):
        train(having(goes_on, steps=7), tmp_path / "c")


def test_load_run_finds_the_runs_tokenizer_and_refuses_a_changed_one(config, tmp_path, monkeypatch):
    ranks = [bytes([value]) for value in range(256)]
    write = lambda ranks: Path("own.tiktoken").write_bytes(  # noqa: E731
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks))
    )
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write([*ranks, b"th", b"he"])
    data = replace(config.data, tokenizer="own.tiktoken", cache_dir="cache")
    train(having(replace(config, data=data), steps=1), Path("run"))
    monkeypatch.chdir(tmp_path)
    _, tokenizer = load_run(Path("here/run"))
    assert tokenizer.encode_ordinary("the") == [256, 101]
    monkeypatch.chdir(tmp_path / "here")
    write([*ranks, b"he", b"th"])
    load_tokenizer.cache_clear()
    with pytest.raises(ConfigError, match=r"a tokenizer other than the present .*own\.tiktoken:"):
        load_run(Path("run"))
    write([*ranks, b"th", b"he"])
    Path("own.tiktoken").rename("moved.tiktoken")
    load_tokenizer.cache_clear()
    with pytest.raises(DataError, match=r"here/own\.tiktoken \(No such file.*--tokenizer PATH"):
        load_run(Path("run"))
    assert load_run(Path("run"), tokenizer_name="moved.tiktoken")[1].encode_ordinary("the") == [256, 101]


# ---- the best checkpoint -------------------------------------------------------------------------


def test_the_best_checkpoint_is_kept_when_a_run_is_killed_or_resumed(config, tmp_path, monkeypatch, capsys):
    """It is the best of the evaluations before the kill, those repeated after it, and the one at the end."""
    losses = {2: 3.0, 4: 2.5, 6: 2.7, 8: 2.6, 10: 2.4, 12: 2.5, 14: 2.3}
    evaluate = Trainer._evaluate
    monkeypatch.setattr(
        Trainer, "_evaluate", lambda run, done: replace(evaluate(run, done), loss=losses[done])
    )
    config = having(config, keep_best=True, keep_checkpoints=1, save_every=3)
    best = tmp_path / "checkpoints" / "best"

    def kept() -> tuple[int, list[int]]:
        return checkpoint.load_training(checkpoint.find(best), "cpu")["step"], steps_saved(tmp_path)

    with monkeypatch.context() as patch:
        keep = Trainer._keep_if_best
        patch.setattr(
            Trainer, "_keep_if_best", lambda run, done, loss: killed() if done == 6 else keep(run, done, loss)
        )
        with pytest.raises(Killed):
            train(config, tmp_path)
    assert kept() == (4, [4, 6])
    train(having(config, resume=str(tmp_path)), tmp_path)
    assert kept() == (4, [4, 8])
    assert f"loss 2.5000, {best}: step-00000004" in capsys.readouterr().out
    # Step 10 is evaluated because the run ends there, and is not evaluated again when the run is extended.
    train(having(config, steps=10, resume=str(tmp_path)), tmp_path)
    assert kept() == (10, [10])
    train(having(config, steps=12, eval_every=12, resume=str(tmp_path)), tmp_path)
    assert kept() == (10, [10, 12])
    assert checkpoint.find(tmp_path).name == "step-00000012"
    assert "while trainer.keep_best" not in capsys.readouterr().out
    # Without keep_best no best is looked for, and the end of the run does not report the old one as the best.
    train(having(config, steps=14, keep_best=False, resume=str(tmp_path)), tmp_path)
    assert f"{best}: step-00000010, the best while trainer.keep_best was on" in capsys.readouterr().out
    model, _ = load_run(best)
    saved = checkpoint.load_weights(checkpoint.at(tmp_path, 10), "cpu")
    assert torch.equal(model.wte.weight, saved["wte.weight"])
    assert Trainer(having(config, init_from=str(best)), tmp_path / "b", CPU).config.trainer.init_from == str(
        checkpoint.at(tmp_path, 10)
    )
    # In another run directory it is the best of the evaluations made there.
    train(having(config, steps=12, resume=str(best)), tmp_path / "other")
    found, loss = checkpoint.best(tmp_path / "other")
    assert (found.name, loss) == ("step-00000010", 2.4)


# ---- runs that do not train ----------------------------------------------------------------------


def test_a_run_of_zero_steps_only_evaluates(config, tmp_path, capsys):
    """It evaluates the random initial weights; nothing is saved, and nothing that was not measured is reported."""
    config = having(config, steps=0)
    summary = train(config, tmp_path / "run")
    assert summary["val/loss"] == pytest.approx(math.log(257), abs=0.1)
    assert summary["val/tokens"] == Trainer(config, tmp_path / "other", CPU).corpus.val.tokens - 1
    assert [name for name in summary if name.startswith("perf/")] == ["perf/peak_resident_gib"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert (tmp_path / "run" / "sample.txt").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert [row["step"] for row in rows(tmp_path / "run")] == ["0"]
    said = capsys.readouterr()
    assert "no steps: evaluation only" in said.out
    assert "not measured: no step ran\n" in said.out
    assert "sample.py" not in said.out  # which would find no checkpoint
    assert "0/0" not in said.err
    compare.main([str(tmp_path / "run")])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "finished" in line)
    assert f"{summary['val/loss']:.4f}" in line


def test_a_finished_run_resumed_elsewhere_only_evaluates_and_saves_nothing(config, tmp_path, capsys):
    whole = train(config, tmp_path / "run")
    capsys.readouterr()
    again = train(having(config, resume=str(tmp_path / "run")), tmp_path / "other")
    assert again["val/loss"] == whole["val/loss"]
    assert not steps_saved(tmp_path / "other")
    assert "sample.py" not in capsys.readouterr().out


def test_a_mismatched_vocabulary_size_is_refused_before_tokenising(config, tmp_path):
    data = replace(config.data, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="the tokenizer bytes has 257 tokens"):
        train(replace(config, data=data, model=replace(config.model, vocab_size=50304)), tmp_path / "run")
    assert not (tmp_path / "cache").exists()


# ---- several ranks -------------------------------------------------------------------------------

# In three runs, only rank 1 has a bad gradient, is told to stop in a step, or is told to stop in an evaluation. They
# log nothing before they end.
RANKS = """
import dataclasses, math, os, pathlib, pickle, signal, sys
import torch.distributed as dist
from training.distributed import world
from training.trainer import Trainer

config = pickle.loads(bytes.fromhex(sys.argv[1]))
with world("cpu") as ranks:
    def ended(name, save_every, disturb, eval_every=0):
        every = dict(log_every=10**6, eval_every=eval_every, save_every=save_every)
        trainer = dataclasses.replace(config.trainer, **every)
        run = Trainer(dataclasses.replace(config, trainer=trainer), pathlib.Path(name), ranks)
        step = run.train_step
        run.train_step = lambda n, *batch: (n == 2 and ranks.rank == 1 and disturb(run), step(n, *batch))[1]
        try:
            run.run()
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__} {error}"

    poison = lambda run: run.model.wte.weight.register_hook(lambda gradient: gradient * math.nan)
    diverged = ended("diverged", 3, poison)

    def tell(run):  # while the ranks agree that nobody was told to stop
        agree = dist.all_reduce

        def agree_and_be_told(*args, **options):
            agree(*args, **options)
            dist.all_reduce = agree
            os.kill(os.getpid(), signal.SIGTERM)

        dist.all_reduce = agree_and_be_told

    def tell_evaluation(run):
        def told(*_):
            if not run.model.training:
                os.kill(os.getpid(), signal.SIGTERM)

        run.model.register_forward_pre_hook(told)

    stopped = ended("stopped", 0, tell)
    evaluating = ended("evaluating", 0, tell_evaluation, eval_every=5)
    pathlib.Path(f"rank{ranks.rank}").write_text(f"{diverged}\\n{stopped}\\n{evaluating}")
"""


def test_all_ranks_stop_at_the_same_step_for_the_same_reason(config, tmp_path, user_environment):
    config = having(config, steps=50)
    (tmp_path / "ranks.py").write_text(RANKS)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *("ranks.py", pickle.dumps(config).hex()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=user_environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    ends = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in (0, 1)]
    assert ends[0] == ends[1]
    diverged, *stopped = ends[0]
    assert diverged.startswith("ConfigError the gradient norm is nan (not finite in 1 of 16 parameters,")
    assert stopped == [f"SystemExit {128 + signal.SIGTERM}"] * 2
    assert steps_saved(tmp_path / "diverged") == []
    assert steps_saved(tmp_path / "stopped") == [4]
    assert steps_saved(tmp_path / "evaluating") == [5]


def test_a_run_stopped_in_its_final_evaluation_makes_it_when_resumed(config, tmp_path, monkeypatch, capsys):
    whole = train(having(config, steps=3), tmp_path / "whole")

    def told(model, *rest):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluation.evaluate(model, *rest)

    def stopped(directory: Path, **settings) -> str:
        with monkeypatch.context() as patch:
            patch.setattr("training.trainer.evaluate", told)
            with pytest.raises(SystemExit, match="130"):
                train(having(config, **settings), directory)
        return capsys.readouterr().out

    assert "stopped at step 3 and saved" in stopped(tmp_path / "told", steps=3, eval_every=0)
    assert not (tmp_path / "told/summary.json").exists()
    again = train(having(config, steps=3, resume=str(tmp_path / "told")), tmp_path / "told")
    assert again["val/loss"] == whole["val/loss"]
    assert stopped(tmp_path / "looked", steps=0).endswith("stopped during the evaluation\n")


# ---- profiling ----------------------------------------------------------------------------------


def test_a_profiled_step_writes_a_trace_and_prints_the_slowest_operations(config, tmp_path, capsys):
    train(having(config, steps=4, profile_step=3), tmp_path / "run")
    trace = tmp_path / "run/trace-step-00000003.json.gz"
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    assert any("aten::mm" in event.get("name", "") for event in events)
    said = capsys.readouterr().out
    assert f"step 3: trace in {trace}" in said
    assert re.search(r"\d+% +[\d.]+ ms +\d+ x  aten::", said)


def test_a_trace_that_cannot_be_written_does_not_end_the_run(config, tmp_path, capsys):
    trace = tmp_path / "run/trace-step-00000003.json.gz"
    trace.parent.mkdir()
    trace.symlink_to("/dev/full")  # a disk without room
    assert train(having(config, steps=4, profile_step=3), tmp_path / "run")["steps"] == 4
    said = capsys.readouterr().out
    assert f"step 3: no trace: {trace} cannot be written (No space left on device)" in said
    assert "aten::" in said
    assert not trace.is_symlink()  # no partial trace is left either


def test_profiling_changes_no_loss_and_its_step_has_no_measured_speed(config, tmp_path):
    train(having(config, steps=8), tmp_path / "plain")
    train(having(config, steps=8, profile_step=6), tmp_path / "profiled")
    assert measured(tmp_path / "plain", "train/loss") == measured(tmp_path / "profiled", "train/loss")
    assert 6 not in measured(tmp_path / "profiled", "perf/tokens_per_second")
    assert {5, 7} <= set(measured(tmp_path / "profiled", "perf/tokens_per_second"))


def test_resuming_keeps_the_time_of_an_evaluation_it_does_not_repeat(config, tmp_path, monkeypatch):
    """A checkpoint is saved before its step is evaluated; here the resumed run does not evaluate that step again."""
    whole, slept = Trainer._evaluate, 0.5

    def slow(run, done):
        time.sleep(slept)
        return whole(run, done)

    monkeypatch.setattr(Trainer, "_evaluate", slow)
    train(having(config, steps=4, eval_every=4), tmp_path)
    train(having(config, steps=6, eval_every=0, resume=str(tmp_path)), tmp_path)
    seconds = [float(row["seconds"]) for row in rows(tmp_path)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2 * slept


def test_a_run_that_cannot_write_its_summary_is_not_logged_as_finished(config, tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(CsvLogger, "finish", lambda _logger, summary: ended.append(summary))
    (tmp_path / "summary.json.partial").mkdir()
    with pytest.raises(ConfigError, match=r"summary\.json cannot be written"):
        train(config, tmp_path)
    assert ended == [{}]


def test_resuming_in_an_unwritable_directory_is_refused_with_the_remedy(config, tmp_path):
    train(config, tmp_path)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "summary.json").mkdir()  # cannot be removed as a file, by root either
    with pytest.raises(
        ConfigError, match=r"cannot be written \(.*\): free some disk space, or name a writable directory"
    ):
        train(having(config, steps=10, resume=str(tmp_path)), tmp_path)


@pytest.mark.parametrize("step", [0, 9])
def test_a_profile_step_outside_the_run_is_refused(config, step):
    with pytest.raises(ConfigError, match=rf"profile_step is {step}; it must be from 1 to trainer.steps=8"):
        having(config, profile_step=step)
