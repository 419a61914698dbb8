"""Who may train in a run directory, and what a refused run leaves of it."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import train as command
from tests.conftest import measured, text_data
from training.config import Config, ConfigError, LoggerConfig, ModelConfig, TrainerConfig
from training.schedule import ScheduleConfig
from training.trainer import Trainer, train


@pytest.fixture
def config(text_file) -> Config:
    return Config(
        model=ModelConfig(seq_len=32, n_layer=1, n_head=2, n_embd=32),
        data=text_data(text_file),
        trainer=TrainerConfig(
            steps=8, batch_tokens=64, log_every=1, eval_every=0, device="cpu", sample_tokens=5
        ),
        logger=LoggerConfig(wandb=False),
    )


def having(config: Config, **settings) -> Config:
    return replace(config, trainer=replace(config.trainer, **settings))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and link below a folder, but for the lock."""
    return {
        str(path.relative_to(folder)): str(path.readlink()).encode()
        if path.is_symlink()
        else path.read_bytes()
        for path in folder.rglob("*")
        if (path.is_symlink() or path.is_file()) and path.name != ".lock"
    }


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_a_directory_that_is_in_use_is_refused(config, tmp_path, monkeypatch, resume):
    """Whether it starts there at the same time or resumes: the first run goes on as if nothing had been."""
    train_step, refused = Trainer.train_step, []

    def step_beside_another(run, step, *batch):
        if step == 4:
            again = having(config, resume=str(tmp_path)) if resume else config
            with pytest.raises(ConfigError, match="is in use: another process trains there") as refusal:
                train(again, tmp_path)
            refused.append(refusal)
        return train_step(run, step, *batch)

    monkeypatch.setattr(Trainer, "train_step", step_beside_another)
    assert train(having(config, save_every=2), tmp_path)["steps"] == 8
    assert len(refused) == 1
    monkeypatch.undo()
    train(having(config, steps=9, resume=str(tmp_path)), tmp_path)  # nothing holds it by now


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WANDB_HTTP_TIMEOUT", "soon", "should be a valid number"),
        ("WANDB_RESUME", "perhaps", "should be 'allow', 'must', 'never' or 'auto'"),
        ("WANDB_BASE_URL", "nope", "should be a valid URL"),
        ("WANDB_TAGS", "a,,b", "Tag at index 1 is empty"),
        ("WANDB_PROJECT", "a/b", "Invalid project name 'a/b'"),
    ],
)
def test_a_malformed_variable_of_wandb_is_refused_in_one_line_and_changes_nothing(
    started, tiny, monkeypatch, tmp_path, name, value, said
):
    run = [*tiny, "hydra.run.dir=run", "trainer.save_every=6"]
    assert started(command.main, *run) == 0
    before = contents(tmp_path)
    monkeypatch.setenv(name, value)
    resumes = ["trainer.resume=run/checkpoints/step-00000006", "logger=wandb", "logger.mode=offline"]
    error = started(command.main, *run, *resumes)
    assert error.startswith(f"error: {name}={value}: ")
    assert said in error
    assert "\n" not in error
    assert contents(tmp_path) == before


# ---- trainer.resume=auto -------------------------------------------------------------------------


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


def test_a_run_whose_text_was_moved_resumes_since_its_tokens_are_the_same(config, tmp_path):
    train(config, tmp_path / "run")
    moved = tmp_path / "moved.txt"
    shutil.copy(config.data.files[0], moved)
    goes_on = having(replace(config, data=replace(config.data, files=str(moved))), steps=9)
    resumes = having(goes_on, resume=str(tmp_path / "run"))
    assert train(resumes, tmp_path / "run")["steps"] == 9
    moved.write_text(moved.read_text().replace("fox", "cat"))
    with pytest.raises(
        ConfigError, match=r"was trained with corpus=sha256:\w+, but this run has corpus=sha256:"
    ):
        train(having(resumes, steps=10), tmp_path / "run")


def test_a_resume_reports_what_was_resolved_otherwise_though_no_setting_changed(config, tmp_path, capsys):
    train(config, tmp_path)
    facts = json.loads((tmp_path / "facts.json").read_text())
    (tmp_path / "facts.json").write_text(json.dumps(facts | {"world_size": 4, "attention": "flash"}))
    train(having(config, steps=9, resume=str(tmp_path)), tmp_path)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  changed "))
    assert line.split("  ")[-1].strip() == "trainer.steps 8 -> 9, attention flash -> sdpa, world_size 4 -> 1"


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
    assert "warm-up" not in banner(0.005)


@pytest.mark.parametrize("text", ["", "\0\0\0", "[1"])
def test_a_damaged_record_does_not_prevent_resuming(config, tmp_path, text):
    """As a power cut leaves them; the checkpoint alone decides."""
    train(having(config, keep_best=True, eval_every=4), tmp_path)
    for name in ("facts.json", "config.yaml", "summary.json", "checkpoints/best/validation_loss", "wandb_id"):
        (tmp_path / name).write_text(text)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("9," + "\0" * 40)
    train(having(config, keep_best=True, steps=9, resume=str(tmp_path)), tmp_path)
    assert sorted(measured(tmp_path, "train/loss")) == list(range(1, 10))
