"""What becomes of a command line: composed, refused, interrupted. In this process, with tasks that train nothing."""

from pathlib import Path

import pytest

from training.config import Config, ConfigError


def never(_config: Config, _run_dir: Path) -> None:
    raise AssertionError("it was to be refused")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("experiment=paper/gpt2_smal", "did you mean paper/gpt2_small? experiment has: compare/gpt2_small, "),
        ("experiment=gpt2_medium", "did you mean paper/gpt2_medium?"),
        ("attention=flsh", "did you mean flash? attention has: auto, "),
        ("trainer.steps 5", "trainer.steps 5: did you mean trainer.steps=5?"),
        ("seed=1 --steps 5 attention=naive", "--steps 5: did you mean trainer.steps=5?"),
        ("--lr=1", "--lr=1: did you mean optimizer.lr=1?"),
        ("trainer.steps", "did you mean trainer.steps=VALUE?"),
        ("--foo", "settings are written key=value"),
        ("attention=naive,sdpa -m seed=1", "seed=1: put options such as -m before or after all"),
        ("=3", "=3: settings are written key=value"),
        ("model=null", "model=null: model takes one of gpt2_large, "),
        ("attention=[naive,sdpa]", "attention=[naive,sdpa]: attention takes one of auto, "),
        ("attention=naive,sdpa", "attention=naive,sdpa: several values are one run each with -m"),
        ("data.files=a,b", "a list is data.files=[a,b], a text with commas \"data.files='a,b'\""),
        ("trainer.sample_prompt=f(x", "trainer.sample_prompt=f(x: it cannot be read; "),
        ("trainer.sample_prompt=it's(x", r"the shell's quotes, " + r'''"trainer.sample_prompt='it\'s(x'"'''),
        ("hydra/launcher=joblib", "hydra/launcher/joblib"),
        ("model.n_embd=32 model.n_head=3", "set model.n_embd=30 or 33, or model.n_head=2 or 4"),
        ("model.dropout=1.5", "model.dropout=1.5: it is a probability"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(started, tmp_path, arguments, said):
    error = started(never, *arguments.split())
    assert error.startswith("error: ")
    assert said in error
    assert "\n" not in error
    assert not any(tmp_path.glob("runs/*"))


def test_one_string_will_do_where_a_list_is_taken(started):
    seen = []
    assert started(lambda config, _: seen.append(config.data), "data.roots=/nope", "data.files=[a,b]") == 0
    assert (seen[0].roots, seen[0].files) == (["/nope"], ["a", "b"])


def test_an_interrupt_before_the_first_step_is_one_line_and_leaves_nothing(started, tmp_path, capsys):
    def interrupted(_config: Config, run_dir: Path) -> None:
        assert run_dir.is_dir()
        raise KeyboardInterrupt

    assert started(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not any((tmp_path / "runs").iterdir())


def test_a_sweep_goes_on_behind_a_refused_run(started, tmp_path):
    ran = []

    def task(config: Config, run_dir: Path) -> None:
        if config.attention.name.startswith("flash"):
            raise ConfigError(f"{config.attention.name} needs a GPU")
        ran.append(config.attention.name)
        (run_dir / "metrics.csv").touch()

    error = started(task, "-m", "attention=naive,flash,flash1,sdpa")
    assert ran == ["naive", "sdpa"]
    assert error.splitlines() == [
        "error: 1_nano_flash: flash needs a GPU",
        "error: 2_nano_flash1: flash1 needs a GPU",
    ]
    (sweep,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in sweep.glob("*_nano_*")) == ["0_nano_naive", "3_nano_sdpa"]


def test_what_is_no_users_mistake_is_not_caught(started):
    def broken(_config: Config, _run_dir: Path) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        started(broken)
