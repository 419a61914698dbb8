"""What a run does from its first step to its last: the best checkpoint, ranks, signals, profiling."""

import base64
import gzip
import json
import math
import os
import pickle
import re
import select
import signal
import sys
import termios
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data import DataError
from data.tokenizer import load_tokenizer
from kernels import AttentionError
from reproduce.comparison import compare
from tests.conftest import measured, rows
from tests.training.conftest import CPU, Killed, having, killed, steps_saved
from tests.training.ranks import done_on
from training import building, checkpoint, trainer
from training.config import AttentionConfig, ConfigError, Precision
from training.console import Progress
from training.load_run import load_run
from training.loggers import CsvLogger
from training.precision import cast_together
from training.trainer import Trainer, train


def test_an_attention_tier_without_a_usable_backend_is_refused(config, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    wanted = replace(config, attention=AttentionConfig(tier="hopper"))
    with pytest.raises(
        AttentionError,
        match=r"tier=\w+ applies to flash only.* needs a CUDA device, .*; leave attention\.tier out",
    ):
        Trainer(wanted, tmp_path, CPU)


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


def test_a_run_alone_ends_with_the_weights_of_autograds_own_casts_and_additions(
    config, tmp_path, monkeypatch
):
    ended, added, called = [], [], []

    def as_autograd(loss, model, graphs):
        added.append(loss)
        loss.backward()

    def together(model, dtype):
        local = cast_together(model, dtype)
        return lambda *tensors, **named: called.append(dtype) or local(*tensors, **named)

    monkeypatch.setattr(building, "cast_together", together)

    for folder in (tmp_path / "few", tmp_path / "each"):
        train(having(config, steps=3, micro_batch=1, precision=Precision.bf16), folder)
        ended.append(load_run(folder)[0].state_dict())
        monkeypatch.setattr(trainer, "add_gradients", as_autograd)
        monkeypatch.setattr(building, "cast_together", lambda model, dtype: model)
    assert len(added) == len(called) == 3 * 2  # micro-steps
    torch.testing.assert_close(*ended, rtol=0, atol=0)


# ---- the best checkpoint -------------------------------------------------------------------------


@pytest.mark.slow
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
        return checkpoint.load_training(checkpoint.find(best))["step"], steps_saved(tmp_path)

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
    found, loss, _ = checkpoint.best(tmp_path / "other")
    assert (found.name, loss) == ("step-00000010", 2.4)


# ---- a bounded evaluation ------------------------------------------------------------------------


def test_bounded_evaluations_are_of_the_same_tokens_and_the_last_is_of_all(config, tmp_path, capsys):
    """However a batch is split; 300 tokens are nine sequences and a part, and five batches of two."""
    whole = train(having(config, keep_best=True), tmp_path / "whole")
    part = train(having(config, eval_tokens=300, keep_best=True), tmp_path / "part")
    said = capsys.readouterr().out
    assert "evaluation  300 tokens each time, at the end all of them" in said
    assert re.search(r"best +loss \d\.\d{4} \(first 300 tokens\), ", said)
    train(having(config, eval_tokens=300, micro_batch=1), tmp_path / "split")
    assert (part["val/loss"], part["val/tokens"]) == (whole["val/loss"], whole["val/tokens"])
    losses = measured(tmp_path / "part", "val/loss")
    split = measured(tmp_path / "split", "val/loss")
    assert sorted(losses) == [2, 4, 6, 8]
    assert split == pytest.approx(losses, rel=1e-5)
    # What the model of the best checkpoint gives on those tokens: bests are compared by them at the end too.
    found, best, tokens = checkpoint.best(tmp_path / "part")
    assert tokens == 300
    run = Trainer(config, tmp_path / "other", CPU)
    run.model.load_state_dict(checkpoint.load_weights(found, "cpu"))
    tokens = run.plan.corpus.val.read(0, 301)
    nats = 0.0
    for start in range(0, 300, 32):
        window = torch.from_numpy(tokens[start : start + 33])
        with torch.no_grad():
            nats += float(run.model(window[None, :-1], window[None, 1:])) * (len(window) - 1)
    assert best == pytest.approx(nats / 300, rel=1e-5)
    bits = measured(tmp_path / "part", "val/bits_per_byte")[6]
    in_text = int((tokens != 256).sum())
    assert bits == pytest.approx(losses[6] * 300 / (math.log(2) * in_text), rel=1e-5)


@pytest.mark.slow
def test_the_best_by_other_tokens_is_not_compared_with(config, tmp_path):
    first = having(config, eval_tokens=300, keep_best=True, steps=4)
    train(first, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = having(first, steps=6, resume=str(tmp_path))
    link = tmp_path / "checkpoints" / "best"
    for tokens in (200, None):
        with pytest.raises(
            ConfigError, match=rf"{link} is the best .* over 300 tokens, .*eval_tokens=300, or remove"
        ):
            train(having(again, eval_tokens=tokens), tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    train(having(again, eval_tokens=200, keep_best=False), tmp_path)
    train(having(again, steps=8), tmp_path)  # the same tokens again
    link.unlink()
    train(having(again, steps=10, eval_tokens=200), tmp_path)
    assert checkpoint.best(tmp_path).tokens == 200
    with pytest.raises(ConfigError, match=r"over 200 tokens, to which one over [\d,]+ does not compare"):
        train(having(again, steps=12, eval_tokens=None), tmp_path)


# ---- runs that do not train ----------------------------------------------------------------------


def test_a_run_of_zero_steps_only_evaluates(config, tmp_path, capsys):
    """It evaluates the random initial weights; nothing is saved, and nothing that was not measured is reported."""
    config = having(config, steps=0)
    summary = train(config, tmp_path / "run")
    assert summary["val/loss"] == pytest.approx(math.log(257), abs=0.1)
    assert summary["val/tokens"] == Trainer(config, tmp_path / "other", CPU).plan.corpus.val.tokens - 1
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
            done = agree(*args, **options)
            if options.get("group") is run.interrupt._hosts:  # not gradients
                dist.all_reduce = agree
                os.kill(os.getpid(), signal.SIGTERM)
            return done

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


@pytest.mark.slow
def test_all_ranks_stop_at_the_same_step_for_the_same_reason(config, tmp_path, user_environment):
    config = having(config, steps=50)
    (tmp_path / "ranks.py").write_text(RANKS)
    done_on(2, ["ranks.py", pickle.dumps(config).hex()], tmp_path, user_environment)
    ends = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in (0, 1)]
    assert ends[0] == ends[1]
    diverged, *stopped = ends[0]
    assert diverged.startswith("ConfigError the gradient norm is nan (not finite in 1 of 16 parameters,")
    assert stopped == [f"SystemExit {128 + signal.SIGTERM}"] * 2
    assert steps_saved(tmp_path / "diverged") == []
    assert steps_saved(tmp_path / "stopped") == [4]
    assert steps_saved(tmp_path / "evaluating") == [5]


def test_a_run_frees_what_an_earlier_one_compiled(config, tmp_path):
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    compiled(torch.ones(1))
    train(having(config, steps=1), tmp_path / "run")
    compiled(torch.ones(1))
    assert len(graphs) == 2


# ---- the console ---------------------------------------------------------------------------------


def test_the_line_of_steps_comes_after_the_banner(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    train(having(config, steps=1), tmp_path / "run")
    assert re.search(r"^tilegpt\n(  .*\n)+step 0/1\n", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("steps", [0, 5])
def test_a_long_evaluation_is_counted_on_the_line_and_a_short_one_is_not(steps, terminal):
    said = terminal(columns=80)
    progress = Progress(0, steps, shown=True)
    for seconds, shown in ((0.0, False), (0.11, True)):
        assert [time.sleep(seconds) or batch for batch in progress.evaluating("abc", 3)] == [*"abc"]
        assert ("evaluating 2/3 " in said()) is shown
    progress.close()


def test_the_time_left_is_that_of_the_steps_and_a_loss_names_its_own_step(
    config, tmp_path, monkeypatch, terminal, capsys
):
    train_step, evaluate = Trainer.train_step, Trainer._evaluate

    def steps(run, *batch):
        time.sleep(0.11)  # as often as the line is drawn
        return train_step(run, *batch)

    def evaluates(run, done):
        time.sleep(3 * (done == 6))
        return evaluate(run, done)

    monkeypatch.setattr(Trainer, "train_step", steps)
    monkeypatch.setattr(Trainer, "_evaluate", evaluates)
    said = terminal(columns=120)
    train(having(config, steps=12, log_every=5, eval_every=6), tmp_path)
    drawn = re.findall(r"step (\d+)/12 .*?loss [\d.]+ at step (\d+) .*?00:(\d\d) left", said())
    named = {int(step): int(of) for step, of, _ in drawn}
    assert (named[4], named[5], named[9], named[10]) == (1, 5, 5, 10)
    assert max(int(left) for step, _, left in drawn if int(step) > 6) < 3


def test_steps_are_counted_as_everywhere_with_commas(terminal):
    said = terminal(columns=80)
    Progress(2400, 12000, shown=True).close()
    assert "step 2,400/12,000 " in said()


def test_a_terminal_that_does_not_know_its_width_gets_lines(terminal):
    said = terminal(columns=0)
    Progress(0, 5, shown=True).close()
    assert said() == "step 0/5\r\n"


def test_a_line_is_in_a_file_before_the_run_ends(tmp_path, monkeypatch):
    with open(tmp_path / "log", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        progress = Progress(0, 5, shown=True)
        progress.say("step 1: validation loss 2.0")
        assert (tmp_path / "log").read_text() == "step 1: validation loss 2.0\n"
        progress.close()


@pytest.fixture
def terminal(monkeypatch):
    """Make stderr a terminal so wide; returns a function that reads what was written to it."""

    def make(columns: int):
        ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (24, columns))
        monkeypatch.setattr(sys, "stderr", os.fdopen(theirs, "w"))
        stack.enter_context(sys.stderr)
        stack.callback(os.close, ours)
        return lambda: os.read(ours, 65536).decode() if select.select([ours], [], [], 0)[0] else ""

    with ExitStack() as stack:
        yield make


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


def test_a_run_that_cannot_write_its_summary_is_not_logged_as_finished(config, tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(CsvLogger, "finish", lambda _logger, summary: ended.append(summary))
    (tmp_path / "summary.json.partial").mkdir()
    with pytest.raises(ConfigError, match=r"summary\.json cannot be written"):
        train(config, tmp_path)
    assert ended == [{}]


@pytest.mark.parametrize("step", [0, 9])
def test_a_profile_step_outside_the_run_is_refused(config, step):
    with pytest.raises(ConfigError, match=rf"profile_step is {step}; it must be from 1 to trainer.steps=8"):
        having(config, profile_step=step)
