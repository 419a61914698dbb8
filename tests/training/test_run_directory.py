"""Who may train in a run directory, and what a refused run leaves of it."""

import pytest
import wandb

import train as command
from tests.training.conftest import contents, having
from training.config import ConfigError
from training.trainer import Trainer, train


@pytest.mark.one_in(2)
@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_a_directory_that_is_in_use_is_refused(config, tmp_path, monkeypatch, resume):
    """Whether it starts there at the same time or resumes: the first run goes on as if nothing had been."""
    train_step, refused = Trainer.train_step, []

    def step_while_another_starts(run, step, *batch):
        if step == 4:
            again = having(config, resume=str(tmp_path)) if resume else config
            with pytest.raises(ConfigError, match="is in use: another process trains there") as refusal:
                train(again, tmp_path)
            refused.append(refusal)
        return train_step(run, step, *batch)

    monkeypatch.setattr(Trainer, "train_step", step_while_another_starts)
    assert train(having(config, save_every=2), tmp_path)["steps"] == 8
    assert len(refused) == 1
    monkeypatch.undo()
    train(having(config, steps=9, resume=str(tmp_path)), tmp_path)  # nothing holds it by now


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WANDB_HTTP_TIMEOUT", "soon", "should be a valid number"),
        ("WANDB_RESUME", "perhaps", "should be 'allow', 'must', 'never' or 'auto'"),
        ("WANDB_BASE_URL", "nope", "should be a valid URL"),
        ("WANDB_TAGS", "a,,b", "Tag at index 1 is empty"),
        ("WANDB_PROJECT", "a/b", "Invalid project name 'a/b'"),
        ("WANDB_SERVICE", "junk", "WANDB_SERVICE='junk'"),
        ("WANDB_IDENTITY_TOKEN_FILE", "gone", "there is no such file"),
    ],
)
def test_a_malformed_variable_of_wandb_is_refused_in_one_line_and_changes_nothing(
    started, tiny, monkeypatch, tmp_path, name, value, said
):
    run = [*tiny, "hydra.run.dir=run", "trainer.save_every=6"]
    assert started(command.main, *run) == 0
    before = contents(tmp_path)
    wandb.teardown()  # a service that another test of this process has started would serve
    monkeypatch.setenv(name, value)
    resumes = ["trainer.resume=run/checkpoints/step-00000006", "logger=wandb", "logger.mode=offline"]
    error = started(command.main, *run, *resumes)
    assert error.startswith(
        f"error: {name}={value}: " if name != "WANDB_SERVICE" else "error: wandb cannot start ("
    )
    assert said in error
    assert "\n" not in error
    assert contents(tmp_path) == before
