"""A resumed run goes on as if nothing had been, and says what has changed."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import measured, rows
from tests.training.conftest import CPU, Killed, contents, having, killed, steps_saved
from training import checkpoint, evaluation
from training.config import ConfigError, OptimizerConfig
from training.optimizer import OptimizerName
from training.parallel.config import ParallelConfig
from training.schedule import ScheduleConfig
from training.trainer import Trainer, train


def test_resuming_from_an_older_checkpoint_drops_everything_after_it(config, tmp_path):
    """The summary is dropped as well: it belongs to the abandoned branch."""
    train(having(config, save_every=2, keep_checkpoints=9), tmp_path)
    start = tmp_path / "checkpoints" / "step-00000004"
    saved = checkpoint.load_training(start)["seconds"]
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


@pytest.mark.one_in(2)
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


@pytest.mark.slow
def test_extending_a_finished_run_keeps_its_final_evaluation(config, tmp_path):
    """With eval_every=5 none is due at step 8, so the resumed run does not repeat it."""
    config = having(config, eval_every=5)
    train(config, tmp_path)
    before = measured(tmp_path, "val/loss")
    train(having(config, steps=12, resume=str(tmp_path)), tmp_path)
    after = measured(tmp_path, "val/loss")
    assert (sorted(before), sorted(after)) == ([5, 8], [5, 8, 10, 12])
    assert after.items() >= before.items()


@pytest.mark.slow
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
    question = {"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": list("abcd"), "label": 0}
    (tmp_path / "one.jsonl").write_text(json.dumps(question))
    asked = {"hellaswag": True, "hellaswag_file": str(tmp_path / "one.jsonl")}
    goes_on = having(config, steps=9, save_every=3, resume=str(tmp_path / "a"), **asked)
    goes_on = replace(goes_on, parallel=ParallelConfig(timeout=90.0))
    train(replace(goes_on, optimizer=OptimizerConfig(lr=1e-4)), tmp_path / "b")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  changed "))
    assert line.split("  ")[-1].strip() == "optimizer.lr 0.0006 -> 0.0001, trainer.steps 8 -> 9"
    wider = replace(goes_on, seed=1, model=replace(config.model, n_embd=64))
    said = r"with model.n_embd=32, seed=1337, but this run has model.n_embd=64, seed=1; .*a/environment.json"
    with pytest.raises(ConfigError, match=said):
        train(wider, tmp_path / "c")
    with pytest.raises(
        ConfigError, match=r"at step 8, beyond trainer.steps=7; .* to evaluate it, use trainer.init_from="
    ):
        train(having(goes_on, steps=7), tmp_path / "c")


@pytest.mark.slow
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


def test_resuming_in_an_unwritable_directory_is_refused_with_the_remedy(config, tmp_path):
    train(config, tmp_path)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "summary.json").mkdir()  # cannot be removed as a file, by root either
    with pytest.raises(
        ConfigError, match=r"cannot be written \(.*\): free some disk space, or name a writable directory"
    ):
        train(having(config, steps=10, resume=str(tmp_path)), tmp_path)


@pytest.mark.slow
def test_a_checkpoint_whose_parts_are_lost_is_refused_with_the_one_before_it(config, tmp_path):
    train(having(config, steps=2, keep_checkpoints=9), tmp_path)
    train(having(config, steps=4, keep_checkpoints=9, resume=str(tmp_path)), tmp_path)
    older, newer = checkpoint.saved(tmp_path)
    (newer / checkpoint.WEIGHTS).unlink()
    state = checkpoint.load_training(newer)
    del state["optimizer"]  # a model's in parts is there
    torch.save(state, newer / "training.pt")
    with pytest.raises(
        ConfigError, match=rf"/parts has lost \.metadata.*; use the checkpoint before it, {older}"
    ):
        train(having(config, steps=6, resume=str(tmp_path)), tmp_path)


def test_a_finished_run_is_not_resumed_elsewhere_where_it_would_have_no_weights(config, tmp_path):
    train(config, tmp_path / "run")
    for path in ("run", "run/checkpoints/step-00000008"):
        with pytest.raises(
            ConfigError,
            match=r"at step 8, where nothing is left to train with trainer\.steps=8; to train it further, set more",
        ):
            train(having(config, resume=str(tmp_path / path)), tmp_path / "other")
    assert not any((tmp_path / "other").iterdir())


def test_a_finished_run_resumed_in_its_own_directory_keeps_the_speed_it_measured(config, tmp_path, capsys):
    train(config, tmp_path)
    assert "perf/tokens_per_second" in (tmp_path / "summary.json").read_text()
    before = contents(tmp_path)
    train(having(config, resume=str(tmp_path)), tmp_path)
    assert "holds the finished run: nothing to do" in capsys.readouterr().out
    assert contents(tmp_path) == before


def test_a_run_stopped_because_it_is_slow_is_told_what_helps(config, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    train_step = Trainer.train_step

    def slowed(run, step, *batch):
        if step == 5:
            time.sleep(0.5)
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(run, step, *batch)

    monkeypatch.setattr(Trainer, "train_step", slowed)
    with pytest.raises(SystemExit, match="130"):
        train(having(config, log_every=1), tmp_path)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("its speed varied from ")
    assert said.endswith("with OMP_WAIT_POLICY=passive a run suffers less")


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


# ---- trainer.resume=auto -------------------------------------------------------------------------


@pytest.mark.slow
def test_auto_starts_a_run_resumes_it_after_a_signal_and_leaves_it_when_finished(
    config, tmp_path, monkeypatch, capsys
):
    """The life of a requeued job, always the same command: it begins with other weights, is warned and goes on."""
    train(having(config, steps=2), tmp_path / "weights")
    whole = train(having(config, init_from=str(tmp_path / "weights")), tmp_path / "whole")
    job = having(config, resume="auto", init_from=str(tmp_path / "weights"))
    train_step = Trainer.train_step

    def warned(run, step, *batch):
        if step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return train_step(run, step, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", warned)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGUSR1)):
            train(job, tmp_path / "job")
    said = capsys.readouterr().out
    assert "stopped at step 4 and saved; the same command, with this hydra.run.dir, resumes it" in said
    assert train(job, tmp_path / "job")["val/loss"] == whole["val/loss"]
    assert sorted(measured(tmp_path / "job", "train/loss")) == list(range(1, 9))
    before = contents(tmp_path / "job")
    assert train(job, tmp_path / "job")["val/loss"] == whole["val/loss"]
    assert "holds the finished run: nothing to do" in capsys.readouterr().out
    assert contents(tmp_path / "job") == before


def test_auto_starts_again_where_a_run_died_before_its_first_checkpoint(config, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save", killed)
        with pytest.raises(Killed):
            train(config, tmp_path)
    train(having(config, resume="auto"), tmp_path)
    assert sorted(measured(tmp_path, "train/loss")) == list(range(1, 9))


# ---- what a resumed run compares -----------------------------------------------------------------


@pytest.mark.slow
def test_a_run_whose_text_was_moved_resumes_since_its_tokens_are_the_same(config, tmp_path):
    train(config, tmp_path / "run")
    moved = tmp_path / "moved.txt"
    shutil.copy(config.data.files[0], moved)
    goes_on = having(replace(config, data=replace(config.data, files=str(moved))), steps=9)
    resumes = having(goes_on, resume=str(tmp_path / "run"))
    assert train(resumes, tmp_path / "run")["steps"] == 9
    moved.write_text(moved.read_text().replace("fox", "cat"))
    with pytest.raises(ConfigError, match=r"was trained with corpus=\w+, but this run has corpus="):
        train(having(resumes, steps=10), tmp_path / "run")
    less = replace(config.data, files=resumes.data.files, val_fraction=0.3)
    with pytest.raises(ConfigError, match=r"but this run has corpus=\w+, data.val_fraction=0.3; "):
        train(having(replace(resumes, data=less), steps=10), tmp_path / "run")


@pytest.mark.slow
def test_a_resume_reports_what_was_resolved_otherwise_though_no_setting_changed(config, tmp_path, capsys):
    train(config, tmp_path)
    facts = json.loads((tmp_path / "facts.json").read_text())
    (tmp_path / "facts.json").write_text(
        json.dumps(facts | {"world_size": 4, "attention": "flash", "cuda_graphs": True})
    )
    train(having(config, steps=9, resume=str(tmp_path)), tmp_path)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  changed "))
    resolved = "attention flash -> sdpa, cuda_graphs True -> False, world_size 4 -> 1"
    assert line.split("  ")[-1].strip() == f"trainer.steps 8 -> 9, {resolved}"


@pytest.mark.slow
@pytest.mark.parametrize("was", [False, True])
@pytest.mark.parametrize("name", ["precise_delta", "gather_keys"])
def test_a_run_from_before_a_setting_could_be_null_is_told_whether_that_changes_it(
    config, tmp_path, capsys, name, was
):
    train(config, tmp_path)
    facts, settings = tmp_path / "facts.json", tmp_path / "config.yaml"
    recorded = json.loads(facts.read_text())
    assert recorded.pop(name) is False
    facts.write_text(json.dumps(recorded))
    before = settings.read_text()
    settings.write_text(before.replace(f"{name}: null", f"{name}: {was}".lower()))
    assert settings.read_text() != before
    train(having(config, steps=9, resume=str(tmp_path)), tmp_path)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  changed "))
    told = f", {name} True -> False" if was else ""
    assert line.split("  ")[-1].strip() == "trainer.steps 8 -> 9" + told


@pytest.mark.slow
def test_a_resume_that_warms_up_once_more_says_so_and_how_to_avoid_it(config, tmp_path, monkeypatch, capsys):
    warm = replace(config, schedule=ScheduleConfig(warmup_fraction=0.25))
    train(warm, tmp_path / "run")
    monkeypatch.setattr(Trainer, "train_step", lambda *_: pytest.fail("it would train"))

    def banner(fraction: float) -> str:
        goes_on = having(replace(config, schedule=ScheduleConfig(warmup_fraction=fraction)), steps=400)
        with pytest.raises(pytest.fail.Exception):
            train(having(goes_on, resume=str(tmp_path / "run")), tmp_path / f"longer{fraction}")
        return capsys.readouterr().out

    said = "once more until step 100, a fraction of all 400; the run so far ended its own at step 2: keep that with"
    assert f"{said} schedule.warmup_fraction=0.005" in banner(0.25)
    assert "  warm-up " not in banner(0.005)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("text", ["", "\0\0\0", "[1]"])
def test_a_damaged_record_does_not_prevent_resuming(config, tmp_path, text):
    """As a power cut leaves them; the checkpoint alone decides."""
    train(having(config, keep_best=True, eval_every=4), tmp_path)
    for name in ("facts.json", "config.yaml", "summary.json", "checkpoints/best/validation_loss", "wandb_id"):
        (tmp_path / name).write_text(text)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("9," + "\0" * 40)
    train(having(config, keep_best=True, steps=9, resume=str(tmp_path)), tmp_path)
    assert sorted(measured(tmp_path, "train/loss")) == list(range(1, 10))


@pytest.mark.slow
def test_a_resumed_run_with_muon_ends_with_the_same_weights_and_moments(config, tmp_path):
    config = replace(config, optimizer=OptimizerConfig(name=OptimizerName.muon))
    train(config, tmp_path / "whole")
    train(having(config, steps=8, save_every=3), tmp_path / "cut")
    start = tmp_path / "cut/checkpoints/step-00000006"
    train(having(config, resume=str(start)), tmp_path / "resumed")
    whole, resumed = (checkpoint.find(tmp_path / name) for name in ("whole", "resumed"))
    assert (whole / checkpoint.WEIGHTS).read_bytes() == (resumed / checkpoint.WEIGHTS).read_bytes()
    states = [checkpoint.load_training(each)["optimizer"]["state"] for each in (whole, resumed)]
    for ours, theirs in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())
    assert any("momentum_buffer" in state for state in states[0].values())


def test_a_run_cannot_change_its_optimizer_and_an_older_checkpoint_is_adamws(config, tmp_path):
    train(config, tmp_path / "a")
    goes_on = having(config, steps=9, resume=str(tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"trained with optimizer\.name=adamw, but .* optimizer\.name=muon"):
        train(replace(goes_on, optimizer=OptimizerConfig(name=OptimizerName.muon)), tmp_path / "b")
    file = checkpoint.find(tmp_path / "a") / "training.pt"
    state = torch.load(file)
    del state["identity"]["optimizer.name"], state["identity"]["optimizer.decay_embeddings"]
    torch.save(state, file)
    assert train(goes_on, tmp_path / "c")["steps"] == 9
